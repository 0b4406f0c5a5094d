"""The port of a server accepts clients with the token, and other clients cannot block it."""

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
    """Give the address of a server, and the future of the connection that it accepts."""
    monkeypatch.setattr(door, "_HANDSHAKE_SECONDS", SECONDS)
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as thread:
        accepted = thread.submit(door.accept, listening, TOKEN, 5.0)
        yield listening.getsockname(), accepted
        accepted.result().close()


def connect(port: Port) -> None:
    """Connect like rank 0, and check that the server accepts the connection."""
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
def test_silent_clients_do_not_block_rank_0(port: Port, strangers: int, greeting: bytes) -> None:
    """The clients are few, in the middle of a message, or more than the server listens to."""
    address, _ = port
    with ExitStack() as connected:
        for _ in range(strangers):
            client = connected.enter_context(socket.create_connection(address))
            client.sendall(greeting)
        connect(port)


def test_accept_returns_none_if_no_rank_connects() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert door.accept(listening, TOKEN, 0.01) is None


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the test has threads
def test_end_of_a_forked_process_does_not_end_servers(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_client_with_an_endless_message_does_not_block_rank_0(
    port: Port, part: bytes, pause: float
) -> None:
    """A message is bounded in total bytes and in total seconds."""
    address, _ = port
    with socket.create_connection(address) as client:
        sender = threading.Thread(target=send_bytes, args=(client, repeat(part), pause))
        sender.start()
        connect(port)
        sender.join(5.0)
        assert not sender.is_alive()


def test_a_second_process_group_is_refused() -> None:
    """The servers ended with the first process group."""
    observer = PoolObserver(1, 1)
    observer.group = Mock(monitor=object(), has_left=True)
    with pytest.raises(ConfigError, match="first process group of a run"):
        observer.make_group(None, None, 1.0)
