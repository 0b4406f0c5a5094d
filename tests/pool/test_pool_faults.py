"""After a fault, all processes of a pool log the reason and end soon.

`pytest -n 0 -rP -m "slow or not slow" tests/pool/test_pool_faults.py` prints the seconds that
docs/pool.md states.
"""

from __future__ import annotations

import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pool_forks import Forks, Started, kill_at_end, read_losses

STEPS, ENDLESS = 6, 10**6
SOON = 60.0  # seconds until all have ended on a busy machine


@pytest.fixture
def running(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Forks]:
    """Make a launch of two ranks that train and a server, or of the counts in the parameter."""
    with kill_at_end(tmp_path, *getattr(request, "param", (2, 1))) as forks:
        yield forks
        if (seconds := forks.seconds_to_end) is not None:
            print(f"{request.node.name}: {seconds:.1f} s until all had ended")  # noqa: T201


def join(*processes: Started, within: float = SOON) -> list[int]:
    """Wait for processes, and return their exit statuses."""
    deadline = time.monotonic() + within
    return [process.join(deadline - time.monotonic()) for process in processes]


def locate(server: Started) -> tuple[str, int]:
    """Wait until a server listens, and return its address."""
    server.wait_for("waits on cpu")
    host, port = re.findall(r"server at (\S+):(\d+) waits", server.output)[0]
    return host, int(port)


def check_server(server: Started, last: str) -> None:
    """Check that a server logged why it ended, and no traceback."""
    lines = server.output.splitlines()
    ours = [line for line in lines if line.startswith("hf-distca: server at 127.0.0.1:")]
    assert "Traceback" not in server.output
    assert re.search(rf"; ended: (?:{last})$", ours[-1]), server.output


@pytest.mark.slow
def test_late_server_changes_no_losses(running: Forks, tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    with kill_at_end(tmp_path / "alone", 2, 0) as launch:
        alone = launch.start_trainers(STEPS)
        assert join(*alone) == [0, 0], alone[0].output
    trainers = running.start_trainers(STEPS)
    time.sleep(2)
    server = running.start_server()
    assert join(*trainers, server) == [0, 0, 0], trainers[0].output
    losses = [read_losses(launched[0].output) for launched in (trainers, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
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
        # The signal arrives in a step of the ranks, or between two steps.
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
def test_training_ranks_end_with_a_reason_if_the_server_ends(
    name: str, status: int | None, what: str, running: Forks
) -> None:
    server = running.start_server()
    trainers = running.start_trainers(ENDLESS, "", 5.0 if name == "SIGSTOP" else 40.0)
    trainers[0].wait_for("step 3")
    server.send(signal.Signals[name])
    assert join(*trainers) == [1, 1]
    listening = "server at {}:{}".format(*locate(server))
    waited = [
        f"DistCADesyncError: rank {rank} wa.* rank 2 \\({listening}\\) {what}" for rank in range(2)
    ]
    told = [
        bool(re.search(pattern, trainer.output))
        for pattern, trainer in zip(waited, trainers, strict=True)
    ]
    assert any(told)
    # One rank may have all results of the server, and wait for the other rank in DDP.
    if not all(told):
        left = (
            r"hf_distca: rank \d.* has left the attention group of ranks \(0, 1, 2\): it (waited in"
            r" vain|ended: told to)"
        )
        assert re.search(left, trainers[told.index(False)].output)
    if status is None:  # the server continues after the ranks have ended
        server.send(signal.SIGCONT)
        assert join(server) == [1]
        check_server(server, ".*")
    else:
        assert join(server) == [status]
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
def test_all_processes_end_if_one_training_rank_ends_early(
    fault: str, statuses: list[int], last: str, running: Forks
) -> None:
    server = running.start_server()
    trainers = running.start_trainers(ENDLESS, fault)
    assert join(*trainers) == statuses
    assert join(server) == [0 if last == "the run is over" else 1]
    check_server(server, last)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_all_processes_end_if_training_ranks_get_a_signal(name: str, running: Forks) -> None:
    server = running.start_server()
    trainers = running.start_trainers(ENDLESS)
    trainers[0].wait_for("step 3")
    for trainer in trainers:
        trainer.send(signal.Signals[name])
    assert join(*trainers) == ([-signal.SIGTERM] * 2 if name == "SIGTERM" else [1, 1])
    assert join(server) == [1]
    check_server(
        server,
        r"the run failed, see the log of rank 0|rank 0 has ended unexpectedly, see its log"
        r" \(.*\)",
    )


@pytest.mark.slow
def test_stuck_server_ends_soon_after_the_training_ranks(running: Forks) -> None:
    server = running.start_server(stuck_in="finish")
    trainers = running.start_trainers(ENDLESS, "", 5.0)
    assert join(*trainers) == [1, 1]
    assert join(server) == [1]
    check_server(
        server, r"rank 0 has ended unexpectedly, see its log \(this server waited 1 s longer\)"
    )


def test_server_of_another_version_is_refused(running: Forks) -> None:
    """Nodes of one launch may have different versions installed. All ranks report it."""
    server = running.start_server(version="9.9")
    trainers = running.start_trainers(STEPS)
    assert join(*trainers) == [1, 1]
    refusal = (
        rf"ConfigError: rank 2 \(server at 127.0.0.1:{locate(server)[1]}\) runs hf-distca 9.9 on"
        r" cpu, but rank 0 runs hf-distca \S+ on cpu. Install one version on all nodes"
    )
    for trainer in trainers:
        assert re.search(refusal, trainer.output), trainer.output


@pytest.mark.parametrize("running", [(2, 2)], indirect=True)
def test_all_ranks_report_a_server_that_never_starts(running: Forks) -> None:
    running.start_server()
    trainers = running.start_trainers(STEPS, server_wait=1.0)
    assert join(*trainers) == [1, 1]
    for trainer in trainers:
        missing = "1 of 2 servers did not start within 1 s: look at the log of the last 2 processes"
        assert f"ConfigError: {missing} of node 0" in trainer.output, trainer.output


def test_all_ranks_report_a_server_that_ended_before_training(running: Forks) -> None:
    server = running.start_server()
    trainers = running.start_trainers(STEPS, "", 40.0, 3.0)
    port = locate(server)[1]
    server.kill()
    assert join(*trainers) == [1, 1]
    for trainer in trainers:
        refusal = f"ConfigError: rank 2 (server at 127.0.0.1:{port}) does not answer"
        assert refusal in trainer.output, trainer.output


@pytest.mark.slow
def test_clients_without_a_token_do_not_stop_a_server(running: Forks) -> None:
    server = running.start_server()
    trainers = running.start_trainers(STEPS, "", 40.0, 5.0)
    with (
        socket.create_connection(locate(server)) as browser,
        socket.create_connection(locate(server)) as silent,
    ):
        browser.sendall(b"GET / HTTP/1.1\r\n\r\n")
        silent.sendall(b"\0\0\0\5ab")
        trainers[0].wait_for("step 0")
        with socket.create_connection(locate(server)) as late:
            late.sendall(b"[" * 10**5 + b"\n")
            assert join(*trainers, server) == [0, 0, 0], server.output
    check_server(server, "the run is over")
