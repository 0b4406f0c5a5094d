"""Server pools on two nodes, which are network namespaces."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_clusters_page import LIMIT, TORCHRUN, parse_losses, start_on_nodes, train_one_process
from two_nodes import Node

pytestmark = [pytest.mark.slow, pytest.mark.timeout(590)]
TRAIN = TORCHRUN.replace("torchrun", "hf-distca run --servers 1 torchrun").replace("$GPUS", "2")


def test_one_server_on_each_node_serves_ranks_that_train(nodes: list[Node], folder: Path) -> None:
    running = start_on_nodes(TRAIN, nodes, folder)
    assert [command.wait(LIMIT) for command in running] == [0, 0], (
        running[0].output + running[1].output
    )
    assert parse_losses(running[0].output) == pytest.approx(train_one_process(), rel=1e-5)
    for number, node in zip((2, 3), running, strict=True):
        assert f"is rank {number} of 4, and serves the 2 that train" in node.output
        assert "; ended: the run is over" in node.output


@pytest.mark.parametrize("fault", ["power", "cable"])
def test_loss_of_a_node_ends_ranks_and_servers(fault: str, nodes: list[Node], folder: Path) -> None:
    """A cut cable closes no connection. Ranks wait for their timeout, in attention or for
    gradients, and a server tries for a minute to reach them.
    """
    running = start_on_nodes(f"{TRAIN} max_steps=100000 ddp_timeout=8", nodes, folder)
    running[0].wait_for("'loss'", LIMIT)
    if fault == "power":
        nodes[1].kill()
    else:
        nodes[0].set_cable("down")
    assert all(node.wait(120) for node in running)
    closed = r"rank [13] .*has closed its connection without a word"
    seen = r"rank [13] .*is silent|Timed out waiting" if fault == "cable" else closed
    assert re.search(seen, running[0].output), running[0].output
    assert "; ended: " in running[0].output
