"""Heads and losses that do not predict next tokens are refused on dealt and packed documents,
before training and at every entry point.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
    LlamaPreTrainedModel,
    Trainer,
)
from transformers.modeling_outputs import CausalLMOutput, TokenClassifierOutput

import hf_distca
from hf_distca.errors import LayoutError
from ranks import RankPools
from tiny_runs import SIZES, documents, exact_arguments, settings, share_documents

LENGTHS = (60, 7, 33, 28)
TOKENS = 64  # in a global batch


def config(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**SIZES, attn_implementation="distca", pad_token_id=0, **changes)


class Tagger(LlamaForTokenClassification):
    """A subclass whose name does not show the kind of its head."""


class ReadsLabels:
    """A custom head with one label per token: it reads `labels` and has no output embedding."""

    inner: str  # the attribute with the model under the head

    def forward(
        self,
        input_ids: Any = None,
        labels: Any = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        logits = self.score(getattr(self, self.inner)(input_ids, **kwargs).last_hidden_state)
        loss = cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        return TokenClassifierOutput(loss=loss / num_items_in_batch, logits=logits)


class OwnHead(ReadsLabels, LlamaPreTrainedModel):
    inner = "model"

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model = LlamaModel(config)
        self.score = torch.nn.Linear(config.hidden_size, 3)
        self.post_init()


class AroundModel(ReadsLabels, torch.nn.Module):
    """A module that is no model of transformers."""

    inner = "lm"

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config, self.lm = config, LlamaModel(config)
        self.score = torch.nn.Linear(config.hidden_size, 3)


class ShiftsLabels(LlamaForCausalLM):
    """A model whose forward shifts `labels`, and accepts `shift_labels` without reading them."""

    def forward(
        self,
        input_ids: Any = None,
        labels: Any = None,
        shift_labels: Any = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> CausalLMOutput:
        logits = self.lm_head(self.model(input_ids, **kwargs).last_hidden_state)
        return CausalLMOutput(
            loss=compute_shifted_loss(logits, labels, num_items_in_batch), logits=logits
        )


def compute_shifted_loss(
    logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any
) -> torch.Tensor:
    return (
        cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum"
        )
        / num_items_in_batch
    )


def build_model_with_own_loss(config: LlamaConfig) -> LlamaForCausalLM:
    model = LlamaForCausalLM(config)
    model.loss_function = lambda logits, labels, num_items_in_batch, **kwargs: compute_shifted_loss(
        logits, labels, num_items_in_batch
    )
    return model


def build_adapted_model(config: LlamaConfig) -> torch.nn.Module:
    return get_peft_model(Tagger(config), LoraConfig(r=2, task_type="TOKEN_CLS"))


# Models, and the class that a refusal names.
OTHER_HEADS: dict[str, tuple[Callable[[LlamaConfig], torch.nn.Module], str]] = {
    "tokens": (LlamaForTokenClassification, "LlamaForTokenClassification"),
    "tokens, subclass": (Tagger, "LlamaForTokenClassification"),
    "tokens, adapter": (build_adapted_model, "LlamaForTokenClassification"),
    "rows": (LlamaForSequenceClassification, "LlamaForSequenceClassification"),
    "spans": (LlamaForQuestionAnswering, "LlamaForQuestionAnswering"),
}
OWN_LOSSES: dict[str, Callable[[LlamaConfig], torch.nn.Module]] = {
    "loss_function": build_model_with_own_loss,
    "forward": ShiftsLabels,
    "head": OwnHead,
    "around": AroundModel,
}


def make_rows(**columns: Any) -> Dataset:
    return Dataset.from_dict({"input_ids": documents(*LENGTHS), **columns})


def build_trainer(model: torch.nn.Module, data: Any, **changes: Any) -> Trainer:
    disable_progress_bars()
    hf_distca.configure(settings())
    return Trainer(model, exact_arguments(max_steps=1, **changes), train_dataset=data)


def train_shares(model: torch.nn.Module) -> Any:
    """Train on shares that were made without a model to check."""
    shares = share_documents(LENGTHS, TOKENS)
    trainer = build_trainer(model, shares, train_sampling_strategy="sequential")
    trainer.data_collator = hf_distca.PackingCollator()
    return trainer.train()


def train_packed(model: torch.nn.Module) -> Any:
    trainer = build_trainer(model, make_rows(), per_device_train_batch_size=2)
    trainer.data_collator = hf_distca.PackingCollator()
    return trainer.train()


DOORS: dict[str, Callable[[Any], Any]] = {
    "deal": lambda model: hf_distca.deal(build_trainer(model, make_rows()), TOKENS),
    "document_shares": lambda model: hf_distca.document_shares(make_rows(), TOKENS, model=model),
    "shares without a model": train_shares,
    "PackingCollator": hf_distca.PackingCollator,
    "PackingCollator without a model": train_packed,
}


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("head", OTHER_HEADS)
def test_heads_that_do_not_predict_next_tokens_are_refused_by_name(head: str, door: str) -> None:
    make, named = OTHER_HEADS[head]
    if "without" in door and head == "spans":
        pytest.skip("question answering takes no labels, and fails without positions of answers")
    with pytest.raises(hf_distca.UnsupportedError, match=f"{named} learns labels of rows or of"):
        DOORS[door](make(config(num_labels=3)))


def test_token_classifier_runs_packed_rows_and_trains_on_padded_rows() -> None:
    model = LlamaForTokenClassification(config(num_labels=3))
    batch = hf_distca.PackingCollator()(list(make_rows()))
    del batch["labels"]
    assert model(**batch).logits.shape == (1, sum(LENGTHS), 3)
    same = Dataset.from_dict({"input_ids": documents(9, 9), "labels": [[0, 1, 2] * 3] * 2})
    assert build_trainer(model, same).train().training_loss > 0.5


def train_own_losses(rank: int) -> dict[str, str]:
    found = {}
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    for name, changes in [*((name, {}) for name in OWN_LOSSES), ("forward, compiled", compiled)]:
        torch.manual_seed(0)
        make = OWN_LOSSES[name.removesuffix(", compiled")]
        trainer = build_trainer(make(config()), make_rows(), **changes)
        trainer.model_accepts_loss_kwargs = True
        try:
            hf_distca.deal(trainer, TOKENS // 2).train()
            found[name] = f"trained: {trainer.state.log_history}"
        except hf_distca.UnsupportedError as error:
            found[name] = str(error)
        assert not trainer.state.global_step or found[name].startswith("trained"), name
    return found


def test_a_model_whose_own_loss_reads_labels_is_refused(rank_pool: RankPools) -> None:
    for found in rank_pool(2)(train_own_losses):
        assert len(found) == len(OWN_LOSSES) + 1
        for name, said in found.items():
            assert "gives its logits no gradient, though shift_labels has targets" in said, name


SINGLE = list(range(len(LENGTHS)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_rows(labels=SINGLE),
        lambda: make_rows(labels=SINGLE).with_format("torch"),
        lambda: list(make_rows(labels=SINGLE)),
        lambda: list(make_rows(labels=SINGLE).with_format("torch")),
        lambda: make_rows(labels=SINGLE).to_iterable_dataset(),
        lambda: make_rows(completion_mask=SINGLE),
        lambda: make_rows(labels=[0.5] * len(LENGTHS)),
    ],
    ids=["stored", "tensors", "list", "list of tensors", "stream", "mask", "scores"],
)
def test_one_label_per_row_is_refused_by_collator_shares_and_deal(make: Callable[[], Any]) -> None:
    model, data = LlamaForCausalLM(config()), make()
    refused = partial(pytest.raises, LayoutError, match="of a document must be a flat list of int")
    with refused():
        hf_distca.PackingCollator(model)(list(data))
    with refused():
        for share in hf_distca.document_shares(data, TOKENS, model=model):
            assert share["labels"] is not None
    with refused():
        hf_distca.deal(build_trainer(model, data), TOKENS).train()
