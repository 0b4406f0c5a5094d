"""What real trackers keep of the balance: TensorBoard's event files, W&B's offline run file,
trackio's database.

One run of two ranks reports to all trackers that are installed; nothing leaves the machine.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from test_trainer import FIGURES

from ranks import RankPool
from tiny_runs import make_trainer, rows

STEPS = 4
# By global step: the figures of distca under their names in the tracker.
Logged = dict[int, dict[str, float]]


@dataclass(frozen=True)
class Run:
    folder: Path
    trackers: list[str]
    history: list[dict[str, Any]]
    contacted: list[str]

    def wanted(self) -> Logged:
        """What a tracker must hold: the figures in the history of rank 0, named as transformers
        renames all training logs.
        """
        logs = {row["step"]: row for row in self.history if "distca/planning_ms" in row}
        return {
            step: {f"train/{name}": row[name] for name in FIGURES} for step, row in logs.items()
        }


def settings(folder: Path) -> dict[str, str]:
    """Environment in which trackers write into `folder` and contact nobody."""
    here = {
        "WANDB_DIR",
        "WANDB_CACHE_DIR",
        "WANDB_CONFIG_DIR",
        "WANDB_DATA_DIR",
        "TRACKIO_DIR",
        "TENSORBOARD_LOGGING_DIR",
    }
    off = {
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_CONSOLE": "off",
        "WANDB_SILENT": "true",
        "HF_HUB_OFFLINE": "1",
    }
    collected = {f"WANDB_X_DISABLE_{what}": "true" for what in ("STATS", "META", "MACHINE_INFO")}
    modes = {"WANDB_MODE": "offline", "TRACKIO_STORAGE_MODE": "sqlite"}
    return {name: str(folder) for name in here} | off | collected | modes


@contextmanager
def connections() -> Iterator[list[str]]:
    """Hosts that Python code connects to inside, other than this one; connecting fails."""
    hosts: list[str] = []
    connect = socket.socket.connect

    def spy(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            hosts.append(address[0])
            raise ConnectionRefusedError(f"{address}: tests stay on this machine")
        connect(self, address)

    with patch.object(socket.socket, "connect", spy):
        yield hosts


def train(rank: int, trackers: list[str], folder: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The log history, and the hosts that were contacted."""
    with connections() as contacted:
        trainer = make_trainer(
            "distca",
            rows(2 * STEPS),
            folder=folder,
            max_steps=STEPS,
            logging_steps=2,
            report_to=trackers,
            train_sampling_strategy="sequential",
        )
        trainer.train()
        if "wandb" in trackers:
            import wandb

            wandb.finish()
            wandb.teardown()  # stops its service, a process of its own
    return trainer.state.log_history, contacted


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Processes of its own: trackers read their settings when they are imported."""
    folder = tmp_path_factory.mktemp("trackers")
    trackers = [
        name for name in ("tensorboard", "wandb", "trackio") if importlib.util.find_spec(name)
    ]
    if not trackers:
        pytest.skip("needs the extra 'trackers'")
    with pytest.MonkeyPatch.context() as environment:
        for name, value in settings(folder).items():
            environment.setenv(name, value)
        with closing(RankPool(2)) as pool:
            (history, contacted), (_, contacted_by_other) = pool(
                train, trackers, str(folder), timeout=240.0
            )
        yield Run(folder, trackers, history, contacted + contacted_by_other)


def figures(logs: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in logs.items() if "distca" in name}


def check(run: Run, logged: Logged) -> None:
    assert run.contacted == []
    wanted = run.wanted()
    assert len(run.history) == 3, "two logs, and what the Trainer ends with"
    assert logged.keys() == wanted.keys() == {2, 4}
    for step, values in wanted.items():
        assert logged[step] == pytest.approx(values, rel=1e-6)  # TensorBoard keeps float32
    assert "train/distca/imbalance_measured_after" in logged[2]


@pytest.mark.slow
def test_tensorboard(run: Run) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    )
    events = accumulator.EventAccumulator(str(run.folder))
    events.Reload()
    logged: Logged = {}
    for name in events.Tags()["scalars"]:
        for scalar in events.Scalars(name):
            logged.setdefault(scalar.step, {})[name] = scalar.value
    check(run, {step: figures(values) for step, values in logged.items() if figures(values)})


def records(path: Path) -> Iterator[bytes]:
    """Records of a W&B run file: a header of 7 bytes, then blocks of 32 KiB with pieces (checksum,
    length, kind, bytes).
    """
    log, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(log):
        left = 2**15 - at % 2**15
        if left < 7:  # no room for the header of a piece
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", log, at)
        record += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


@pytest.mark.slow
def test_wandb_offline(run: Run) -> None:
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2", reason="needs wandb")
    [path] = run.folder.glob("wandb/offline-run-*/run-*.wandb")
    logged: Logged = {}
    for data in records(path):
        items = proto.Record.FromString(data).history.item
        row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
        if figures(row):
            logged[row["train/global_step"]] = figures(row)
    check(run, logged)


@pytest.mark.slow
def test_trackio(run: Run) -> None:
    if "trackio" not in run.trackers:
        pytest.skip("needs trackio")
    [path] = run.folder.glob("*.db")
    with closing(sqlite3.connect(path)) as database:
        logs = [
            json.loads(metrics)
            for (metrics,) in database.execute("SELECT metrics FROM metrics ORDER BY step")
        ]
    check(run, {row["train/global_step"]: figures(row) for row in logs if figures(row)})
