"""A model that accepts attn_implementation="distca" and never calls distca is refused."""

from __future__ import annotations

import pytest
import torch
from test_prepare import build_mamba
from transformers import LlamaConfig, LlamaForCausalLM

import hf_distca
from tiny_runs import SIZES, make_trainer, rows


class Deaf(LlamaForCausalLM):
    """Stands for a model outside transformers with its own attention."""

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: object
    ) -> dict[str, torch.Tensor]:
        logits = self.lm_head(self.model.embed_tokens(input_ids))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def train(model: torch.nn.Module) -> None:
    make_trainer("distca", rows(4), model=model, config=hf_distca.DistCAConfig()).train()


def test_model_that_never_calls_distca_is_refused_after_one_step() -> None:
    model = Deaf(LlamaConfig(**SIZES, attn_implementation="distca"))
    with pytest.raises(
        hf_distca.UnsupportedError, match=r"Deaf was loaded with .* never called distca"
    ):
        train(model)
    train(Deaf(LlamaConfig(**SIZES, attn_implementation="sdpa")))


def test_family_without_attention_is_refused_before_a_step() -> None:
    with pytest.raises(hf_distca.UnsupportedError, match="mamba"):
        train(build_mamba())
