"""The port of a server: it lets in who knows its token, and nobody keeps it from others."""

from __future__ import annotations

import atexit
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import repeat
from typing import Any
from unittest.mock import Mock

import pytest

from hf_distca.errors import ConfigError
from hf_distca.pool import door
from hf_distca.pool.meeting import connect_server
from hf_distca.pool.observer import PoolObserver

TOKEN, SECONDS = "c0ffee", 0.4
Port = tuple[tuple[str, int], Future[Any]]


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[Port]:
    """The address of a server with a token, and what it accepts."""
    monkeypatch.setattr(door, "_HANDSHAKE_SECONDS", SECONDS)
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as thread:
        accepted = thread.submit(door.accept, listening, TOKEN, 5.0)
        yield listening.getsockname(), accepted
        accepted.result().close()


def connect(port: Port) -> None:
    """As rank 0 does. The server accepts it."""
    address, accepted = port
    began = time.monotonic()
    connection = connect_server("a server", address, TOKEN, 5.0)
    assert accepted.result() is not None
    assert time.monotonic() - began < SECONDS
    connection.close()


@pytest.mark.parametrize("told", [None, "", "é", "\ud800", "c0ffe", {"token": TOKEN}, [TOKEN]])
def test_a_client_without_the_token_is_refused_at_once(port: Port, told: object) -> None:
    address, accepted = port
    began = time.monotonic()
    with socket.create_connection(address) as client:
        client.sendall(json.dumps(told).encode() + b"\n")
        assert not client.recv(1)
    assert time.monotonic() - began < SECONDS
    assert not accepted.done()
    connect(port)


@pytest.mark.parametrize(("strangers", "greeting"), [(8, b""), (8, b'["token"'), (600, b"")])
def test_strangers_that_say_nothing_keep_nobody(
    port: Port, strangers: int, greeting: bytes
) -> None:
    """Be they few, in the middle of a message, or more than a server listens to."""
    address, _ = port
    with ExitStack() as connected:
        for _ in range(strangers):
            client = connected.enter_context(socket.create_connection(address))
            client.sendall(greeting)
        connect(port)


def test_a_server_ends_if_no_rank_comes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert door.accept(listening, TOKEN, 0.01) is None


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # there are threads
def test_the_end_of_a_fork_is_not_told_to_servers(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 goes on: its servers hear nothing when a process ends that it forked."""
    address, accepted = port
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    observer = PoolObserver(1, 1)
    observer.servers["a server"] = connect_server("a server", address, TOKEN, 5.0)
    child = os.fork()
    if not child:
        for act in at_exit:
            act()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(TimeoutError):
        accepted.result().receive(SECONDS)
    for act in at_exit:
        act()
    assert accepted.result().receive(SECONDS)[0] == "end"


def send_bytes(client: socket.socket, parts: Iterator[bytes], pause: float) -> None:
    with suppress(OSError):  # once the server has closed
        for part in parts:
            client.sendall(part)
            time.sleep(pause)


@pytest.mark.parametrize(("part", "pause"), [(b"x" * 4096, 0.0), (b"1", 0.05)])
def test_a_client_that_never_ends_a_message_keeps_nobody(
    port: Port, part: bytes, pause: float
) -> None:
    """Be it fast or slow: a message is bounded in bytes and in seconds, both in all."""
    address, _ = port
    with socket.create_connection(address) as client:
        sender = threading.Thread(target=send_bytes, args=(client, repeat(part), pause))
        sender.start()
        connect(port)
        sender.join(5.0)
        assert not sender.is_alive()


def test_a_second_process_group_is_refused() -> None:
    """Its servers ended with the first one."""
    observer = PoolObserver(1, 1)
    observer.group = Mock(monitor=object(), has_left=True)
    with pytest.raises(ConfigError, match="first process group of a run"):
        observer.make_group(None, None, 1.0)
