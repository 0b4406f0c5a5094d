"""What the README tells a newcomer to run, on small settings."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BASH = re.compile(r"```bash\n(.*?)```", re.DOTALL)


def commands(page: str) -> list[str]:
    return [line.split(" # ")[0].strip() for block in BASH.findall((ROOT / page).read_text()) for line in block.splitlines()]


def run(command: list[str], folder: Path, timeout: float) -> str:
    """Run a command in a process group of its own, which is killed as a whole if it takes too long."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, output
    return output


@pytest.mark.timeout(400)
def test_the_example_trains_compares_and_draws(tmp_path: Path) -> None:
    launch = shlex.split(next(line for line in commands("README.md") if line.startswith("accelerate launch")))
    command = [str(ROOT / word) if (ROOT / word).is_file() else word for word in launch]
    small = ["--max_length", "2048", "--tokens_per_batch", "2048", "--max_steps", "2", "--comparison_batches", "1"]
    output = run([*command, *small, "--output_dir", "out"], tmp_path, 360)
    for text in ("balancing off", "balancing on", "attention imbalance, measured", "distca/imbalance_estimated_after"):
        assert text in output
    assert (tmp_path / "out" / "balance.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_the_plan_command_of_the_readme(tmp_path: Path) -> None:
    for line in commands("README.md"):
        if "hf-distca plan" in line or line.startswith("echo"):
            run(["bash", "-c", line], tmp_path, 60)
    assert json.loads((tmp_path / "plan.json").read_text())["tasks"]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "examples/README.md"])
def test_every_file_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    files = re.findall(r"(?:configs|examples|benchmarks|tests|docs)/[\w./-]+\.\w+", text)
    for name in {*links, *files}:
        assert (ROOT / name).exists() or ((ROOT / page).parent / name).exists(), name
