"""Pools of servers under real launchers: the last processes serve, and none is left at the end."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from pool_forks import kill_at_end, read_losses

from pages import ROOT
from scripts import find_free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(590)]

LIMIT = 280.0  # seconds; imports of a new interpreter take long
TESTS = Path(__file__).parents[1]
STEPS = 6


class Shell:
    """Runs commands in a folder, and kills all processes that have it as current folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._started = folder, list[subprocess.Popen[bytes]]()
        shutil.copy(Path(__file__).with_name("trains_with_servers.py"), folder / "train.py")

    def start(self, command: str) -> tuple[subprocess.Popen[bytes], Path]:
        """Start a command, and return the process and its output file."""
        file = self.folder / f"output-{len(self._started)}.txt"
        variables = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))),
            "OMP_NUM_THREADS": "1",
        }
        words = ["bash", "-c", f"exec {command}"]
        with file.open("wb") as output:
            process = subprocess.Popen(
                words,
                cwd=self.folder,
                env=os.environ | variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(process)
        return process, file

    def run(self, command: str) -> tuple[int, str]:
        process, file = self.start(command)
        return process.wait(LIMIT), file.read_text(errors="replace")

    @property
    def left(self) -> list[int]:
        """Processes that still run."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdecimal() and (entry / "cwd").readlink() == self.folder:
                    found.append(int(entry.name))
        return [pid for pid in found if pid != os.getpid()]

    def clear(self) -> None:
        for pid in self.left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.wait()


def wait_for(text: str, file: Path) -> None:
    deadline = time.monotonic() + LIMIT
    while text not in file.read_text(errors="replace"):
        assert time.monotonic() < deadline, file.read_text(errors="replace")
        time.sleep(0.1)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    started = Shell(tmp_path.resolve())
    yield started
    started.clear()


@pytest.fixture(scope="module")
def losses_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[float]]:
    """List the losses of rank 0 without servers, by the number of ranks."""
    losses = {}
    for ranks in (1, 2):
        with kill_at_end(tmp_path_factory.mktemp("alone"), ranks, 0) as running:
            trainers = running.start_trainers(STEPS)
            assert [trainer.join() for trainer in trainers] == [0] * ranks
            losses[ranks] = read_losses(trainers[0].output)
    return losses


@pytest.mark.parametrize(
    ("launch", "ranks"),
    [
        ("hf-distca run --servers 1 torchrun --nproc_per_node 3 train.py", 2),
        ("torchrun --nproc_per_node 3 -m hf_distca.tools.run --servers 1 train.py", 2),
        (
            "hf-distca run --servers 1 accelerate launch --config_file cpu.yaml --num_processes 3"
            " train.py",
            2,
        ),
        ("hf-distca run --servers 1 --server-wait 20 torchrun --nproc_per_node 2 train.py", 1),
        (
            "env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 hf-distca run --servers 2 --server-wait 20"
            " torchrun --nproc_per_node 3 train.py",
            1,
        ),
    ],
    ids=["torchrun", "module", "accelerate", "one trains", "one trains, and has the store"],
)
def test_last_processes_of_a_launch_serve(
    launch: str, ranks: int, shell: Shell, losses_alone: dict[int, list[float]]
) -> None:
    """With one process that trains, the script begins no process group."""
    shutil.copy(ROOT / "configs/accelerate/cpu_2_processes.yaml", shell.folder / "cpu.yaml")
    port = find_free_port()
    launch = launch.replace("launch ", f"launch --main_process_port {port} ").replace(
        "--nproc", f"--master_port {port} --nproc"
    )
    status, output = shell.run(f"{launch} {STEPS}")
    assert status == 0, output
    assert read_losses(output) == pytest.approx(losses_alone[ranks], rel=1e-6)
    assert f"served 24 calls of attention in {STEPS} micro-batches" in output
    assert f"rank {ranks} step" not in output
    assert not shell.left


@pytest.mark.parametrize(
    ("launch", "text"),
    [
        (
            "hf-distca run --servers 3 torchrun --nproc_per_node 3 train.py 6",
            "servers=3, but a node has only 3 processes: no rank would train",
        ),
        (
            "hf-distca run --servers 1 python train.py 6",
            "servers=1, but no launcher has started this process",
        ),
    ],
)
def test_servers_without_training_ranks_or_launcher_are_refused(
    launch: str, text: str, shell: Shell
) -> None:
    status, output = shell.run(launch)
    assert status != 0
    assert text in output
    assert "step 0" not in output
    assert not shell.left


@pytest.mark.parametrize("fault", ["server", "launcher", "raises:1"])
def test_launch_that_ends_early_leaves_no_processes(fault: str, shell: Shell) -> None:
    port = find_free_port()
    launch = (
        f"hf-distca run --servers 1 torchrun --nproc_per_node 3 --master_port {port} train.py"
        " 1000000 "
    )
    process, file = shell.start(launch + (fault if ":" in fault else ""))
    wait_for("fault" if ":" in fault else "step 3", file)
    if fault == "server":
        (server,) = [
            pid
            for pid in shell.left
            if b"pool.server import serve" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(server, signal.SIGKILL)
    elif fault == "launcher":
        process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT) != 0
    assert not shell.left
    output = file.read_text(errors="replace")
    if fault != "server":
        assert re.search(r"hf-distca: server at \S+ served \d+ calls .*; ended: ", output), output
