"""TRL's Trainers of pairs, completions and groups, with and without `place_rows`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
from datasets import Dataset, disable_progress_bars
from transformers import LlamaForSequenceClassification, Trainer

import hf_distca
from hf_distca.integration.current_session import current_session
from hf_distca.integration.training.place_rows import ItemRules
from ranks import RankPools
from tiny_runs import COMMON, documents, losses, make_tokenizer, settings, text_of, tiny_llama

pytest.importorskip("trl", reason='needs pip install -e ".[trl]"')
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")

# Tokens of a prompt and two answers. In order, rank 0 gets the two long items of each step.
LENGTHS = [(30, 70, 40), (20, 60, 50), (4, 6, 3), (2, 5, 8)] * 4
RANKS = 2


class Run(NamedTuple):
    """A training on one rank: losses, gradient norms, first tokens of items by micro-batch, and
    sent bytes.
    """

    losses: list[float]
    read: list[list[int]]
    sent: int


def make_rows(kind: str) -> Dataset:
    """Make the texts of items; the first token of an item is its index plus 2."""
    texts = [documents(*lengths, seed=number) for number, lengths in enumerate(LENGTHS)]
    for number, (prompt, _, _) in enumerate(texts):
        prompt[0] = number + 2
    prompts, chosen, rejected = (
        [text_of(ids) for ids in part] for part in zip(*texts, strict=True)
    )
    columns: dict[str, list[Any]] = {"prompt": prompts}
    if kind == "KTO":
        columns["completion"] = chosen
        columns["label"] = [number % 3 > 0 for number in range(len(texts))]
    elif kind != "GRPO":
        columns |= {"chosen": chosen, "rejected": rejected}
    return Dataset.from_dict(columns)


def reward(completions: list[str], **given: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def build_model(kind: str, implementation: str, seed: int = 0) -> Any:
    if kind == "Reward":
        config = tiny_llama(implementation, seed=seed).config
        config.num_labels = 1
        return LlamaForSequenceClassification(config).train()
    return tiny_llama(implementation, seed=seed)


def make_trainer(kind: str, implementation: str, **changes: Any) -> Trainer:
    """Make a Trainer of TRL that records the items of its micro-batches."""
    import trl

    disable_progress_bars()
    hf_distca.configure(settings())
    base: Any = getattr(trl, f"{kind}Trainer")

    class Noting(base):  # type: ignore[misc]
        read: list[list[int]]

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if kind != "GRPO":
                ids = inputs["input_ids"]
                self.read.append(ids[: len(ids) // (1 if kind == "KTO" else 2), 0].tolist())
            return super().training_step(model, inputs, *args, **kwargs)

    arguments = {
        **COMMON,
        "bf16": False,
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 2,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-2,
        "gradient_checkpointing": False,
        "train_sampling_strategy": "sequential",
        **changes,
    }
    parts: dict[str, Any] = {
        "args": getattr(trl, f"{kind}Config")(**arguments),
        "train_dataset": make_rows(kind),
        "processing_class": make_tokenizer(),
    }
    if kind in ("DPO", "KTO"):
        parts["ref_model"] = build_model(kind, implementation, seed=1)
    if kind == "GRPO":
        parts["reward_funcs"] = reward
    trainer: Any = Noting(build_model(kind, implementation), **parts)
    trainer.read = []
    return trainer  # type: ignore[no-any-return]


def train(rank: int, kind: str, implementation: str, placed: bool, changes: dict[str, Any]) -> Run:
    trainer: Any = make_trainer(kind, implementation, **changes)
    if placed:
        assert hf_distca.place_rows(trainer, ranks_per_node=1) is trainer
    trainer.train()
    return Run(losses(trainer), trainer.read, current_session().meter.sent_bytes)


# Arguments of `GRPOConfig`: rank 0 gets both groups of long prompts.
GROUPS = {"num_generations": 2, "max_completion_length": 8, "shuffle_dataset": False}
GROUPS |= {"train_sampling_strategy": "random", "per_device_train_batch_size": 4}


@pytest.mark.parametrize("kind", ["DPO", "KTO", "Reward", "GRPO"])
def test_trl_batches_are_balanced_with_the_losses_of_sdpa(rank_pool: RankPools, kind: str) -> None:
    changes = GROUPS if kind == "GRPO" else {}
    plain, ours = (
        rank_pool(RANKS)(train, kind, name, False, changes) for name in ("sdpa", "distca")
    )
    for before, after in zip(plain, ours, strict=True):
        assert after.losses == pytest.approx(before.losses, rel=1e-5, abs=1e-6)
        assert after.read == before.read
        assert max(after.losses) > 0.01  # GRPO's losses are 0, but its gradient norms are not
    assert max(run.sent for run in ours) > 0 == max(run.sent for run in plain)


def estimate_work(items: list[int]) -> int:
    """Estimate the causal pairs of some of DPO's items."""
    lengths = [LENGTHS[item - 2] for item in items]
    return sum((prompt + chosen) ** 2 + (prompt + other) ** 2 for prompt, chosen, other in lengths)


def group_by_step(read: list[list[int]], accumulation: int) -> list[list[int]]:
    """Return the sorted items of each step."""
    return [
        sorted(item for batch in read[first : first + accumulation] for item in batch)
        for first in range(0, len(read), accumulation)
    ]


