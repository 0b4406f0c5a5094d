"""How a pool of servers lives and dies: what is said, by whom, how soon, and that every process
ends by itself.

The seconds of docs/pool.md are what `pytest -n 0 -rP -m "slow or not slow"
tests/pool/test_pool_faults.py` prints.
"""

from __future__ import annotations

import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pool_forks import Forks, Started, killed_in_the_end

STEPS, ENDLESS = 6, 10**6
SOON = 60.0  # seconds until all have ended, on a machine that does other things, too


@pytest.fixture
def running(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Forks]:
    """A launch of two ranks that train and a server, or of the numbers in the parameter."""
    with killed_in_the_end(tmp_path, *getattr(request, "param", (2, 1))) as forks:
        yield forks
        if (seconds := forks.seconds_to_end) is not None:
            print(f"{request.node.name}: {seconds:.1f} s until all had ended")  # noqa: T201


def ended(*processes: Started, within: float = SOON) -> list[int]:
    """Exit statuses."""
    deadline = time.monotonic() + within
    return [process.status(deadline - time.monotonic()) for process in processes]


def losses(trainer: Started) -> list[float]:
    return [float(loss) for loss in re.findall(r"step \d+ loss (\S+)", trainer.output)]


def address(server: Started) -> tuple[str, int]:
    """Where it listens, once it does."""
    server.wait_for("waits on cpu")
    host, port = re.findall(r"server at (\S+):(\d+) waits", server.output)[0]
    return host, int(port)


def check_server(server: Started, last: str) -> None:
    """It wrote lines of its own alone, and the last one says why it ended."""
    lines = server.output.splitlines()
    ours = [line for line in lines if line.startswith("hf-distca: server at 127.0.0.1:")]
    assert "Traceback" not in server.output
    assert re.search(rf"; ended: (?:{last})$", ours[-1]), server.output


@pytest.mark.slow
def test_late_server_changes_no_training(running: Forks, tmp_path: Path) -> None:
    """Training with a server that comes late is training without."""
    (tmp_path / "alone").mkdir()
    with killed_in_the_end(tmp_path / "alone", 2, 0) as launch:
        alone = launch.trainers(STEPS)
        assert ended(*alone) == [0, 0], alone[0].output
    trainers = running.trainers(STEPS)
    time.sleep(2)
    server = running.server()
    assert ended(*trainers, server) == [0, 0, 0], trainers[0].output
    assert losses(trainers[0]) == pytest.approx(losses(alone[0]), rel=1e-6)
    assert "is rank 2 of 3, and serves the 2 that train" in server.output
    assert "served 24 calls of attention in 6 micro-batches" in server.output
    check_server(server, "the run is over")


