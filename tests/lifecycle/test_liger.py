"""Liger's fused loss on documents that are dealt: it reads `shift_labels`, as the script of the page without it does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_first_script import LAUNCH, script_of, write_model_and_documents

from pages import words_of
from test_example import run_program

# Triton's interpreter, which stands in for a GPU, does not run Liger's other two kernels of a Llama.
LIGER = 'use_liger_kernel=True, liger_kernel_config={"rms_norm": False, "swiglu": False}, '
USED = '\nassert model.forward.__module__.startswith("liger_kernel.")\n'


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_fused_loss_of_liger_trains_as_one_process_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("liger_kernel", reason="needs pip install liger-kernel")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    write_model_and_documents(tmp_path)
    script = tmp_path / "train.py"
    *launch, _ = words_of(LAUNCH)
    fused = script_of("docs/long_documents.md", 48).replace("max_steps=4, ", f"max_steps=4, {LIGER}")
    script.write_text(fused.replace("trainer.train()\n", f"trainer.train(){USED}"))
    run_program([*launch, str(script)], tmp_path, 140)
    ours = json.loads((tmp_path / "logged.json").read_text())
    script.write_text(script_of("docs/long_documents.md", 96, "sdpa"))
    run_program(["python", str(script)], tmp_path, 140)
    theirs = json.loads((tmp_path / "logged.json").read_text())
    assert len(theirs) == 4
    assert np.array(ours) == pytest.approx(np.array(theirs), rel=1e-5)
