"""Processes of tests are as fresh as interpreters of their own, and what is started is ended."""

from __future__ import annotations

import atexit
import os
import sys
import time
from pathlib import Path

import pytest
import torch

import forks
import scripts

pytestmark = pytest.mark.slow  # what all other tests need is seen by them


def note_state(folder: Path) -> None:
    atexit.register((folder / "at exit").touch)
    threads = [
        len(list(Path(f"/proc/{process}/task").iterdir()))
        for process in (os.getpid(), os.getppid())
    ]
    state = [
        *threads,
        torch.get_num_threads(),
        "hf_distca" in sys.modules,
        dict(os.environ)["COLOUR"],
        str(Path.cwd()),
    ]
    (folder / "state").write_text(repr(state))


def test_fork_has_one_thread_its_starters_environment_and_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork has one thread, the environment of its starter and an end."""
    monkeypatch.setenv("COLOUR", "red")
    # So that there are other forks, and the environment was another.
    forks.start(sys.exit, 0).join(60)
    monkeypatch.setenv("COLOUR", "blue")
    process = forks.start(note_state, tmp_path)
    process.join(60)
    assert process.exitcode == 0
    assert (tmp_path / "state").read_text() == repr([1, 1, 1, True, "blue", str(Path.cwd())])
    assert (tmp_path / "at exit").exists()


@pytest.mark.parametrize(("argument", "code"), [(None, 0), (3, 3), ("a reason", 1)])
def test_the_exit_code_is_that_of_an_interpreter(argument: object, code: int) -> None:
    process = forks.start(sys.exit, argument)
    process.join(60)
    assert process.exitcode == code


SCRIPT = """
import os, subprocess, sys, time
import neighbour
if __name__ == "__main__":
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"])
    print(neighbour.__name__, sys.argv[1:], os.getcwd(), child.pid, flush=True)
    if sys.argv[1] == "wait":
        time.sleep(100)
    child.kill()
    sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "neighbour.py").touch()
    (folder / "script.py").write_text(SCRIPT)
    return str(folder / "script.py")


def test_a_script_runs_as_one_and_says_what_it_printed(script: str, tmp_path: Path) -> None:
    assert scripts.run(["python", script, "0"], tmp_path).startswith(f"neighbour ['0'] {tmp_path}")


def test_a_script_that_fails(script: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"ended with \[7\]:\nneighbour"):
        scripts.run(["python", script, "7"], tmp_path)


def test_slow_script_is_killed_with_its_children(script: str, tmp_path: Path) -> None:
    """A script that takes too long is killed with its children."""
    with pytest.raises(AssertionError, match=r"took longer than 1 s:\nneighbour") as caught:
        scripts.run(["python", script, "wait"], tmp_path, timeout=1.0)
    child = int(str(caught.value).split()[-1])
    deadline = time.monotonic() + 10
    while running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not running(child)


def running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def test_ranks_of_a_launch_get_what_accelerate_gives_them(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_MIXED_PRECISION")
    (tmp_path / "script.py").write_text(
        f"import os; print([os.environ[name] for name in {names}], flush=True)"
    )
    config = Path(__file__).parents[1] / "configs/accelerate/cpu_2_processes.yaml"
    command = [
        "accelerate",
        "launch",
        "--config_file",
        str(config),
        "--mixed_precision",
        "bf16",
        str(tmp_path / "script.py"),
    ]
    printed = scripts.run(command, tmp_path).splitlines()
    assert sorted(printed) == [str([rank, rank, "2", "localhost", "bf16"]) for rank in ("0", "1")]
