"""The library with the torch of GPU images, where their wheel was downloaded by hand: see
CONTRIBUTING.md.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_private_names_and_kernels_with_an_older_torch(tmp_path: Path) -> None:
    if not (ROOT / "build" / "cuda_wheel" / "torch_2_11_0").exists():
        pytest.skip("no wheel there; python tests/cuda_wheel.py downloads it")
    script = [sys.executable, str(ROOT / "tests" / "cuda_wheel.py")]
    what = (
        "import torch, transformers as t; print(torch.version.cuda is not None, torch.__version__,"
        " t.__version__)"
    )
    done = subprocess.run(
        [*script, "--python", "-c", what], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.split() == ["True", "2.11.0+cu130", "5.17.0"]
    tests = (
        "tests/test_borrowed.py",
        "tests/kernels/test_op_arguments.py",
        "tests/integration/test_no_step_waits.py",
    )
    ran = subprocess.run(
        [*script, "-q", *tests], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert " passed" in ran.stdout
