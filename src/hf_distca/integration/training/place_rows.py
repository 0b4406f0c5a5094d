"""`place_rows`: packed rows in an order within each optimizer step that makes nodes even.

A loader that accelerate prepared has three layers: a sampler draws row numbers, a batch sampler
makes batches of them, in the same order on all ranks, and `BatchSamplerShard` leaves each rank
every n-th batch, or, with ``split_batches``, its part of each. The placement goes between the last
two. So what comes before it (seeds, epochs, generators that accelerate keeps equal on all ranks)
and after it (what a resume skips, workers, devices) is as it was. The Trainer makes its loader when
it begins to train: there `get_train_dataloader` is followed.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher
from accelerate.state import GradientState, PartialState
from accelerate.utils import gather_object
from torch.utils.data import BatchSampler, IterableDataset
from transformers import Trainer

from hf_distca.config import DistCAConfig
from hf_distca.data.row_placement import RowPlacement, StepPlaces, find_row_documents
from hf_distca.errors import ConfigError, UnsupportedError
from hf_distca.integration.checks.reading_order import find_shares
from hf_distca.integration.layer_kinds import count_layers, make_initial_cost
from hf_distca.integration.processes import print_lines
from hf_distca.integration.training.callback import find_session
from hf_distca.integration.training.pairs import ItemRules
from hf_distca.runtime.members import find_node_number
from hf_distca.schedule.layout import FloatArray, IntArray

Reader = TypeVar("Reader")
_SAMPLE_STEPS = 16  # that the estimate of the first line looks at


def place_rows(
    reader: Reader,
    model: Any = None,
    *,
    accumulation: int | None = None,
    ranks_per_node: int | None = None,
    end_of_document: int | None = None,
) -> Reader:
    """Place packed rows so that nodes have equal attention in each micro-batch of an optimizer
    step.

    For rows that stay whole: of TRL's ``packing=True``, of `PackingCollator`, or cut from token
    files. Work inside a node is evened by the exchange; between nodes it is evened here, by order
    alone. Every step keeps its rows, every rank reads equally many in each micro-batch, and nothing
    waits for a later step. Epochs, seeds, resuming and the last, short step are as without it.

    Pairs of TRL's `DPOTrainer` and `RewardTrainer` and completions of its `KTOTrainer` are placed
    in the same way. The loss stays the same: losses that depend on which of them share a rank are
    refused, and so are TRL's other Trainers, but for `SFTTrainer`.

    Call it on every rank, with the same arguments: between a Trainer and its ``train()``, or on a
    loader that accelerate has prepared. Ranks compare what they read. A rank alone keeps its order.

    Args:
        reader: a Trainer of transformers or TRL; or what ``accelerator.prepare`` made of a
            `DataLoader`.
        model: for a loader the model, or its config, for whose attention rows are weighed. Without
            it, they are weighed by the squares of document lengths.
        accumulation: for a loader micro-batches of a step, counted anew in each epoch; those of the
            `Accelerator` if None.
        ranks_per_node: ranks [0, n), [n, 2n), ... are nodes; as they are found if None.
            Tensor-parallel ranks count once. With 1, ranks are evened, as for attention that they
            do not share.
        end_of_document: token id that ends documents, for rows without a column ``documents``,
            ``seq_lengths`` or ``position_ids``. All tokens are read once.

    Returns:
        The same Trainer or loader.

    Raises:
        ConfigError: if an argument is out of its range, or ranks read different rows.
        UnsupportedError: for data without a length, dealt documents, items of TRL whose loss would
            change, and loaders whose batches cannot be placed, with what to set instead; for those
            of a Trainer before its first step.
        LayoutError: if rows do not say how long they are.
    """
    if not isinstance(reader, Trainer):
        config = find_session().config
        steps = _read_accumulation() if accumulation is None else accumulation
        work = _weigh_rows(getattr(reader, "dataset", None), model, config, end_of_document)
        _make_placer(work, steps, ranks_per_node, config)(reader)
        return reader
    if model is not None or accumulation is not None:
        raise ConfigError(
            f"accumulation={accumulation} and model={type(model).__name__} for a Trainer, which has"
            " its own: leave them out."
        )
    make = reader.get_train_dataloader
    if getattr(make, "places_rows", False):
        raise ConfigError(
            "the rows of this Trainer are placed already: call hf_distca.place_rows once."
        )
    config = find_session(reader).config
    items = ItemRules.read(reader)
    steps = 1 if items and items.in_micro_batches else reader.args.gradient_accumulation_steps
    work = _weigh_rows(reader.train_dataset, reader.model, config, end_of_document, items)
    place_in_loader = _make_placer(work, steps, ranks_per_node, config)

    @wraps(make)
    def get_train_dataloader() -> Any:
        return place_in_loader(make())

    get_train_dataloader.places_rows = True  # type: ignore[attr-defined]
    reader.get_train_dataloader = get_train_dataloader  # type: ignore[method-assign]
    return reader


def _read_accumulation() -> int:
    """Read the number of micro-batches that an `Accelerator` makes a step of."""
    state = GradientState()
    if state.num_steps > 1 and not state.sync_with_dataloader:
        raise UnsupportedError(
            "sync_with_dataloader=False lets steps go on from one epoch to the next, and place_rows"
            " keeps the rows of each step of an epoch. Set"
            " GradientAccumulationPlugin(sync_with_dataloader=True)."
        )
    return int(state.num_steps)


def _weigh_rows(
    rows: Any,
    model: Any,
    config: DistCAConfig,
    end_of_document: int | None,
    items: ItemRules | None = None,
) -> FloatArray:
    """Estimate the seconds of attention of each row, in all layers; without a model, return the
    squares of its documents' lengths.
    """
    if not hasattr(rows, "__len__") or isinstance(rows, IterableDataset):
        raise UnsupportedError(
            f"place_rows weighs all rows before training, and data of {type(rows).__name__} does"
            " not say how many there are. Give a data set with a length, or leave place_rows out."
        )
    if find_shares(rows) is not None:
        raise UnsupportedError(
            "documents of this data set are dealt, which makes ranks even: leave place_rows out."
        )
    quiet = not PartialState().is_main_process
    lengths, row = (
        items.find_documents(rows, quiet=quiet)
        if items
        else find_row_documents(rows, end_of_document, quiet=quiet)
    )
    seconds = _estimate_seconds(lengths, getattr(model, "module", model), config)
    # It adds one after another, in the same order on every machine.
    return np.asarray(np.bincount(row, weights=seconds, minlength=len(rows)), dtype=np.float64)


def _estimate_seconds(lengths: IntArray, model: Any, config: DistCAConfig) -> FloatArray:
    """Estimate the seconds of each document in all layers of attention; without a model, return the
    squares of lengths.
    """
    if model is None:
        return np.square(lengths.astype(np.float64))
    seconds = np.zeros(len(lengths))
    for key, layers in count_layers(model, None, PartialState().device.type).items():
        cost = make_initial_cost(key, config)
        chunk = key.chunk or max(int(lengths.max(initial=1)), 1)
        whole, rest = np.divmod(lengths, chunk)
        seconds += layers * (
            whole * cost.estimate_seconds(chunk, chunk)
            + np.where(rest > 0, cost.estimate_seconds(rest, rest), 0.0)
        )
    return seconds


def _make_placer(
    work: FloatArray, accumulation: int, ranks_per_node: int | None, config: DistCAConfig
) -> Callable[[Any], Any]:
    """Make a function that places the rows of a prepared loader, and returns it.

    All ranks make sure that they weigh the same rows, or raise.

    Args:
        work: seconds of attention of each row.
        accumulation: micro-batches of a step.
        ranks_per_node: ranks of a node, if the user said.
        config: settings, which say which ranks share attention.
    """
    node_numbers, digests = zip(
        *gather_object([(find_node_number(), zlib.crc32(work.tobytes()))]), strict=True
    )
    if len(set(digests)) > 1:
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        raise ConfigError(
            f"ranks 0 and {other} weigh rows differently: place_rows needs the same data set,"
            " model and settings on all ranks. Do not divide the data set by rank: accelerate"
            " does."
        )

    def place_in_loader(loader: Any) -> Any:
        shard = _find_shard(loader)
        nodes = (
            1
            if shard is None
            else _count_nodes(shard.num_processes, node_numbers, ranks_per_node, config)
        )
        text = (
            "distca leaves rows in their order: there is one node, which evens its work by itself."
        )
        if shard is not None and nodes > 1:
            places = _place_in_shard(shard, loader.dataset, nodes, work, accumulation)
            text = _describe_places(places, shard.batch_sampler.work)
        if PartialState().is_main_process:
            print_lines(text)
        return loader

    return place_in_loader


def _place_in_shard(
    shard: BatchSamplerShard, rows: Any, nodes: int, work: FloatArray, accumulation: int
) -> StepPlaces:
    """Place the rows of a data set for several nodes."""
    batches, ranks = shard.batch_sampler, shard.num_processes
    if isinstance(batches, RowPlacement):
        raise ConfigError(
            "the rows of this loader are placed already: call hf_distca.place_rows once."
        )
    if len(rows) != len(work):
        raise ConfigError(
            f"the loader reads {len(rows)} rows, and place_rows weighed {len(work)}: call it with"
            " the data set that is trained on."
        )
    size = batches.batch_size // ranks if shard.split_batches else batches.batch_size
    places = StepPlaces(nodes, ranks // nodes, size, accumulation)
    shard.batch_sampler = RowPlacement(batches, work, places, even_batches=shard.even_batches)
    return places


def _count_nodes(
    ranks: int, node_numbers: Sequence[int], per_node: int | None, config: DistCAConfig
) -> int:
    """Count the sets of neighbours that even their work by themselves: ranks of one node and of one
    attention group.
    """
    if per_node is not None and (per_node < 1 or ranks % per_node):
        raise ConfigError(
            f"ranks_per_node={per_node} must divide the {ranks} ranks that read rows."
        )
    # Tensor-parallel ranks read the same rows.
    readers = node_numbers[:: max(len(node_numbers) // ranks, 1)]
    sizes = [per_node or len(list(run)) for _, run in groupby(readers)]
    return ranks // math.gcd(*sizes, config.group_ranks(ranks))


def _find_shard(loader: Any) -> BatchSamplerShard | None:
    """Find the batch sampler that leaves each rank its batches; None if there is one rank.

    Raises:
        UnsupportedError: if rows cannot be placed before it.
    """
    if isinstance(loader, DataLoaderDispatcher):
        raise UnsupportedError(
            "rank 0 would read the batches of all ranks and broadcast them. Set "
            'TrainingArguments(accelerator_config={"dispatch_batches": False}), or '
            "DataLoaderConfiguration(dispatch_batches=False) in an Accelerator."
        )
    batches = getattr(loader, "batch_sampler", None)
    shard = (
        loader.sampler if isinstance(getattr(loader, "sampler", None), BatchSampler) else batches
    )
    if not isinstance(shard, BatchSamplerShard):
        if PartialState().num_processes == 1 and shard is not None:
            return None
        raise UnsupportedError(
            "place_rows takes a loader that accelerator.prepare made of a DataLoader with a batch"
            f" size, and this {type(loader).__name__} has batches of {type(shard).__name__}. For"
            " loops without accelerate there is hf_distca.data.row_placement.RowPlacement."
        )
    if not getattr(shard.batch_sampler, "batch_size", None):
        raise UnsupportedError(
            f"{type(shard.batch_sampler).__name__} makes batches of its own sizes, and place_rows"
            ' keeps those that there are. Set train_sampling_strategy="random", or give a batch'
            " sampler with a batch_size."
        )
    return shard


def _describe_places(places: StepPlaces, work: IntArray) -> str:
    """Say where rows are placed, and what it gains in steps of rows in random order."""
    rows = places.micro_batch_rows * places.micro_batches
    shuffled = np.random.default_rng(0).permutation(work)
    count = min(len(work) // rows, _SAMPLE_STEPS)
    steps = shuffled[: count * rows].reshape(count, rows)
    text = (
        f"distca places the {rows:,} rows of each step on {places.nodes} nodes of"
        f" {places.ranks_per_node} in {places.micro_batches}"
        f" {'micro-batches' if places.micro_batches > 1 else 'micro-batch'}."
    )
    if not count:
        return text
    mean = int(steps.sum()) / places.nodes
    before = sum(int(places.compute_busiest(step).sum()) for step in steps)
    after = sum(int(places.compute_busiest(step[places.place(step)]).sum()) for step in steps)
    return (
        f"{text} Attention of the busiest node / mean: {before / mean:.3f} in random order,"
        f" {after / mean:.3f} placed."
    )