@pytest.mark.parametrize(
    ("name", "status", "what"),
    [
        (
            "SIGKILL",
            -9,
            r"has closed its connection without a word: look at its log",
        ),
        # In a step of the ranks, or between two.
        pytest.param(
            "SIGTERM",
            143,
            r"(raised EndedError while taking the step '\w+'|ended): stopped by SIGTERM",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "SIGSTOP",
            None,
            r"is silent \(dead, stuck, .*\): look at its log",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_server_that_ends_while_others_train(
    name: str, status: int | None, what: str, running: Forks
) -> None:
    server = running.server()
    trainers = running.trainers(ENDLESS, "", 5.0 if name == "SIGSTOP" else 40.0)
    trainers[0].wait_for("step 3")
    server.send(signal.Signals[name])
    assert ended(*trainers) == [1, 1]
    listening = "server at {}:{}".format(*address(server))
    waited = [
        f"DistCADesyncError: rank {rank} wa.* rank 2 \\({listening}\\) {what}" for rank in range(2)
    ]
    told = [
        bool(re.search(pattern, trainer.output))
        for pattern, trainer in zip(waited, trainers, strict=True)
    ]
    assert any(told)
    # One rank had all from the server, and waited for the other in DDP's reduction.
    if not all(told):
        left = (
            r"hf_distca: rank \d.* has left the attention group of ranks \(0, 1, 2\): it (waited in"
            r" vain|ended: told to)"
        )
        assert re.search(left, trainers[told.index(False)].output)
    if status is None:  # it goes on when nobody is there any more
        server.send(signal.SIGCONT)
        assert ended(server) == [1]
        check_server(server, ".*")
    else:
        assert ended(server) == [status]
    if name == "SIGTERM":
        check_server(server, "stopped by SIGTERM")


@pytest.mark.parametrize(
    ("fault", "statuses", "last"),
    [
        pytest.param(
            "raises:0",
            [1, 1],
            "the run failed, see the log of rank 0|rank 0 ended with ValueError: a bad batch",
            marks=pytest.mark.slow,
        ),
        (
            "raises:1",
            [1, 1],
            "the run failed, see the log of rank 0|rank 1 ended with ValueError: a bad batch",
        ),
        ("dies:0", [-9, 1], r"rank 0 has ended unexpectedly, see its log \(.*\)"),
        pytest.param(
            "dies:1", [1, -9], "the run failed, see the log of rank 0", marks=pytest.mark.slow
        ),
        pytest.param("exits:0", [0, 1], "the run is over", marks=pytest.mark.slow),
        pytest.param(
            "exits:1", [1, 0], "the run failed, see the log of rank 0", marks=pytest.mark.slow
        ),
    ],
)
def test_a_rank_that_trains_ends_before_the_others(
    fault: str, statuses: list[int], last: str, running: Forks
) -> None:
    server = running.server()
    trainers = running.trainers(ENDLESS, fault)
    assert ended(*trainers) == statuses
    assert ended(server) == [0 if last == "the run is over" else 1]
    check_server(server, last)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_ranks_that_train_are_told_to_end(name: str, running: Forks) -> None:
    server = running.server()
    trainers = running.trainers(ENDLESS)
    trainers[0].wait_for("step 3")
    for trainer in trainers:
        trainer.send(signal.Signals[name])
    assert ended(*trainers) == ([-signal.SIGTERM] * 2 if name == "SIGTERM" else [1, 1])
    assert ended(server) == [1]
    check_server(
        server,
        r"the run failed, see the log of rank 0|rank 0 has ended unexpectedly, see its log"
        r" \(.*\)",
    )


@pytest.mark.slow
def test_waiting_server_does_not_outlive_the_trainers(running: Forks) -> None:
    """A server that waits in vain does not outlive the ranks that train."""
    server = running.server(stuck_in="finish")
    trainers = running.trainers(ENDLESS, "", 5.0)
    assert ended(*trainers) == [1, 1]
    assert ended(server) == [1]
    check_server(
        server, r"rank 0 has ended unexpectedly, see its log \(this server waited 1 s longer\)"
    )


def test_a_server_of_another_version_is_refused(running: Forks) -> None:
    """Nodes of one launch may have different versions installed. All ranks say so."""
    server = running.server(version="9.9")
    trainers = running.trainers(STEPS)
    assert ended(*trainers) == [1, 1]
    refusal = (
        rf"ConfigError: rank 2 \(server at 127.0.0.1:{address(server)[1]}\) runs hf-distca 9.9 on"
        r" cpu, but rank 0 runs hf-distca \S+ on cpu. Install one version on all nodes"
    )
    for trainer in trainers:
        assert re.search(refusal, trainer.output), trainer.output


@pytest.mark.parametrize("running", [(2, 2)], indirect=True)
def test_a_server_that_never_comes(running: Forks) -> None:
    """All ranks say which one, and end."""
    running.server()
    trainers = running.trainers(STEPS, server_wait=1.0)
    assert ended(*trainers) == [1, 1]
    for trainer in trainers:
        missing = "1 of 2 servers did not start within 1 s: look at the log of the last 2 processes"
        assert f"ConfigError: {missing} of node 0" in trainer.output, trainer.output


def test_a_server_that_ended_before_training_began(running: Forks) -> None:
    server = running.server()
    trainers = running.trainers(STEPS, "", 40.0, 3.0)
    port = address(server)[1]
    server.kill()
    assert ended(*trainers) == [1, 1]
    for trainer in trainers:
        refusal = f"ConfigError: rank 2 (server at 127.0.0.1:{port}) does not answer"
        assert refusal in trainer.output, trainer.output


@pytest.mark.slow
def test_strangers_do_not_keep_a_server(running: Forks) -> None:
    server = running.server()
    trainers = running.trainers(STEPS, "", 40.0, 5.0)
    with (
        socket.create_connection(address(server)) as browser,
        socket.create_connection(address(server)) as silent,
    ):
        browser.sendall(b"GET / HTTP/1.1\r\n\r\n")
        silent.sendall(b"\0\0\0\5ab")
        trainers[0].wait_for("step 0")
        with socket.create_connection(address(server)) as late:
            late.sendall(b"[" * 10**5 + b"\n")
            assert ended(*trainers, server) == [0, 0, 0], server.output
    check_server(server, "the run is over")
