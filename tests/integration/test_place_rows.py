"""`hf_distca.place_rows` changes the order of rows within an optimizer step, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, DataLoaderShard
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration
from datasets import Dataset, disable_progress_bars
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers import MistralConfig, Trainer

import hf_distca
from hf_distca.integration.training import place_rows
from ranks import RankPools
from tiny_runs import SIZES, documents, exact_arguments, settings, tiny_llama

# Documents of rows of equal length: heavy and light rows, which some order evens out.
ROW = 48
KINDS = ((48,), (30, 10, 8), (24, 24), (8,) * 6, (40, 8), (12,) * 4, (6,) * 8)


def make_rows(count: int) -> Dataset:
    """Make packed rows; the first token of a row is its index."""
    kinds = np.random.default_rng(3).integers(0, len(KINDS), count).tolist()
    ids = documents(*[ROW] * count, seed=1)
    return Dataset.from_dict(
        {
            "input_ids": [[number, *row[1:]] for number, row in enumerate(ids)],
            "seq_lengths": [KINDS[kind] for kind in kinds],
        }
    )


class Watched(Trainer):
    """Records the step, the rows and the summed loss of each micro-batch."""

    seen: list[tuple[int, tuple[int, ...], float]]

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        loss = super().compute_loss(model, inputs, return_outputs, **kwargs)
        ids = inputs["input_ids"][0].reshape(-1, ROW)
        self.seen.append((self.state.global_step, tuple(ids[:, 0].tolist()), loss.item()))
        return loss


def make_trainer(count: int, **changes: Any) -> Watched:
    disable_progress_bars()
    hf_distca.configure(settings(cost_model="analytic"))
    rates = {"learning_rate": 1e-2, "adam_epsilon": 1e-2}
    trainer = Watched(
        tiny_llama("distca").double(),
        exact_arguments(**{"ddp_find_unused_parameters": False, **rates, **changes}),
        train_dataset=make_rows(count),
        data_collator=hf_distca.PackingCollator(),
    )
    trainer.seen = []
    return trainer


Seen = list[tuple[int, tuple[int, ...], float]]


def train(
    rank: int, per_node: int | None, count: int, resume: str | None, changes: dict[str, Any]
) -> Seen:
    """Train on one rank, with rows placed on nodes of `per_node` ranks; return the rows read."""
    trainer = make_trainer(count, **changes)
    if per_node is not None:
        assert hf_distca.place_rows(trainer, ranks_per_node=per_node) is trainer
    trainer.train(resume_from_checkpoint=resume)
    return trainer.seen


def group_by_step(seen: list[Seen]) -> dict[int, tuple[list[int], float]]:
    """Return rows and summed losses of all ranks by step."""
    numbers = sorted({step for rank in seen for step, _, _ in rank})
    every = [micro_batch for rank in seen for micro_batch in rank]
    return {
        number: (
            sorted(row for step, read, _ in every if step == number for row in read),
            math.fsum(loss for step, _, loss in every if step == number),
        )
        for number in numbers
    }


def count_waits(seen: list[Seen], per_node: int) -> int:
    """Sum the causal pairs of the busiest node over all micro-batches."""
    pairs = [
        sum(length * length for length in lengths)
        for lengths in make_rows(1 + find_last_row(seen))["seq_lengths"]
    ]
    of_ranks = np.array([[sum(pairs[row] for row in read) for _, read, _ in rank] for rank in seen])
    return int(of_ranks.reshape(-1, per_node, of_ranks.shape[1]).sum(axis=1).max(axis=0).sum())


def find_last_row(seen: list[Seen]) -> int:
    return max(row for rank in seen for _, read, _ in rank for row in read)


def check_placement(
    pool: Callable[..., list[Seen]], per_node: int, count: int, **changes: Any
) -> None:
    given, placed = (pool(each, count, None, changes) for each in (None, per_node))
    before, after = group_by_step(given), group_by_step(placed)
    assert [read for read, _ in after.values()] == [read for read, _ in before.values()]
    assert [loss for _, loss in after.values()] == pytest.approx(
        [loss for _, loss in before.values()], rel=1e-6
    )
    assert [[len(read) for _, read, _ in rank] for rank in placed] == [
        [len(read) for _, read, _ in rank] for rank in given
    ]
    if len(given) > per_node:
        assert count_waits(placed, per_node) < count_waits(given, per_node)
    else:
        assert placed == given


ACCUMULATED = {"gradient_accumulation_steps": 3, "num_train_epochs": 2}


def test_placed_rows_stay_in_their_optimizer_step_on_two_ranks(rank_pool: RankPools) -> None:
    """Two ranks read seven rows in two epochs; the last step is short, and is filled up."""
    check_placement(partial(rank_pool(2), train), 1, 7, **ACCUMULATED)


def test_rows_on_a_single_node_stay_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    check_placement(lambda *given: [train(0, *given)], 1, 7, **ACCUMULATED)
    assert "distca leaves rows in their order: there is one node" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        ACCUMULATED,
        {"per_device_train_batch_size": 2},
        {"per_device_train_batch_size": 8, "accelerator_config": {"split_batches": True}},
        {"dataloader_drop_last": True, "gradient_accumulation_steps": 2},
        {"train_sampling_strategy": "sequential"},
        {"accelerator_config": {"use_seedable_sampler": False}, "gradient_accumulation_steps": 2},
    ],
    ids=["accumulation", "batches", "split batches", "drop last", "in order", "generator"],
)
def test_placed_rows_stay_in_their_optimizer_step_on_two_nodes(
    rank_pool: RankPools, changes: dict[str, Any]
) -> None:
    check_placement(partial(rank_pool(4), train), 2, 27, **changes)


@pytest.mark.slow
def test_resumed_run_reads_the_rows_of_the_whole_run(rank_pool: RankPools, tmp_path: Any) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3, "output_dir": str(tmp_path)}
    changes = ACCUMULATED | saving
    pool = partial(rank_pool(4), train)
    whole = pool(2, 27, None, changes)
    resumed = pool(2, 27, str(tmp_path / "checkpoint-3"), changes | {"save_strategy": "no"})
    assert resumed == [[each for each in rank if each[0] >= 3] for rank in whole]


def read_in_loop(rank: int, per_node: int | None, split: bool) -> list[list[list[int]]]:
    """Read rows in a loop without a Trainer, by epoch and micro-batch."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    data = DataLoaderConfiguration(split_batches=split, use_seedable_sampler=True, data_seed=5)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=data)
    size = 2 * accelerator.num_processes if split else 2
    loader = accelerator.prepare(
        DataLoader(
            make_rows(13), batch_size=size, shuffle=True, collate_fn=hf_distca.PackingCollator()
        )
    )
    if per_node is not None:
        assert hf_distca.place_rows(loader, tiny_llama("distca"), ranks_per_node=per_node) is loader
        with pytest.raises(hf_distca.ConfigError, match="placed already"):
            hf_distca.place_rows(loader, ranks_per_node=per_node)
    return [
        [batch["input_ids"][0].reshape(-1, ROW)[:, 0].tolist() for batch in loader]
        for _ in range(2)
    ]


