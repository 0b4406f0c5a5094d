"""Liger's fused loss with offloaded checkpoints on dealt documents, compared with the same script
without either.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_first_script import LAUNCH, read_script, train, write_model_and_documents

from checkpointed import ARGUMENT
from test_example import run_program

# Triton's interpreter replaces the GPU. It cannot run Liger's other two kernels for Llama.
LIGER = 'use_liger_kernel=True, liger_kernel_config={"rms_norm": False, "swiglu": False}, '
# Offloaded checkpoints, in unpinned memory: pinning needs an accelerator.
OFFLOADED = f'{ARGUMENT}=True, {ARGUMENT}_kwargs={{"offload": True, "use_reentrant": False}}, '
UNPINNED = """import torch
from torch.autograd.graph import save_on_cpu
from transformers import modeling_utils
modeling_utils.save_on_cpu = lambda pin_memory, device_type: save_on_cpu(False, device_type)
"""
USED = '\nassert model.forward.__module__.startswith("liger_kernel.")\n'


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fused_loss_of_liger_on_two_ranks_equals_sdpa_on_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("liger_kernel", reason="needs pip install liger-kernel")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    write_model_and_documents(tmp_path)
    page = "docs/long_documents.md"
    fused = read_script(page, 48, "distca", "float32")
    fused = fused.replace("max_steps=6, ", f"max_steps=6, {LIGER}{OFFLOADED}")
    fused = fused.replace("trainer.train()\n", f"trainer.train(){USED}")
    (tmp_path / "train.py").write_text(UNPINNED + fused)
    run_program([*LAUNCH, str(tmp_path / "train.py")], tmp_path, 140)
    ours = json.loads((tmp_path / "logged.json").read_text())
    theirs = train(read_script(page, 96, "sdpa", "float32"), tmp_path, ["python"])
    assert len(theirs["loss"]) == 6
    assert ours == pytest.approx(theirs, rel=1e-5)
