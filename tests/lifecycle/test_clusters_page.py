"""docs/clusters.md: training on several nodes, and how training ends if a node is lost. The nodes
are network namespaces.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from test_run import write_executable
from two_nodes import TESTS, Command, Node

from pages import ROOT, on_a_page, words_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

EXPORT = on_a_page("export FIRST=10.77.0.1 NODE=0 GPUS=1 GLOO_SOCKET_IFNAME=eth0")
TORCHRUN = on_a_page(
    "torchrun --nnodes 2 --node_rank $NODE --nproc_per_node $GPUS --master_addr $FIRST"
    " --master_port 29500 train.py"
)
ACCELERATE = on_a_page(
    "accelerate launch --multi_gpu --num_machines 2 --machine_rank $NODE --num_processes $((2 *"
    " GPUS)) --main_process_ip $FIRST --main_process_port 29500 train.py"
)
DOCTOR = on_a_page(
    "torchrun --nnodes 2 --node_rank $NODE --nproc_per_node $GPUS --master_addr $FIRST"
    " --master_port 29500 -m hf_distca.tools.cli doctor"
)
TIMEOUT = 8  # seconds that ranks wait for each other if a node is lost
LIMIT = 200.0  # seconds for each command


@cache
def train_one_process() -> list[float]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    script = [sys.executable, str(Path(__file__).with_name("trains_on_nodes.py"))]
    return parse_losses(
        subprocess.run(
            script, env=environment, check=True, capture_output=True, text=True, timeout=LIMIT
        ).stdout
    )


def parse_losses(output: str) -> list[float]:
    # Ray may print a line of a worker twice.
    found = set(re.findall(r"LOSSES (\[.*\])", output))
    assert len(found) == 1, output
    losses: list[float] = json.loads(found.pop())
    return losses


def start_on_nodes(command: str, nodes: list[Node], folder: Path) -> list[Command]:
    exports = [EXPORT.replace("NODE=0", f"NODE={node.number}") for node in nodes]
    return [
        Command(f"{export} && {command}", node, folder)
        for export, node in zip(exports, nodes, strict=True)
    ]


@pytest.mark.parametrize("command", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_two_nodes_train_like_one_process(command: str, nodes: list[Node], folder: Path) -> None:
    running = start_on_nodes(command, nodes, folder)
    assert [node.wait(LIMIT) for node in running] == [0, 0], running[0].output + running[1].output
    assert parse_losses(running[0].output) == pytest.approx(train_one_process(), rel=1e-5)
    assert len(train_one_process()) == 8
    assert "micro-batches on 2 ranks" in running[0].output


def test_doctor_on_two_nodes_prints_only_on_the_first_node(nodes: list[Node], folder: Path) -> None:
    running = start_on_nodes(DOCTOR, nodes, folder)
    assert [node.wait(LIMIT) for node in running] == [0, 0], running[0].output + running[1].output
    assert "2 ranks on 2 nodes, 1 on each" in running[0].output
    assert "exchange over gloo" in running[0].output
    assert "attention group" not in running[1].output, "only rank 0 prints"


def test_slurm_script_trains_with_fake_slurm_commands(nodes: list[Node], folder: Path) -> None:
    """Run the lines of the script with fake commands that do what Slurm documents."""
    subprocess.run(["bash", "-n", ROOT / "examples/slurm.sh"], check=True)
    variables = {
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "1",
    }
    given = shlex.join(f"{name}={value}" for name, value in variables.items())
    write_executable(folder / "bin" / "sbatch", f'exec env {given} bash "$@"')
    write_executable(
        folder / "bin" / "scontrol",
        f'[[ "$*" == "show hostnames node[0-1]" ]] && echo {nodes[0].address} && echo later',
    )
    each = [f'SLURM_NODEID={node.number} {shlex.join(node.inside([]))} "$@" &' for node in nodes]
    write_executable(
        folder / "bin" / "srun", '[[ "$1" == --* ]] && shift', *each, "wait -n && wait"
    )
    command = shlex.join(words_of("sbatch examples/slurm.sh train.py"))
    path = os.pathsep.join(
        [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    job = Command(command, None, folder, PATH=path)
    assert job.wait(LIMIT) == 0, job.output
    assert parse_losses(job.output) == pytest.approx(train_one_process(), rel=1e-5)


def test_settings_that_differ_are_named_on_both_nodes(nodes: list[Node], folder: Path) -> None:
    running = start_on_nodes(f"{TORCHRUN} tile=$((8 + 8 * NODE))", nodes, folder)
    assert all(node.wait(LIMIT) for node in running), running[0].output
    for node in running:
        assert "tile is 8 on rank 0, 16 on rank 1; give every rank the same ones" in node.output


@pytest.mark.parametrize("lost", [0, 1])
def test_training_ends_on_one_node_when_the_other_loses_power(
    lost: int, nodes: list[Node], folder: Path
) -> None:
    """Closed connections end training long before a timeout, even if the lost node held the store.
    The operation in progress decides which error comes first.
    """
    running = start_on_nodes(f"{TORCHRUN} max_steps=100000 ddp_timeout=100", nodes, folder)
    running[0].wait_for("'loss'", LIMIT)
    nodes[lost].kill()
    assert running[lost].wait(20) == -signal.SIGKILL
    assert running[1 - lost].wait(40) not in (0, None)
    assert re.search(
        rf"DistCADesyncError: rank {1 - lost} .*|Connection (reset|closed) by peer",
        running[1 - lost].output,
    )


@pytest.mark.parametrize("end", [0, 1])
def test_training_ends_on_both_nodes_when_the_cable_is_cut(
    end: int, nodes: list[Node], folder: Path
) -> None:
    """A cut cable closes no connection, so both nodes wait for their timeout, even the one that has
    lost the store.
    """
    running = start_on_nodes(f"{TORCHRUN} max_steps=100000 ddp_timeout={TIMEOUT}", nodes, folder)
    running[0].wait_for("'loss'", LIMIT)
    nodes[end].set_cable("down")
    for command in running:
        assert command.wait(TIMEOUT + 40) not in (0, None)
        assert re.search(
            r"DistCADesyncError: rank \d .*is silent|Timed out waiting", command.output
        ), command.output


def test_script_under_ray_train_trains_like_one_process(nodes: list[Node], folder: Path) -> None:
    """Run two workers on one node. Processes that Ray leaves behind end with the node."""
    pytest.importorskip("ray.train", reason='needs pip install "ray[train]"')
    command = shlex.join(words_of("python examples/train_with_ray.py --workers 2 train.py"))
    job = Command(command, nodes[0], folder, HOME=str(folder), GLOO_SOCKET_IFNAME="lo")
    assert job.wait(LIMIT) == 0, job.output
    assert parse_losses(job.output) == pytest.approx(train_one_process(), rel=1e-5)
    assert "micro-batches on 2 ranks" in job.output
