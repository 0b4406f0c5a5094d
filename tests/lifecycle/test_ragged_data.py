"""Datasets whose size is no multiple of ranks and batches, datasets without a length, and runs that
end early.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import datasets
import pytest
from torch.utils.data import IterableDataset
from transformers import EarlyStoppingCallback

import hf_distca
from ranks import RankPools
from tiny_runs import VOCABULARY, Row, dispatches, documents, losses, make_trainer, rows
from turns import in_turn

LENGTHS = (96, 5, 31, 1, 64, 17, 80)  # 7 documents: no batch size divides them evenly on 2 ranks


def single_documents() -> list[Row]:
    return [{"input_ids": ids} for ids in documents(*LENGTHS)]


class Stream(IterableDataset[Row]):
    def __iter__(self) -> Iterator[Row]:
        yield from single_documents()


def train(
    rank: int, implementation: str, stream: bool, arguments: dict[str, Any]
) -> tuple[list[float], int, float]:
    data = Stream() if stream else single_documents()
    trainer = make_trainer(implementation, data, bf16=False, **arguments)
    trainer.train()
    return losses(trainer), dispatches(), trainer.state.epoch


DROPPED = {"dataloader_drop_last": True}
OWN_READING = {"accelerator_config": {"dispatch_batches": False}}


@pytest.mark.parametrize(
    ("stream", "arguments"),
    in_turn(
        [
            (False, {"num_train_epochs": 2, "per_device_train_batch_size": 2}),
            (False, {"num_train_epochs": 2, "gradient_accumulation_steps": 3}),
            (False, {**DROPPED, "num_train_epochs": 2, "per_device_train_batch_size": 3}),
            (True, {**OWN_READING, "max_steps": 5, "per_device_train_batch_size": 2}),
        ],
        4,
    ),
    ids=["last batch uneven", "last accumulation short", "last batch dropped", "stream"],
)
def test_epochs_that_end_in_partial_batches_train_as_under_sdpa(
    rank_pool: RankPools, stream: bool, arguments: dict[str, Any]
) -> None:
    pool = rank_pool(2)
    ours, theirs = (pool(train, name, stream, arguments) for name in ("distca", "sdpa"))
    for (run, moved, epoch), (plain, _, plain_epoch) in zip(ours, theirs, strict=True):
        assert moved > 0
        assert epoch == plain_epoch
        assert len(run) >= 4
        assert run == pytest.approx(plain, rel=1e-4)


def train_on_dispatched_batches(rank: int, arguments: dict[str, Any]) -> str:
    """Return the error in which training ends if rank 0 reads for all ranks."""
    trainer = make_trainer("distca", Stream(), max_steps=3, **arguments)
    with pytest.raises(hf_distca.UnsupportedError) as refused:
        trainer.train()
    return str(refused.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"remove_unused_columns": True},
        {"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": 2},
    ],
    ids=["default settings", "split batches"],
)
def test_dispatched_batches_are_refused_on_every_rank(
    rank_pool: RankPools, arguments: dict[str, Any]
) -> None:
    for message in rank_pool(2)(train_on_dispatched_batches, arguments):
        assert 'accelerator_config={"dispatch_batches": False}' in message


def read_dispatched_batches(rank: int, lengths: tuple[int, ...]) -> str:
    """Return rank 0's error if no code of hf_distca inspects the loader."""
    stream = [{"input_ids": [7] * length} for length in lengths]
    trainer = make_trainer(
        "distca", datasets.IterableDataset.from_generator(lambda: iter(stream)), max_steps=2
    )
    trainer.remove_callback(hf_distca.DistCACallback)
    if rank:  # rank 1 would wait for rank 0 inside torch
        return ""
    with pytest.raises((TypeError, RuntimeError)) as refused:
        next(iter(trainer.get_train_dataloader()))
    return str(refused.value)


@pytest.mark.parametrize("lengths", [(8, 8), (8, 9)], ids=["equal rows", "rows of two lengths"])
def test_error_names_dispatch_batches_without_the_callback(
    rank_pool: RankPools, lengths: tuple[int, ...]
) -> None:
    message, _ = rank_pool(2)(read_dispatched_batches, lengths)
    assert "dispatch_batches" in message
    assert "False" in message


def test_one_process_trains_on_a_stream_without_exchanges() -> None:
    run, moved, _ = train(0, "distca", True, {"max_steps": 3})
    assert len(run) >= 3
    assert moved == 0


def generate_documents(numbers: Sequence[int]) -> Iterator[Row]:
    """Yield documents whose first token is their number."""
    for number in numbers:
        yield {"input_ids": [number, *range(2, 3 + number)]}


def read(rank: int, numbers: Sequence[int]) -> tuple[int, list[int]]:
    """Return the number of shards of a stream, and the first token of each document that this rank
    trains on.
    """
    stream = datasets.IterableDataset.from_generator(
        generate_documents, gen_kwargs={"numbers": numbers}
    )
    trainer = make_trainer("distca", stream, max_steps=4, **OWN_READING)
    firsts: list[int] = []

    def pack(features: Sequence[Row]) -> dict[str, Any]:
        firsts.extend(feature["input_ids"][0] for feature in features)
        return hf_distca.PackingCollator()(features)

    trainer.data_collator = pack
    trainer.train()
    return stream.num_shards, firsts


@pytest.mark.parametrize(
    "numbers", [list(range(2, 10)), tuple(range(2, 10))], ids=["8 shards", "1 shard"]
)
def test_each_rank_gets_its_share_of_a_stream(rank_pool: RankPools, numbers: Sequence[int]) -> None:
    """datasets makes a shard of each item of a list. accelerate deals out shards if there are
    enough, and documents otherwise.
    """
    (shards, first), (_, second) = rank_pool(2)(read, numbers)
    assert shards == (len(numbers) if isinstance(numbers, list) else 1)
    assert sorted(first + second) == list(numbers)
    assert len(first) == len(second)


def stop_early(
    rank: int, implementation: str, folder: str
) -> tuple[list[float], int, float | None]:
    stopping = EarlyStoppingCallback(1, early_stopping_threshold=float(VOCABULARY))
    trainer = make_trainer(
        implementation,
        rows(16),
        folder=folder,
        eval_dataset=rows(3),
        callbacks=[stopping],
        bf16=False,
        max_steps=8,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
    )
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    return [*losses(trainer), after], trainer.state.global_step, trainer.state.best_metric


def test_early_stopping_equals_sdpa(rank_pool: RankPools, tmp_path: Any) -> None:
    pool = rank_pool(2)
    ours, theirs = (pool(stop_early, name, str(tmp_path / name)) for name in ("distca", "sdpa"))
    for (run, steps, best), (plain, plain_steps, plain_best) in zip(ours, theirs, strict=True):
        assert steps == plain_steps == 4
        assert best == pytest.approx(plain_best, rel=1e-4)
        assert run == pytest.approx(plain, rel=1e-4)
