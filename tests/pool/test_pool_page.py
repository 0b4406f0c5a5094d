from __future__ import annotations

from pathlib import Path

import pytest

from pages import words_of
from test_example import run_program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_doctor_checks_a_pool(tmp_path: Path) -> None:
    command = words_of(
        "hf-distca run --servers 1 torchrun --nproc_per_node 3 -m hf_distca.tools.cli doctor"
    )
    output = run_program(command, tmp_path, timeout=200)
    assert "3 ranks on 1 node, 3 on each, 1 of them servers" in output
