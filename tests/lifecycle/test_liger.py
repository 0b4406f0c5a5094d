"""Liger's fused loss on dealt documents, beside offloaded checkpoints; the oracle is the script of
the page with neither.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_first_script import LAUNCH, script_of, train, write_model_and_documents

from checkpointed import ARGUMENT
from pages import words_of
from test_example import run_program

# Triton's interpreter, which stands in for a GPU, does not run Liger's other two kernels of a
# Llama.
LIGER = 'use_liger_kernel=True, liger_kernel_config={"rms_norm": False, "swiglu": False}, '
# Beside it, offloaded checkpoints, in memory that is not pinned: pinning needs an accelerator.
OFFLOADED = f'{ARGUMENT}=True, {ARGUMENT}_kwargs={{"offload": True, "use_reentrant": False}}, '
UNPINNED = """import torch
from torch.autograd.graph import save_on_cpu
from transformers import modeling_utils
modeling_utils.save_on_cpu = lambda pin_memory, device_type: save_on_cpu(False, device_type)
"""
USED = '\nassert model.forward.__module__.startswith("liger_kernel.")\n'


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fused_loss_of_liger_equals_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fused loss of Liger trains as one process without it."""
    pytest.importorskip("liger_kernel", reason="needs pip install liger-kernel")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    write_model_and_documents(tmp_path)
    *launch, _ = words_of(LAUNCH)
    page = "docs/long_documents.md"
    fused = script_of(page, 48, "distca", "float32")
    fused = fused.replace("max_steps=6, ", f"max_steps=6, {LIGER}{OFFLOADED}")
    fused = fused.replace("trainer.train()\n", f"trainer.train(){USED}")
    (tmp_path / "train.py").write_text(UNPINNED + fused)
    run_program([*launch, str(tmp_path / "train.py")], tmp_path, 140)
    ours = json.loads((tmp_path / "logged.json").read_text())
    theirs = train(script_of(page, 96, "sdpa", "float32"), tmp_path, ["python"])
    assert len(theirs["loss"]) == 6
    assert ours == pytest.approx(theirs, rel=1e-5)