ACCUMULATED = {"gradient_accumulation_steps": 2, "train_sampling_strategy": "random"}
IN_STEPS = {
    "DPO": ("DPO", ACCUMULATED),
    "KTO": ("KTO", {}),
    "Reward": ("Reward", ACCUMULATED | {"center_rewards_coefficient": 0.1}),
    "DPO, a pair a rank": (
        "DPO",
        ACCUMULATED
        | {
            "loss_type": ["aot", "sft"],
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 4,
        },
    ),
    "KTO, accumulated": ("KTO", {"gradient_accumulation_steps": 2}),
    "KTO without KL": ("KTO", ACCUMULATED | {"loss_type": "apo_zero_unpaired"}),
}
DEFAULT = {"DPO", "KTO"}


@pytest.mark.parametrize(
    "name",
    [each if each in DEFAULT else pytest.param(each, marks=pytest.mark.slow) for each in IN_STEPS],
)
def test_placed_items_have_the_losses_of_one_process(rank_pool: RankPools, name: str) -> None:
    kind, changes = IN_STEPS[name]
    alone, read = train_alone(kind, changes)
    ranks = rank_pool(RANKS)(train, kind, "distca", True, changes)
    for run in ranks:
        assert run.losses == pytest.approx(alone, rel=1e-5, abs=1e-6)
    together = [first + second for first, second in zip(*(run.read for run in ranks), strict=True)]
    # With KTO, items stay in their micro-batch, because the KL term is computed within it.
    within = 1 if name.startswith("KTO, acc") else changes.get("gradient_accumulation_steps", 1)
    assert group_by_step(together, within) == group_by_step(read, within)
    placed = sum(
        max(estimate_work(run.read[number]) for run in ranks) for number in range(len(together))
    )
    half = len(read[0]) // RANKS
    given = sum(max(estimate_work(batch[:half]), estimate_work(batch[half:])) for batch in read)
    assert placed < 0.8 * given


def train_alone(kind: str, changes: dict[str, Any]) -> tuple[list[float], list[list[int]]]:
    """Train one process under sdpa; return losses, and items of all ranks by micro-batch.

    If a batch has one item, the process accumulates more, so each loss stays that of one item.
    """
    size, steps = (
        changes.get(name, default)
        for name, default in (
            ("per_device_train_batch_size", 2),
            ("gradient_accumulation_steps", 1),
        )
    )
    more = (
        {"gradient_accumulation_steps": RANKS * steps}
        if size == 1
        else {"per_device_train_batch_size": RANKS * size}
    )
    trainer: Any = make_trainer(kind, "sdpa", **changes | more)
    if kind == "KTO":  # KTO takes the other answers, for KL, from the batch of one rank
        trainer.train_dataset = make_trainer(kind, "sdpa", **changes).train_dataset
    trainer.train()
    items = [item for batch in trainer.read for item in batch]
    return losses(trainer), [
        items[first : first + RANKS * size] for first in range(0, len(items), RANKS * size)
    ]


Call = Callable[[Any], Any]
REFUSED: dict[str, tuple[str, dict[str, Any], Call, str]] = {
    f"{kind} dealt": (
        kind,
        GROUPS if kind == "GRPO" else {},
        partial(hf_distca.deal, tokens_per_rank=64),
        said,
    )
    for kind, said in {
        "DPO": r"DPOTrainer trains on pairs, .* Call hf_distca.place_rows\(trainer\) instead",
        "KTO": r"KTOTrainer trains on completions, .* hf_distca.place_rows\(trainer\) instead",
        "Reward": r"RewardTrainer trains on pairs, .* hf_distca.place_rows\(trainer\) instead",
        "GRPO": "GRPOTrainer trains on groups of .* Train without hf_distca.deal or --tokens-per-",
    }.items()
} | {
    "GRPO placed": (
        "GRPO",
        GROUPS,
        hf_distca.place_rows,
        "GRPOTrainer trains on groups of completions that are written in the step: .* Train"
        ' without hf_distca.place_rows: attn_implementation="distca" balances batches',
    ),
    "DPO, a loss of a rank": (
        "DPO",
        {"loss_type": ["sigmoid", "sft"]},
        hf_distca.place_rows,
        "DPOTrainer with sft and per_device_train_batch_size=2 has a loss .* Set"
        " per_device_train_batch_size=1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_dealing_or_placing_that_cannot_be_exact_is_refused(name: str) -> None:
    kind, changes, call, said = REFUSED[name]
    with pytest.raises(hf_distca.UnsupportedError, match=said):
        call(make_trainer(kind, "distca", **changes))


def test_unknown_trainers_of_trl_are_refused_by_name() -> None:
    other = type("OtherTrainer", (Trainer,), {"__module__": "trl.experimental.other"})
    with pytest.raises(
        hf_distca.UnsupportedError,
        match="OtherTrainer trains on items that hf_distca does not know",
    ):
        hf_distca.deal(other.__new__(other), 64)


def test_rows_that_are_not_tokenized_are_refused() -> None:
    trainer = make_trainer("DPO", "distca")
    trainer.train_dataset = make_rows("DPO")
    with pytest.raises(
        hf_distca.UnsupportedError, match="rows have only these columns: prompt, chosen, rejected"
    ):
        hf_distca.place_rows(trainer)


def test_items_are_weighed_by_their_truncated_lengths() -> None:
    weighed = []
    for limit in (None, 8):
        items = ItemRules.read(trainer := make_trainer("DPO", "distca", max_length=limit))
        assert items is not None
        lengths, numbers = items.find_documents(trainer.train_dataset, quiet=True)
        weighed.append(lengths.max())
        assert numbers.tolist() == [*range(len(trainer.train_dataset))] * 2
    assert weighed == [101, 8]  # including the token that ends a document
