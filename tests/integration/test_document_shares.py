"""`document_shares` in the Trainer: shares keep their order, epoch, costs and exact losses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import IterableDatasetShard
from accelerate.state import AcceleratorState
from datasets.distributed import split_dataset_by_node
from test_deal_trainer import LENGTHS, TOKENS, rows
from torch.utils.data import DataLoader, Subset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    Trainer,
    TrainerCallback,
)

import hf_distca
import tiny_runs
from hf_distca.agreement.announce import PlanKey
from hf_distca.data.shares import Shares, StreamedShares
from hf_distca.errors import LayoutError
from hf_distca.integration.checks.reading_order import find_shares
from hf_distca.schedule.cost import AttentionShape, CostModel
from ranks import RankPools
from recorded import counted_planning

SHAPE = AttentionShape(4, 2, 16, 16, 4)


def make(ranks: int, **more: Any) -> Any:
    how = {"shapes": [(SHAPE, None)], "fill": "cut", **more}
    return tiny_runs.share_documents(LENGTHS, TOKENS, ranks, **how)


def build_trainer(dataset: Any, **more: Any) -> Trainer:
    how = {"remove_unused_columns": True, "num_train_epochs": 2, "bf16": False, **more}
    return tiny_runs.make_trainer("distca", dataset, train_sampling_strategy="sequential", **how)


def train_on_a_part(rank: int) -> str:
    """Train on rows that were divided by rank before they were dealt; return the error."""
    whole = datasets.Dataset.from_dict({"input_ids": tiny_runs.documents(*[48] * 40)})
    part = split_dataset_by_node(whole, rank, 2)
    config = tiny_runs.settings()
    trainer = build_trainer(
        hf_distca.document_shares(part, 120, shapes=[(SHAPE, None)], config=config, ranks=2)
    )
    with pytest.raises(hf_distca.DistCADesyncError) as caught:
        trainer.train()
    return str(caught.value)


def test_documents_divided_by_rank_are_refused(rank_pool: RankPools) -> None:
    for error in rank_pool(2)(train_on_a_part):
        assert "different documents in the same global batch" in error
        assert (
            "with all documents, not a part for each rank (split_dataset_by_node, shard)" in error
        )


def test_run_resumed_in_its_second_epoch_has_the_same_shares(tmp_path: Path) -> None:
    items = sum(LENGTHS) // TOKENS
    whole = build_trainer(
        make(1), folder=str(tmp_path), save_strategy="steps", save_steps=items + 2
    )
    whole.train()
    resumed = build_trainer(make(1), folder=str(tmp_path / "other"))
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{items + 2}"))
    assert tiny_runs.losses(resumed) == pytest.approx(tiny_runs.losses(whole), rel=1e-6)


class Epochs(TrainerCallback):
    """Record the epoch of the shares after each step."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        shares = find_shares(kwargs["train_dataloader"])
        assert shares is not None
        self.seen.append(shares.epoch)


@pytest.mark.parametrize("unused", [True, False])
def test_trainer_sets_the_epoch_of_shares(unused: bool) -> None:
    dataset, epochs = make(1), Epochs()
    trainer = build_trainer(dataset, remove_unused_columns=unused, callbacks=[epochs])
    trainer.train()
    items = sum(LENGTHS) // TOKENS
    assert epochs.seen == [0] * items + [1] * items
    assert find_shares(trainer.get_train_dataloader()) is find_shares(dataset)


def test_find_shares_sees_through_datasets_subsets_and_loaders() -> None:
    dataset = make(2)
    shares = find_shares(dataset)
    assert isinstance(shares, Shares)
    for wrapped in (
        shares,
        dataset.remove_columns([]),
        dataset.select(range(4)),
        datasets.concatenate_datasets([dataset]),
        Subset(dataset, range(2)),
        DataLoader(dataset),
        DataLoader(Subset(dataset, range(2))),
    ):
        assert find_shares(wrapped) is shares
    stream = hf_distca.document_shares(
        rows().to_iterable_dataset(), 48, shapes=[(SHAPE, None)], ranks=2
    )
    assert find_shares(DataLoader(IterableDatasetShard(stream))) is stream
    for other in (
        None,
        rows(),
        rows().with_transform(lambda batch: batch),
        [1],
        "text",
        DataLoader([1]),
    ):
        assert find_shares(other) is None


def read_dealing(**how: Any) -> Any:
    shares = find_shares(hf_distca.document_shares(rows(), 16, **how))
    assert shares is not None
    return shares.deal_settings


def test_dealing_takes_its_costs_from_the_model_settings_and_device() -> None:
    config = Gemma2Config(**tiny_runs.SIZES, head_dim=16, sliding_window=40, dtype=torch.bfloat16)
    half = AttentionShape(4, 2, 16, 16, 2)
    settings = hf_distca.DistCAConfig(tile=64, ping_pong=True)
    made = read_dealing(model=config, ranks=4, ranks_per_node=2, device="cuda", config=settings)
    assert (made.ranks, made.tokens_per_rank, made.ranks_per_node, made.config) == (
        4,
        16,
        2,
        settings,
    )
    assert list(made.costs) == [PlanKey(half, "cuda"), PlanKey(half, "cuda", 40)]
    assert [cost.window for cost in made.costs.values()] == [None, 40]
    assert made.costs[PlanKey(half, "cuda")] == CostModel.make_analytic(
        half, device_type="cuda", tile=64
    )

    own = CostModel.make_of_pairs(AttentionShape(1, 1, 8, 8, 2))
    hf_distca.configure(hf_distca.DistCAConfig(cost_model=own))
    made = read_dealing(model=tiny_runs.tiny_llama("sdpa"), dtype=torch.float64)
    (key,) = made.costs
    assert (made.ranks, key) == (1, PlanKey(AttentionShape(4, 2, 16, 16, 8), "cpu"))
    assert made.costs[key] == replace(own, shape=key.shape)
    hf_distca.configure()
    assert list(read_dealing(shapes=[(SHAPE, 5)], device="cpu").costs) == [PlanKey(SHAPE, "cpu", 5)]


