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
from pool_forks import Forks, Started, free_ports, killed_in_the_end

STEPS, ENDLESS = 6, 10**6
SOON = 60.0  # seconds until all have ended, on a machine that does other things, too


@pytest.fixture
def running(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Forks]:
    with killed_in_the_end(tmp_path) as forks:
        yield forks
        if (seconds := forks.seconds_to_end) is not None:
            print(f"{request.node.name}: {seconds:.1f} s until all had ended")  # noqa: T201


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


def ended(*processes: Started, within: float = SOON) -> list[int]:
    """Exit statuses."""
    deadline = time.monotonic() + within
    return [process.status(deadline - time.monotonic()) for process in processes]


def losses(trainer: Started) -> list[float]:
    return [float(loss) for loss in re.findall(r"step \d+ loss (\S+)", trainer.output)]


def check_server(server: Started, port: int, last: str) -> None:
    """It wrote lines of its own alone, and the last one says why it ended."""
    lines = server.output.splitlines()
    ours = [line for line in lines if line.startswith(f"hf-distca: server at 127.0.0.1:{port} ")]
    assert "Traceback" not in server.output
    assert re.search(rf"; ended: (?:{last})$", ours[-1]), server.output


@pytest.mark.slow
def test_late_server_changes_no_training(running: Forks, port: int) -> None:
    """Training with a server that comes late is training without."""
    alone = running.trainers(2, [], STEPS)
    assert ended(*alone) == [0, 0], alone[0].output
    trainers = running.trainers(2, [port], STEPS)
    time.sleep(2)
    server = running.server(port)
    assert ended(*trainers, server) == [0, 0, 0], trainers[0].output
    assert losses(trainers[0]) == pytest.approx(losses(alone[0]), rel=1e-6)
    assert "is rank 2 of 3, and serves the 2 that train" in server.output
    assert "served 24 calls of attention in 6 micro-batches" in server.output
    check_server(server, port, "the run is over")


