"""A run saved under one attention implementation resumes under another: checkpoints hold no setting
of distca.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from hf_distca.agreement.record_rows import RECORD_NAME
from ranks import RankPools
from tiny_runs import dispatches, losses, make_trainer, rows, settings


def train(
    rank: int,
    implementation: str,
    folder: str,
    resume_from: str | None,
    ping_pong: bool,
    loaded: bool,
) -> tuple[list[float], int]:
    model = (
        LlamaForCausalLM.from_pretrained(resume_from, attn_implementation=implementation)
        if loaded and resume_from
        else None
    )
    trainer = make_trainer(
        implementation,
        rows(9),
        folder=folder,
        model=model,
        config=settings(ping_pong=ping_pong),
        bf16=False,
        max_steps=6,
        save_strategy="steps",
        save_steps=3,
    )
    trainer.train(resume_from_checkpoint=resume_from)
    trainer.save_model()
    return losses(trainer), dispatches()


def list_files(folder: Path) -> set[str]:
    """List all files except the record of the run."""
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.name != RECORD_NAME
    }


@pytest.mark.slow
@pytest.mark.parametrize("ping_pong", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_resumes_under_another_attention_implementation(
    rank_pool: RankPools, tmp_path: Path, ping_pong: bool
) -> None:
    pool = rank_pool(2)
    folders = {name: tmp_path / name for name in ("distca", "sdpa")}
    whole = {
        name: pool(train, name, str(folder), None, ping_pong, False)
        for name, folder in folders.items()
    }
    for (ours, moved), (theirs, _) in zip(whole["distca"], whole["sdpa"], strict=True):
        assert moved > 0
        assert ours == pytest.approx(theirs, rel=1e-4)

    assert list_files(folders["distca"]) == list_files(folders["sdpa"])
    for at in ("checkpoint-3", "checkpoint-6", "."):
        saved = {
            name: load_file(folder / at / "model.safetensors") for name, folder in folders.items()
        }
        assert list(saved["distca"]) == list(saved["sdpa"])
        for name, weight in saved["distca"].items():
            torch.testing.assert_close(weight, saved["sdpa"][name], rtol=1e-3, atol=1e-4)
        configs = [(folder / at / "config.json").read_text() for folder in folders.values()]
        assert json.loads(configs[0]) == json.loads(configs[1])
        assert "distca" not in configs[0]

    for first, second, loaded in (
        ("sdpa", "distca", False),
        ("distca", "sdpa", False),
        ("sdpa", "distca", True),
    ):
        checkpoint = str(folders[first] / "checkpoint-3")
        resumed = pool(train, second, str(tmp_path / "resumed"), checkpoint, ping_pong, loaded)
        for (now, moved), (straight, _) in zip(resumed, whole[first], strict=True):
            assert (moved > 0) == (second == "distca")
            assert now == pytest.approx(straight, rel=1e-4)
