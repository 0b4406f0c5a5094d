"""Pools of servers on two nodes, which are network namespaces here: some of each node, or on one of
their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_clusters_page import LIMIT, TORCHRUN, losses_in, losses_of_one_process, started
from two_nodes import Command, Node

pytestmark = [pytest.mark.slow, pytest.mark.timeout(590)]
SERVER = "10.77.0.2:29600"
TRAIN = (
    f"export GLOO_SOCKET_IFNAME=eth0 && hf-distca run --server-address {SERVER} torchrun"
    " --nproc_per_node 2 --master_addr 10.77.0.1 --master_port 29500 train.py"
)
SERVE = f"export GLOO_SOCKET_IFNAME=eth0 && hf-distca serve --address {SERVER}"


def test_a_server_on_each_node(nodes: list[Node], folder: Path) -> None:
    command = TORCHRUN.replace("torchrun", "hf-distca run --servers 1 torchrun")
    running = started(command.replace("$GPUS", "2"), nodes, folder)
    assert [node.wait(LIMIT) for node in running] == [0, 0], running[0].output + running[1].output
    assert losses_in(running[0].output) == pytest.approx(losses_of_one_process(), rel=1e-5)
    for number, node in zip((2, 3), running, strict=True):
        assert f"is rank {number} of 4, and serves the 2 that train" in node.output
        assert "; ended: the run is over" in node.output


def test_servers_on_a_node_of_their_own(nodes: list[Node], folder: Path) -> None:
    trainers, server = Command(TRAIN, nodes[0], folder), Command(SERVE, nodes[1], folder)
    assert [trainers.wait(LIMIT), server.wait(LIMIT)] == [0, 0], trainers.output + server.output
    assert losses_in(trainers.output) == pytest.approx(losses_of_one_process(), rel=1e-5)
    assert "; ended: the run is over" in server.output


@pytest.mark.parametrize("fault", ["power of the server", "power of the ranks that train", "cable"])
def test_a_node_that_is_lost(fault: str, nodes: list[Node], folder: Path) -> None:
    """Nobody hears of a cable that is cut: ranks wait for their timeout, and a server asks for a
    minute whether they live.
    """
    trainers = Command(f"{TRAIN} max_steps=100000 timeout_seconds=8", nodes[0], folder)
    server = Command(SERVE, nodes[1], folder)
    trainers.wait_for("'loss'", LIMIT)
    match fault:
        case "power of the server":
            nodes[1].kill()
        case "power of the ranks that train":
            nodes[0].kill()
        case _:
            nodes[0].set_cable("down")
    statuses = [trainers.wait(120), server.wait(120)]
    assert all(statuses)
    if fault != "power of the ranks that train":
        seen = "is silent" if fault == "cable" else "has closed its connection without a word"
        assert f"rank 2 (server at {SERVER}) {seen}" in trainers.output
    if fault != "power of the server":
        assert "; ended: " in server.output
