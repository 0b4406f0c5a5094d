"""Messages are bounded in time and size, and can name only known dtypes, settings and steps."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError
from hf_distca.pool.protocol import JsonLineConnection, read_config, read_dtype
from hf_distca.pool.server import STEPS, Server
from hf_distca.schedule.cost import AttentionShape, CostModel
from test_rooms import JOINT_STEPS


@pytest.fixture
def connected() -> Iterator[tuple[JsonLineConnection, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as client,
    ):
        connection = JsonLineConnection(listening.accept()[0], 1.0)
        yield connection, client
        connection.close()


def test_start_of_a_slow_message_is_kept_after_the_timeout(
    connected: tuple[JsonLineConnection, socket.socket],
) -> None:
    connection, client = connected
    ended = threading.Event()

    def trickle() -> None:
        while not ended.wait(0.05):
            client.sendall(b"1")

    thread = threading.Thread(target=trickle)
    thread.start()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        connection.receive(0.3)
    ended.set()
    thread.join()
    assert time.monotonic() - began < 1.0
    client.sendall(b"2\n")
    assert str(connection.receive(1.0)).endswith("12"), "bytes before the timeout are kept"


def test_message_longer_than_the_limit_is_refused(
    connected: tuple[JsonLineConnection, socket.socket],
) -> None:
    connection, client = connected
    client.sendall(b'["' + b"x" * 1000)
    with pytest.raises(
        ValueError, match="1002 bytes arrived without the end of a message, but the limit is 100"
    ):
        connection.receive(1.0, 100)
    client.sendall(b'"]\n[1]\n')
    assert connection.receive(1.0) == ["x" * 1000]
    assert connection.receive(1.0, 100) == [1]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
def test_dtypes_of_attention_are_read(dtype: torch.dtype) -> None:
    assert read_dtype(str(dtype).removeprefix("torch.")) is dtype


@pytest.mark.parametrize("name", ["load", "int64", "__doc__", "no such thing"])
def test_names_that_are_no_dtypes_of_attention_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="attention computes in float64"):
        read_dtype(name)


@pytest.mark.parametrize("name", ["/etc/passwd", "costs.json", ["analytic"], 1])
def test_settings_with_a_file_as_cost_model_are_refused(name: object, tmp_path: Path) -> None:
    file, cost = tmp_path / "mine.json", CostModel.make_analytic(AttentionShape(8, 2, 64, 64, 4))
    file.write_text(cost.to_json())
    told = json.loads(json.dumps(asdict(DistCAConfig(tile=8))))
    assert read_config({**told, "cost_model": "analytic"}).cost_model == "analytic"
    assert read_config({**told, "cost_model": {"text": cost.to_json()}}).cost_model == cost
    for other in (name, str(file)):
        with pytest.raises(ConfigError, match=r"cost_model=.* must be 'analytic' or a cost model"):
            read_config({**told, "cost_model": other})


def test_steps_of_a_server_are_the_joint_steps_and_its_own() -> None:
    own = {"end", "use_settings", "begin", "serve", "finish"}
    assert {name: getattr(Server, name) for name in JOINT_STEPS | own} == STEPS
