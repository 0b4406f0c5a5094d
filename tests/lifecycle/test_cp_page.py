"""Refusals of other ways that the page of trainers names, in the packages that are
installed; and what it says to write instead.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import big_modeling
from transformers import MistralConfig, PreTrainedConfig, Qwen3NextConfig, Trainer

from pages import ROOT

PAGE = (ROOT / "docs" / "works_with.md").read_text()


def model_of(config: PreTrainedConfig, attention: str = "sdpa") -> Any:
    config._attn_implementation = attention
    return SimpleNamespace(config=config, named_modules=list)


@pytest.mark.parametrize(
    ("refuse", "config"),
    [
        ("_attach_context_parallel_hooks", MistralConfig(sliding_window=64)),
        ("_attach_context_parallel_hooks", Qwen3NextConfig()),
        ("_refuse_recurrent_layers_under_sequence_parallelism", Qwen3NextConfig()),
    ],
)
def test_accelerate_refuses_windows_and_linear_attention(
    refuse: str, config: PreTrainedConfig
) -> None:
    assert refuse in PAGE
    with pytest.raises(ValueError, match="does not support attention layers of type"):
        getattr(big_modeling, refuse)(model_of(config))


def test_the_trainer_takes_sdpa_only_under_context_parallelism() -> None:
    said = "Context parallelism is supported only with SDPA attention"
    assert said in PAGE
    config = SimpleNamespace(cp_enabled=True, cp_backend="torch")
    trainer = SimpleNamespace(accelerator=SimpleNamespace(parallelism_config=config))
    model = model_of(MistralConfig(), "flash_attention_2")
    with pytest.raises(ValueError, match=said):
        Trainer._prepare_context_parallel_inputs(trainer, model, {})  # type: ignore[arg-type]


def test_notes_of_the_table_are_all_there() -> None:
    table, notes = PAGE.split("\n1. accelerate")
    named = {int(number) for number in re.findall(r"\[(\d+)\]", table)}
    listed = [int(number) for number in re.findall(r"^(\d+)\. ", f"1. {notes}", re.MULTILINE)]
    assert listed == sorted(named) == list(range(1, len(listed) + 1))


def test_lines_to_write_are_those_of_the_other_pages() -> None:
    shares = PAGE.split("```python\n")[1].split("```")[0]
    assert shares in (ROOT / "docs" / "long_documents.md").read_text()
    added = [line[1:] for line in re.findall(r"^\+.*", PAGE, re.MULTILINE)]
    assert added.count("hf_distca.deal(trainer, tokens_per_rank=16384)") == 2
    section = PAGE.split("\n## axolotl\n")[1].split("\n## ")[0]
    for line in ("  - hf_distca.plugins.axolotl.DistCAPlugin", "  tokens_per_rank: 16384"):
        assert line in added
        assert line in section