@pytest.mark.parametrize(
    ("name", "status", "what"),
    [
        (
            "SIGKILL",
            -9,
            r"has closed its connection without a word: look at its log, and start it again before",
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
            r"is silent \(dead, stuck, .*\): look at its log, and start it again before training",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_server_that_ends_while_others_train(
    name: str, status: int | None, what: str, running: Forks, port: int
) -> None:
    server = running.server(port)
    trainers = running.trainers(2, [port], ENDLESS, "", 5.0 if name == "SIGSTOP" else 40.0)
    trainers[0].wait_for("step 3")
    server.send(signal.Signals[name])
    assert ended(*trainers) == [1, 1]
    waited = [
        f"DistCADesyncError: rank {rank} wa.* rank 2 \\(server at 127.0.0.1:{port}\\) {what}"
        for rank in range(2)
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
        check_server(server, port, ".*")
    else:
        assert ended(server) == [status]
    if name == "SIGTERM":
        check_server(server, port, "stopped by SIGTERM")


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
    fault: str, statuses: list[int], last: str, running: Forks, port: int
) -> None:
    server = running.server(port)
    trainers = running.trainers(2, [port], ENDLESS, fault)
    assert ended(*trainers) == statuses
    assert ended(server) == [0 if last == "the run is over" else 1]
    check_server(server, port, last)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_ranks_that_train_are_told_to_end(name: str, running: Forks, port: int) -> None:
    server = running.server(port)
    trainers = running.trainers(2, [port], ENDLESS)
    trainers[0].wait_for("step 3")
    for trainer in trainers:
        trainer.send(signal.Signals[name])
    assert ended(*trainers) == ([-signal.SIGTERM] * 2 if name == "SIGTERM" else [1, 1])
    assert ended(server) == [1]
    check_server(
        server,
        port,
        r"the run failed, see the log of rank 0|rank 0 has ended unexpectedly, see its log"
        r" \(.*\)",
    )


@pytest.mark.slow
def test_waiting_server_does_not_outlive_the_trainers(running: Forks, port: int) -> None:
    """A server that waits in vain does not outlive the ranks that train."""
    server = running.server(port, stuck_in="finish")
    trainers = running.trainers(2, [port], ENDLESS, "", 5.0)
    assert ended(*trainers) == [1, 1]
    assert ended(server) == [1]
    check_server(server, port, r"rank 0 has ended unexpectedly, see its log \(1 s ago\)")


def test_servers_that_cannot_take_part(running: Forks) -> None:
    nobody, other, doubled, shell, taken, secret = free_ports(6)
    refused = {
        (nobody,): (
            f"no server answers at 127.0.0.1:{nobody} (Connection refused). Start it with"
            " `hf-distca serve --address "
        ),
        (
            other,
        ): f"the server at 127.0.0.1:{other} cannot take part: it runs hf-distca 9.9, but rank 0 ",
        (
            doubled,
            doubled,
        ): (
            f"server 127.0.0.1:{doubled} is named more than once: give each server a separate"
            " address"
        ),
        (shell,): (
            f"the process at 127.0.0.1:{shell} is not a server of hf-distca, or has ended"
            " (JSONDecodeError)"
        ),
        (
            taken,
        ): f"the server at 127.0.0.1:{taken} cannot take part: it serves the ranks of another run",
        (
            secret,
        ): f"the server at 127.0.0.1:{secret} cannot take part: it asks for another token. Set ",
    }
    of_other_version = running.server(other, version="9.9")
    running.server(secret, HF_DISTCA_POOL_TOKEN="c0ffee")
    serving = running.server(taken)
    (trains,) = running.trainers(1, [taken], ENDLESS)
    trains.wait_for("step 1")
    with socket.create_server(("127.0.0.1", shell)) as listening:
        tried = {ports: running.trainers(1, ports, STEPS, server_wait=1.0)[0] for ports in refused}
        stranger, _ = listening.accept()
        with stranger:
            stranger.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        assert ended(*tried.values()) == [1] * len(tried)
    for ports, trainer in tried.items():
        assert f"ConfigError: {refused[ports]}" in trainer.output, trainer.output
    assert "turned ranks away: it runs hf-distca 9.9, but rank 0 " in of_other_version.output
    trains.send(signal.SIGTERM)
    assert ended(serving) == [1]


@pytest.mark.slow
def test_ranks_of_which_none_finds_all_servers_say_so_on_all(running: Forks) -> None:
    here, nobody = free_ports(2)
    server = running.server(here)
    trainers = running.trainers(2, [here, nobody], STEPS, server_wait=1.0)
    assert ended(*trainers) == [1, 1]
    for trainer in trainers:
        assert f"ConfigError: no server answers at 127.0.0.1:{nobody}" in trainer.output
    assert ended(server) == [1]
    check_server(server, here, "the run failed before it began, see the log of rank 0")


@pytest.mark.slow
def test_two_servers_at_one_address(running: Forks, port: int) -> None:
    first = running.server(port, "--wait=3")
    first.wait_for("waits on cpu")
    second = running.server(port)
    assert ended(second, first) == [2, 1]
    assert (
        second.output
        == f"hf-distca: a server cannot listen at 127.0.0.1:{port}: Address already in use. Another"
        " server may listen there: give each server a separate address.\n"
    )
    check_server(first, port, "no ranks came within 3 s")


def test_a_device_that_is_not_there(running: Forks, port: int) -> None:
    server = running.server(port, "--device=gpu")
    assert ended(server) == [2]
    assert server.output.startswith("hf-distca: no server can compute on device 'gpu': ")


@pytest.mark.slow
def test_strangers_do_not_keep_a_server(running: Forks, port: int) -> None:
    server = running.server(port)
    server.wait_for("waits on cpu")
    with (
        socket.create_connection(("127.0.0.1", port)) as browser,
        socket.create_connection(("127.0.0.1", port)) as silent,
    ):
        browser.sendall(b"GET / HTTP/1.1\r\n\r\n")
        silent.sendall(b"\0\0\0\5ab")
        (trainer,) = running.trainers(1, [port], STEPS)
        trainer.wait_for("step 0")
        with socket.create_connection(("127.0.0.1", port)) as late:
            late.sendall(b"[" * 10**5 + b"\n")
            assert ended(trainer, server) == [0, 0], server.output
    check_server(server, port, "the run is over")