@pytest.mark.parametrize(
    ("mixed", "element_bytes"), [("bf16", 2), ("fp16", 2), ("no", 4), (None, 4)]
)
def test_shares_are_planned_for_the_launchers_precision(
    monkeypatch: pytest.MonkeyPatch, mixed: str | None, element_bytes: int
) -> None:
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    if mixed is not None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", mixed)
    model = tiny_runs.tiny_llama("sdpa")
    assert [key.shape.element_bytes for key in read_dealing(model=model).costs] == [element_bytes]
    assert [
        key.shape.element_bytes for key in read_dealing(model=model, dtype=torch.float64).costs
    ] == [8]
    if mixed not in (None, "fp16"):  # fp16 is for GPUs
        monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
        Accelerator(mixed_precision=mixed, cpu=True)
        assert [key.shape.element_bytes for key in read_dealing(model=model).costs] == [
            element_bytes
        ]


class Endless:
    """Documents without a length."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield np.arange(10)


def test_data_set_without_a_length_becomes_a_stream_of_shares() -> None:
    stream = hf_distca.document_shares(Endless(), 8, shapes=[(SHAPE, None)], ranks=2)
    assert isinstance(stream, StreamedShares)
    first = next(iter(stream))
    assert first["input_ids"].shape == (8,)
    for how in ({"fill": "whole"}, {"longer": "refuse"}, {"seed": 3}, {"lengths": [1]}):
        with pytest.raises(hf_distca.ConfigError, match="for a stream of documents"):
            hf_distca.document_shares(Endless(), 8, shapes=[(SHAPE, None)], ranks=2, **how)


def test_columns_that_the_model_takes_as_inputs_are_refused() -> None:
    documents = rows().add_column("token_type_ids", [[0] * length for length in LENGTHS])
    hf_distca.document_shares(documents, 16, model=tiny_runs.tiny_llama("sdpa"))
    config = AutoConfig.for_model(
        "roberta", is_decoder=True, hidden_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    with pytest.raises(LayoutError, match="'token_type_ids', an input of the model"):
        hf_distca.document_shares(documents, 16, model=AutoModelForCausalLM.from_config(config))
    with pytest.raises(LayoutError, match="'token_type_ids' of numbers, which may be an input"):
        hf_distca.document_shares(documents, 16, model=config)


def test_wrong_arguments_of_document_shares_are_refused() -> None:
    with pytest.raises(
        hf_distca.ConfigError, match=r"model=NoneType is neither a model .* or shapes"
    ):
        hf_distca.document_shares(rows(), 16)
    with pytest.raises(hf_distca.ConfigError, match=r"shapes=\[\] is empty"):
        hf_distca.document_shares(rows(), 16, shapes=[])
    for wrong in ({"ranks": 0}, {"ranks": 2, "ranks_per_node": 3}, {"tokens_per_rank": 0}):
        with pytest.raises(hf_distca.ConfigError, match=r"ranks|tokens"):
            hf_distca.document_shares(
                rows(), **{"tokens_per_rank": 16, "model": LlamaConfig(), **wrong}
            )
    with pytest.raises(LayoutError, match="642 tokens together, but a global batch has 10000"):
        hf_distca.document_shares(rows(), 10_000, model=LlamaConfig(), fill="cut")


@pytest.mark.parametrize(
    ("how", "is_whole"), [({}, True), ({"seed": None}, False), ({"fill": "cut"}, False)]
)
def test_shuffled_documents_stay_whole_by_default(how: dict[str, Any], is_whole: bool) -> None:
    """Whole documents need another order, so documents in the given order are cut."""
    dataset = hf_distca.document_shares(rows(), 200, shapes=[(SHAPE, None)], **how)
    shares = find_shares(dataset)
    starts = [shares.batches.get_pieces(0, number).starts for number in range(len(shares.batches))]
    assert np.concatenate(starts).any() != is_whole


def evaluate(rank: int, ranks: int) -> dict[str, float]:
    """Evaluate documents longer than a rank's tokens on all ranks together."""
    config = tiny_runs.settings(balance_evaluation=True)
    shares = make(ranks, config=config, seed=None, fill=None)
    trainer = build_trainer(
        shares, eval_dataset=shares, config=config, num_train_epochs=3, remove_unused_columns=False
    )
    with counted_planning() as planning:
        loss = trainer.evaluate()["eval_loss"]
    return {
        "loss": loss,
        "plannings of a batch": len(planning) * ranks / len(shares),
        "dispatches": tiny_runs.dispatches(),
    }


def test_evaluation_of_shares_has_the_loss_of_one_process(rank_pool: RankPools) -> None:
    alone = evaluate(0, 1)
    for ranks in (2, 3):
        for found in rank_pool(ranks)(evaluate, ranks):
            assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6)
            assert found["plannings of a batch"] == 1
            assert found["dispatches"] > 0
