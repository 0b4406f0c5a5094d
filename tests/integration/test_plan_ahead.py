"""A step planned ahead: two collectives for all its micro-batches, and the numbers of a step planned as it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from test_parity import PAIRS
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, Trainer

import hf_distca
from hf_distca.integration.session import current_session
from hf_distca.runtime.group import AttentionGroup
from ranks import RankPool
from tiny_runs import make_trainer

STEPS, MICRO_BATCHES = 3, 3
LENGTHS = ([[96], [70, 26], [5, 91]], [[16] * 6, [96], [32] * 3])  # of each rank's micro-batches


def model_for(kind: str) -> Any:
    torch.manual_seed(0)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 61,
        "head_dim": 16,
        "attn_implementation": "distca",
    }
    if kind == "windows":  # one layer of each kind: two plans a micro-batch
        windows = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
        return Gemma3ForCausalLM(Gemma3TextConfig(**shape, **windows)).train()
    return LlamaForCausalLM(LlamaConfig(**shape)).train()


def batches(rank: int, step: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(step)
    made = []
    for lengths in LENGTHS[rank]:
        documents = [torch.randint(0, 61, (n + step,), generator=generator).tolist() for n in lengths]
        made.append(hf_distca.PackingCollator()([{"documents": documents}]))
    return made


def train(rank: int, ahead: bool, kind: str, wrapper: str) -> tuple[list[float], list[dict[str, float]], list[int], int]:
    """Losses, balance figures of each step, rows exchanged for planning in each step, and the number of the last micro-batch."""
    hf_distca.configure(hf_distca.DistCAConfig(tile=8, min_gain=0.0, cost_model=PAIRS, ping_pong=kind == "halves"))
    model = model_for(kind)
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    elif wrapper == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, figures, gathers, history = [], [], [], current_session().planner.history
    for step in range(STEPS):
        before = history.total
        with patch.object(AttentionGroup, "gather", autospec=True, side_effect=AttentionGroup.gather) as gather:
            micro_batches = hf_distca.plan_ahead(batches(rank, step)) if ahead else batches(rank, step)
            for batch in micro_batches:
                loss = model(**batch, use_cache=False).loss
                loss.backward()
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        gathers.append(gather.call_count)
        figures.append((history.total - before).figures())
    return losses, figures, gathers, current_session().planner.number


@pytest.mark.parametrize(
    ("kind", "wrapper", "plans"), [("whole", "ddp", 1), ("windows", "ddp", 2), ("halves", "ddp", 1), ("whole", "fsdp1", 1)]
)
def test_steps_planned_ahead_are_those_planned_as_they_run(
    rank_pool: Callable[[int], RankPool], kind: str, wrapper: str, plans: int
) -> None:
    lazily, ahead = (rank_pool(2)(train, planned, kind, wrapper) for planned in (False, True))
    for (losses, figures, gathers, number), (same_losses, same_figures, fewer, same_number) in zip(lazily, ahead, strict=True):
        assert same_losses == losses
        assert number == same_number == STEPS * MICRO_BATCHES
        assert gathers == [2 * MICRO_BATCHES * plans] * STEPS, "both nano-batches are planned in one go"
        assert fewer == [2 * MICRO_BATCHES * plans, 2, 2], "the first step tells what there is to plan"
        for step, (one, other) in enumerate(zip(figures, same_figures, strict=True)):
            for name in ("before", "after"):
                assert other[f"distca/imbalance_estimated_{name}"] == one[f"distca/imbalance_estimated_{name}"]
            assert (other.get("distca/exchanged_mb_per_layer", 0) > 0) == (step > 0 or "distca/exchanged_mb_per_layer" in one)


def changed(rank: int) -> str:
    hf_distca.configure(hf_distca.DistCAConfig(tile=8, min_gain=0.0, cost_model=PAIRS, timeout_seconds=5))
    model = model_for("whole")
    for batch in batches(rank, 0):
        model(**batch, use_cache=False).loss.backward()
    (batch, *_) = hf_distca.plan_ahead(batches(rank, 1))
    if rank == 1:  # documents of other lengths, under the plans for those announced
        packed = batch["distca_documents"]
        batch["distca_documents"] = hf_distca.PackedDocuments((*packed.lengths[2:], 34), ahead=packed.ahead)
    with pytest.raises(hf_distca.DistCAError) as caught:
        model(**batch, use_cache=False).loss.backward()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_batch_changed_after_planning_is_refused(rank_pool: Callable[[int], RankPool]) -> None:
    waits, own = rank_pool(2)(changed, timeout=60)
    assert own.startswith("LayoutError: rank 1: a micro-batch has documents of")
    assert "leave batches as they are after plan_ahead" in own
    assert waits.startswith("DistCADesyncError")
    assert "rank 1 raised LayoutError" in waits


def unequal(rank: int) -> str:
    hf_distca.configure(hf_distca.DistCAConfig(tile=8, min_gain=0.0, cost_model=PAIRS, timeout_seconds=5))
    model = model_for("whole")
    for batch in batches(rank, 0):
        model(**batch, use_cache=False).loss.backward()
    with pytest.raises(hf_distca.DistCADesyncError) as caught:
        hf_distca.plan_ahead(batches(rank, 1)[rank:])
    return str(caught.value)


def test_ranks_with_other_numbers_of_micro_batches_all_get_an_error(rank_pool: Callable[[int], RankPool]) -> None:
    for message in rank_pool(2)(unequal, timeout=60):
        assert "different numbers of plans at once in micro-batches 4 to " in message
        assert "rank 0: 3, rank 1: 2" in message


def test_batches_without_documents_and_ranks_alone_are_left_as_they_are() -> None:
    plain = [{"input_ids": torch.ones(1, 4, dtype=torch.long)}, (1, 2)]
    assert hf_distca.plan_ahead(plain) == plain
    assert hf_distca.plan_ahead([]) == []
    packed = batches(0, 0)
    assert [one is other for one, other in zip(hf_distca.plan_ahead(packed), packed, strict=True)] == [True] * MICRO_BATCHES


class PlanningTrainer(hf_distca.PlanAheadMixin, Trainer):
    pass


def train_with(rank: int, ahead: bool) -> tuple[list[dict[str, float]], int, int]:
    """The log history of a Trainer's run, the number of its last micro-batch, and the rows exchanged for planning."""
    trainer = make_trainer(
        "distca",
        [{"documents": [[7] * n for n in LENGTHS[at % 2][at // 2 % MICRO_BATCHES]]} for at in range(2 * 4 * 2)],
        kind=PlanningTrainer if ahead else Trainer,
        gradient_accumulation_steps=3,
        num_train_epochs=2,  # of 8 micro-batches a rank: the last step of an epoch has two
        train_sampling_strategy="sequential",
    )
    with patch.object(AttentionGroup, "gather", autospec=True, side_effect=AttentionGroup.gather) as gather:
        trainer.train()
    return trainer.state.log_history, current_session().planner.number, gather.call_count


def test_a_trainer_plans_its_steps_ahead(rank_pool: Callable[[int], RankPool]) -> None:
    lazily, ahead = (rank_pool(2)(train_with, planned, timeout=120) for planned in (False, True))
    for (history, number, gathers), (same, same_number, fewer) in zip(lazily, ahead, strict=True):
        assert number == same_number == 16
        assert (gathers, fewer) == (2 * 16, 2 * 3 + 2 * 5), "after the first of six steps, two a step"
        for one, other in zip(history, same, strict=True):
            for name in ("loss", "grad_norm", "distca/imbalance_estimated_after"):
                assert one.get(name) == other.get(name)