@pytest.mark.parametrize("split", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rows_of_a_placed_loader_keep_their_steps(rank_pool: RankPools, split: bool) -> None:
    given, placed = (rank_pool(2)(read_in_loop, per_node, split) for per_node in (None, 1))
    assert placed != given
    for epoch in range(2):
        for first in (0, 2):
            step = slice(first, first + 2)
            before, after = (
                sorted(row for rank in read for batch in rank[epoch][step] for row in batch)
                for read in (given, placed)
            )
            assert after == before
        assert [list(map(len, rank[epoch])) for rank in placed] == [
            list(map(len, rank[epoch])) for rank in given
        ]


@pytest.fixture(autouse=True)
def _no_accumulation_of_other_tests() -> None:
    GradientState._reset_state()


def make_loader(rank: int, count: int = 24, ranks: int = 4, **given: Any) -> DataLoaderShard:
    """Make the loader of accelerate for one of several processes."""
    # accelerate evens out only batches of one size.
    even = "batches" not in given
    batches = given.pop("batches", BatchSampler(SequentialSampler(range(count)), 1, False))
    sampler = BatchSamplerShard(batches, ranks, rank, even_batches=even)
    return DataLoaderShard(given.pop("dataset", make_rows(count)), batch_sampler=sampler)


def read_rows(loader: DataLoaderShard) -> list[int]:
    return [row for batch in loader.batch_sampler for row in batch]


def test_rows_are_weighed_by_the_model_or_by_squares(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """With a window of 8 keys, long documents are no heavier than short documents."""
    said = {}
    for name, model in (
        ("squares", None),
        ("all keys", tiny_llama("sdpa").config),
        ("window", MistralConfig(**SIZES, sliding_window=8)),
    ):
        hf_distca.configure(settings(tile=1))
        hf_distca.place_rows(make_loader(0), model, accumulation=3, ranks_per_node=2)
        (line,) = (line for line in capfd.readouterr().err.splitlines() if "places" in line)
        assert line.startswith(
            "distca places the 12 rows of each step on 2 nodes of 2 in 3 micro-batches. Attention"
            " of the"
        )
        said[name] = float(line.rpartition("mean: ")[2].split()[0])
    assert min(said["squares"], said["all keys"]) > 1.15
    assert said["window"] < 1.1


def test_attention_groups_inside_a_node_are_placed_like_nodes() -> None:
    """Groups of 2 ranks on a node of 4 share no work, so each group counts as a node."""
    orders = []
    for settings_, per_node in (({"group_size": 2}, 4), ({}, 2)):
        hf_distca.configure(settings(**settings_))
        loaders = [make_loader(rank, ranks=8) for rank in range(8)]
        orders.append(
            [read_rows(hf_distca.place_rows(loader, ranks_per_node=per_node)) for loader in loaders]
        )
    assert orders[0] == orders[1]
    assert sorted(row for rank in orders[0] for row in rank) == list(range(24))


def deal_rows() -> Any:
    return hf_distca.document_shares(
        make_rows(24).select_columns("input_ids"), 16, model=tiny_llama("distca"), ranks=4
    )


@pytest.mark.parametrize(
    ("nodes", "ranks", "expected"),
    [
        ((7, 7, 7, 7, 3, 3), 6, "3 nodes of 2"),  # nodes of unequal size
        # Two tensor-parallel ranks read the same rows.
        ((7, 7, 7, 7, 3, 3, 3, 3), 4, "2 nodes of 2"),
        ((7, 3, 7, 3), 4, "4 nodes of 1"),  # ranks on two nodes in turn
    ],
)
def test_nodes_are_found_by_the_host_of_each_rank(
    nodes: tuple[int, ...],
    ranks: int,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    hf_distca.configure(settings())
    monkeypatch.setattr(
        place_rows, "gather_object", lambda said: [(node, said[0][1]) for node in nodes]
    )
    hf_distca.place_rows(make_loader(0, ranks=ranks))
    assert f"on {expected} in 1 micro-batch." in capfd.readouterr().err


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "stream": (
        lambda: DataLoader(make_rows(4).to_iterable_dataset()),
        "IterableDataset has no length",
    ),
    "no loader": (lambda: None, "NoneType has no length"),
    "dealt": (lambda: make_loader(0, dataset=deal_rows()), "documents of this data set are dealt"),
    "batches": (lambda: make_loader(0, batches=[[0, 1], [2]]), "list chooses its own batch sizes"),
    "dispatched": (
        lambda: DataLoaderDispatcher(make_rows(4)),
        "rank 0 would read the batches of all ranks",
    ),
    "nodes": (lambda: make_loader(0, ranks=3), "ranks_per_node=2 must divide the 3 ranks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_loaders_whose_rows_cannot_be_placed_are_refused(name: str) -> None:
    given, said = REFUSED[name]
    with pytest.raises(hf_distca.DistCAError, match=said):
        hf_distca.place_rows(given(), ranks_per_node=2)


def test_place_rows_on_a_trainer_refuses_arguments_and_a_second_call() -> None:
    trainer = make_trainer(4)
    with pytest.raises(hf_distca.ConfigError, match="accumulation=2 and model=NoneType are given"):
        hf_distca.place_rows(trainer, accumulation=2)
    hf_distca.place_rows(trainer)
    with pytest.raises(hf_distca.ConfigError, match="of this Trainer are placed already"):
        hf_distca.place_rows(trainer)


def catch_refusals(rank: int) -> list[str]:
    """Return the errors for rows that differ between ranks, a loader for one rank, and changed
    rows.
    """
    said = []
    PartialState(cpu=True)
    for count in (8 + rank, 8):
        with pytest.raises(hf_distca.DistCAError) as error:
            hf_distca.place_rows(DataLoader(make_rows(count)), ranks_per_node=1)
        said.append(str(error.value))
    trainer = make_trainer(8)
    hf_distca.place_rows(trainer, ranks_per_node=1).train_dataset = make_rows(6)
    with pytest.raises(hf_distca.DistCAError) as error:
        trainer.get_train_dataloader()
    return [*said, str(error.value)]


def test_rows_that_differ_between_ranks_or_change_later_are_refused(rank_pool: RankPools) -> None:
    for said in rank_pool(2)(catch_refusals):
        assert said[0].startswith(
            "ranks 0 and 1 weigh rows differently: place_rows needs the same data set"
        )
        assert "this DataLoader gets batches from BatchSampler" in said[1]
        assert said[2].startswith("the loader reads 6 rows, but place_rows weighed 8")
