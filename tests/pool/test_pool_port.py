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
from functools import partial
from importlib.metadata import version
from itertools import repeat
from typing import Any

import pytest
import torch

from hf_distca.errors import ConfigError
from hf_distca.pool import door, server
from hf_distca.pool.controller import PoolController, connect_server
from hf_distca.pool.launch import listen_at, serve_alone
from hf_distca.pool.protocol import JsonLineConnection

TOKEN, SECONDS = "c0ffee", 0.4
Port = tuple[tuple[str, int], Future[Any], list[str]]


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[Port]:
    """The address of a server with a token, what it accepts, and what it says."""
    monkeypatch.setattr(door, "_HANDSHAKE_SECONDS", SECONDS)
    said: list[str] = []
    refusal_reason = partial(door.find_refusal, TOKEN, torch.device("cpu"), said.append)
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as thread:
        accepted = thread.submit(door.accept, listening, refusal_reason, 5.0)
        yield listening.getsockname(), accepted, said
        accepted.result().close()


def connect(address: tuple[str, int], token: str) -> JsonLineConnection:
    return connect_server("{}:{}".format(*address), token, "cpu", time.monotonic() + 5.0, 5.0)


@pytest.mark.parametrize("told", [{}, {"token": None}, {"token": ""}, {"token": "é"}])
def test_a_client_without_the_token_is_refused_at_once(port: Port, told: dict[str, Any]) -> None:
    address, accepted, said = port
    began = time.monotonic()
    with socket.create_connection(address) as client:
        greeting = {"version": version("hf-distca"), "device": "cpu", **told}
        client.sendall(json.dumps(greeting).encode() + b"\n")
        error = json.loads(client.makefile().readline())["error"]
        assert error.startswith("it asks for another token. Set HF_DISTCA_POOL_TOKEN")
        assert not client.recv(1)
    assert time.monotonic() - began < SECONDS
    assert said == [f"turned ranks away: {error}"]
    assert not accepted.done()
    connect(address, TOKEN).close()


def test_rank_0_says_which_server_asks_for_another_token(port: Port) -> None:
    address, *_ = port
    with pytest.raises(ConfigError, match=r"127.0.0.1:\d+ cannot take part: it asks for another"):
        connect(address, "decaf")
    connect(address, TOKEN).close()


@pytest.mark.parametrize(("strangers", "greeting"), [(8, b""), (8, b'{"token"'), (600, b"")])
def test_strangers_that_say_nothing_keep_nobody(
    port: Port, strangers: int, greeting: bytes
) -> None:
    """Be they few, in the middle of a message, or more than a server listens to."""
    address, *_ = port
    with ExitStack() as connected:
        for _ in range(strangers):
            client = connected.enter_context(socket.create_connection(address))
            client.sendall(greeting)
        began = time.monotonic()
        connect(address, TOKEN).close()
        assert time.monotonic() - began < SECONDS


@pytest.mark.parametrize(
    ("host", "token", "warned"),
    [
        ("0.0.0.0", "", True),
        ("127.0.0.1", "", False),
        ("localhost", "", False),
        ("0.0.0.0", TOKEN, False),
    ],
)
def test_a_server_says_that_it_takes_whoever_comes(
    host: str,
    token: str,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where others than this host can come, and no token is asked for."""
    monkeypatch.setattr(server, "serve", lambda *_: 0)
    monkeypatch.setenv("HF_DISTCA_POOL_TOKEN", token)
    with listen_at(host, 0) as listening:
        assert serve_alone(listening, "cpu", None) == 0
    said = capsys.readouterr().err
    assert ("asks for no token" in said and "Set HF_DISTCA_POOL_TOKEN" in said) == warned, said


def test_what_strangers_say_is_shown_without_control_characters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.signal, "signal", lambda *_: None)

    def ask() -> str:
        with socket.create_connection(address) as client:
            client.sendall(b'{"version": "\\u001b[2J"}\n')
            return client.makefile().readline()

    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as thread:
        address = listening.getsockname()
        answer = thread.submit(ask)
        assert server.serve(listening, "", torch.device("cpu"), SECONDS) == 1
    assert "rank 0 runs \x1b[2J" in json.loads(answer.result())["error"]
    assert "rank 0 runs \\x1b[2J" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # there are threads
def test_the_end_of_a_fork_is_not_told_to_servers(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 goes on: its servers hear nothing when a process ends that it forked."""
    address, accepted, _ = port
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    controller = PoolController()
    controller.servers["a server"] = connect(address, TOKEN)
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
    address, *_ = port
    with socket.create_connection(address) as client:
        began = time.monotonic()
        sender = threading.Thread(target=send_bytes, args=(client, repeat(part), pause))
        sender.start()
        connect(address, TOKEN).close()
        assert time.monotonic() - began < 3 * SECONDS
        sender.join(5.0)
        assert not sender.is_alive()
