"""Models that take the name "distca" and never call it do not train in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import hf_distca


class Deaf(LlamaForCausalLM):
    """Stands for a model outside transformers that computes its attention by itself."""

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: object
    ) -> dict[str, torch.Tensor]:
        logits = self.lm_head(self.model.embed_tokens(input_ids))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def train(model: torch.nn.Module, folder: Path) -> None:
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=2,
        report_to="none",
        remove_unused_columns=False,
        disable_tqdm=True,
        save_strategy="no",
    )
    rows = [{"input_ids": [5, 6, 7]}] * 8
    callbacks = [hf_distca.DistCACallback()]
    Trainer(
        model,
        arguments,
        data_collator=hf_distca.PackingCollator(),
        train_dataset=rows,
        callbacks=callbacks,
    ).train()


def test_a_model_that_never_calls_is_found_after_one_step(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 16,
    }
    model = Deaf(LlamaConfig(**sizes, attn_implementation="distca"))
    with pytest.raises(
        hf_distca.UnsupportedError, match=r"Deaf was loaded with .* never called it"
    ):
        train(model, tmp_path)
    train(Deaf(LlamaConfig(**sizes, attn_implementation="sdpa")), tmp_path)


def test_family_without_attention_is_refused_before_a_step(tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(
        MambaConfig(
            hidden_size=16, num_hidden_layers=1, vocab_size=16, attn_implementation="distca"
        )
    )
    with pytest.raises(hf_distca.UnsupportedError, match="mamba"):
        train(model, tmp_path)
