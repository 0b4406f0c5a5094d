"""`place_rows`, which reorders packed rows within each optimizer step so that nodes have equal
attention.

A loader that accelerate prepared has three layers. A sampler draws row indices. A batch sampler
makes batches of them, in the same order on all ranks. `BatchSamplerShard` gives each of n ranks
every n-th batch, or, with ``split_batches``, its part of each batch. The placement is inserted
between the batch sampler and the shard. It does not change seeds, epochs, resuming, workers,
devices, or the generators that accelerate keeps equal on all ranks. A Trainer makes its loader when
its training begins, so its `get_train_dataloader` is wrapped.

Some of TRL's Trainers train on items that stay whole, like rows: DPO and reward models on pairs,
KTO on completions. The items of an optimizer step may go to any rank if the loss is a mean over
items. Ranks have equally many items, so the mean over ranks is the loss of one process. This was
checked with TRL 1.16.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import groupby
from typing import Any, Self, TypeVar

import numpy as np
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher
from accelerate.state import GradientState, PartialState
from accelerate.utils import gather_object
from torch.utils.data import BatchSampler, IterableDataset
from transformers import Trainer

from hf_distca.config import DistCAConfig
from hf_distca.data.reading import read_document_lengths
from hf_distca.data.row_placement import RowPlacement, StepPlaces, find_row_documents
from hf_distca.errors import ConfigError, UnsupportedError
from hf_distca.integration.checks.reading_order import find_shares
from hf_distca.integration.layer_kinds import count_layers, make_initial_cost
from hf_distca.integration.processes import print_lines
from hf_distca.integration.training.callback import find_session
from hf_distca.runtime.members import find_node_number
from hf_distca.schedule.layout import FloatArray, IntArray

Reader = TypeVar("Reader")
_SAMPLE_STEPS = 16  # number of steps from which the printed gain is estimated
# For each document of an item: the columns that are concatenated to make the document. The second
# document of KTO repeats the prompt with an answer to another prompt, for losses that compare the
# two answers.
_DOCUMENTS = {
    "DPOTrainer": (("prompt_ids", "chosen_ids"), ("prompt_ids", "rejected_ids")),
    "KTOTrainer": (("prompt_ids", "completion_ids"), ("prompt_ids", "KL_completion_ids")),
    "RewardTrainer": (("chosen_ids",), ("rejected_ids",)),
}
# Losses of DPO that depend on the other pairs in a rank's batch: they sort the pairs, or are a mean
# over the tokens of the batch.
_LOSSES_OF_RANKS = {"aot", "aot_unpaired", "sft"}
_AS_THEY_ARE = 'attn_implementation="distca" balances batches as they are.'


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

    It is for rows that stay whole: rows of TRL's ``packing=True`` or of `PackingCollator`, or rows
    cut from token files. The exchange of attention balances work inside a node. `place_rows`
    balances work between nodes, and changes only the order of rows within each step. Every rank
    reads equally many rows in each micro-batch. Epochs, seeds, resuming and the last, short step
    stay as they were.

    Pairs of TRL's `DPOTrainer` and `RewardTrainer` and completions of its `KTOTrainer` are placed
    in the same way. The loss stays the same. Losses that depend on which items share a rank are
    refused. Of TRL's other Trainers, only `SFTTrainer` is supported.

    Call it on every rank, with the same arguments: on a Trainer before its ``train()``, or on a
    loader that accelerate has prepared. Ranks check that they read the same data set. With one
    rank, the order does not change.

    Args:
        reader: a Trainer of transformers or TRL, or a `DataLoader` that ``accelerator.prepare``
            returned.
        model: for a loader, the model or its config. Rows are weighed by the time of its attention,
            or by the squares of document lengths if None.
        accumulation: for a loader, the number of micro-batches of a step, counted from the start of
            each epoch; that of the `Accelerator` if None.
        ranks_per_node: n, if ranks [0, n), [n, 2n), ... are nodes; if None, nodes are detected.
            Tensor-parallel ranks count once. With 1, ranks instead of nodes get equal attention,
            which helps if ranks do not share attention.
        end_of_document: token id that ends documents, for rows without a column ``documents``,
            ``seq_lengths`` or ``position_ids``. All tokens are read once.

    Returns:
        The same Trainer or loader.

    Raises:
        ConfigError: if an argument is out of its range, or ranks read different rows.
        UnsupportedError: for data without a length, dealt documents, items of TRL whose loss would
            change, and loaders whose batches cannot be placed. The error names the setting to
            change. The loader of a Trainer is checked when its training begins.
        LayoutError: if rows have no column that gives the lengths of their documents.
    """
    if not isinstance(reader, Trainer):
        config = find_session().config
        steps = _read_accumulation() if accumulation is None else accumulation
        work = _weigh_rows(getattr(reader, "dataset", None), model, config, end_of_document)
        _make_placer(work, steps, ranks_per_node, config)(reader)
        return reader
    if model is not None or accumulation is not None:
        raise ConfigError(
            f"accumulation={accumulation} and model={type(model).__name__} are given for a Trainer,"
            " which has its own model and accumulation: leave both arguments out."
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
    """Read the number of micro-batches of a step from the `Accelerator`."""
    state = GradientState()
    if state.num_steps > 1 and not state.sync_with_dataloader:
        raise UnsupportedError(
            "sync_with_dataloader=False lets a step continue in the next epoch, but place_rows"
            " orders the rows of each step within one epoch. Set"
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
    """Estimate the seconds of attention of each row, summed over all layers. Without a model,
    return the sum of the squared document lengths of each row.
    """
    if not hasattr(rows, "__len__") or isinstance(rows, IterableDataset):
        raise UnsupportedError(
            f"place_rows weighs all rows before training, but {type(rows).__name__} has no length."
            " Give a data set with a length, or leave place_rows out."
        )
    if find_shares(rows) is not None:
        raise UnsupportedError(
            "the documents of this data set are dealt, so ranks have equal work: leave place_rows"
            " out."
        )
    quiet = not PartialState().is_main_process
    lengths, row = (
        items.find_documents(rows, quiet=quiet)
        if items
        else find_row_documents(rows, end_of_document, quiet=quiet)
    )
    seconds = _estimate_seconds(lengths, getattr(model, "module", model), config)
    # `bincount` adds up weights in the same order on every machine, so ranks get equal sums.
    return np.asarray(np.bincount(row, weights=seconds, minlength=len(rows)), dtype=np.float64)


def _estimate_seconds(lengths: IntArray, model: Any, config: DistCAConfig) -> FloatArray:
    """Estimate the seconds of attention of each document, summed over all layers. Without a model,
    return the squared lengths.
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
    """Make a function that places the rows of a prepared loader and returns the loader.

    Collective: all ranks raise if they weigh rows differently.

    Args:
        work: seconds of attention of each row.
        accumulation: number of micro-batches of a step.
        ranks_per_node: number of ranks of a node; None to detect nodes.
        config: settings, which determine the ranks that share attention.
    """
    node_numbers, digests = zip(
        *gather_object([(find_node_number(), zlib.crc32(work.tobytes()))]), strict=True
    )
    if len(set(digests)) > 1:
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        raise ConfigError(
            f"ranks 0 and {other} weigh rows differently: place_rows needs the same data set,"
            " model and settings on all ranks. Do not split the data set by rank, because"
            " accelerate splits it."
        )

    def place_in_loader(loader: Any) -> Any:
        shard = _find_shard(loader)
        nodes = (
            1
            if shard is None
            else _count_nodes(shard.num_processes, node_numbers, ranks_per_node, config)
        )
        text = (
            "distca leaves rows in their order: there is one node, and place_rows balances work"
            " only between nodes."
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
    """Place rows on several nodes before accelerate's shard reads them."""
    batches, ranks = shard.batch_sampler, shard.num_processes
    if isinstance(batches, RowPlacement):
        raise ConfigError(
            "the rows of this loader are placed already: call hf_distca.place_rows once."
        )
    if len(rows) != len(work):
        raise ConfigError(
            f"the loader reads {len(rows)} rows, but place_rows weighed {len(work)}: set the"
            " Trainer's train_dataset before place_rows, and do not replace it afterwards."
        )
    size = batches.batch_size // ranks if shard.split_batches else batches.batch_size
    places = StepPlaces(nodes, ranks // nodes, size, accumulation)
    shard.batch_sampler = RowPlacement(batches, work, places, even_batches=shard.even_batches)
    return places


def _count_nodes(
    ranks: int, node_numbers: Sequence[int], per_node: int | None, config: DistCAConfig
) -> int:
    """Divide the ranks into equally large sets of neighbouring ranks, each on one node and in one
    attention group, and return the number of sets. Exchanges balance the work inside a set.
    """
    if per_node is not None and (per_node < 1 or ranks % per_node):
        raise ConfigError(
            f"ranks_per_node={per_node} must divide the {ranks} ranks that read rows."
        )
    # Tensor-parallel ranks read the same rows, so only the first of them counts.
    readers = node_numbers[:: max(len(node_numbers) // ranks, 1)]
    sizes = [per_node or len(list(run)) for _, run in groupby(readers)]
    return ranks // math.gcd(*sizes, config.group_ranks(ranks))


def _find_shard(loader: Any) -> BatchSamplerShard | None:
    """Find accelerate's batch sampler that gives each rank its batches; None if there is only one
    rank.

    Raises:
        UnsupportedError: if the rows of this loader cannot be placed.
    """
    if isinstance(loader, DataLoaderDispatcher):
        raise UnsupportedError(
            "rank 0 would read the batches of all ranks and broadcast them, but place_rows needs"
            " ranks that read their own batches. Set "
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
            "place_rows takes a loader that accelerator.prepare made from a DataLoader with a batch"
            f" size, but this {type(loader).__name__} gets batches from {type(shard).__name__}. In"
            " loops without accelerate, use hf_distca.data.row_placement.RowPlacement."
        )
    if not getattr(shard.batch_sampler, "batch_size", None):
        raise UnsupportedError(
            f"{type(shard.batch_sampler).__name__} chooses its own batch sizes, but place_rows"
            ' needs a fixed size. Set train_sampling_strategy="random", or give a batch'
            " sampler with a batch_size."
        )
    return shard


def _describe_places(places: StepPlaces, work: IntArray) -> str:
    """Describe how rows are placed, and the gain over rows in random order."""
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


@dataclass(frozen=True)
class ItemRules:
    """Rules for the items of one of TRL's Trainers: where they may be placed, and which documents
    they have.

    Attributes:
        documents: for each document of an item, the columns that hold its token ids.
        max_length: number of tokens at which the collator cuts documents; None if it does not cut
            them.
        in_micro_batches: whether an item must stay in its micro-batch. Otherwise it may move to any
            micro-batch of its step.
    """

    documents: tuple[tuple[str, ...], ...]
    max_length: int | None
    in_micro_batches: bool

    @classmethod
    def read(cls, trainer: Trainer) -> Self | None:
        """Read the rules of one of TRL's Trainers; None for a Trainer that trains on documents.

        Raises:
            UnsupportedError: if the Trainer's items or their lengths are not known, or if the loss
                depends on which items share a rank. The error gives a remedy.
        """
        name = _find_trl_name(trainer)
        if name is None:
            return None
        if name not in _DOCUMENTS:
            raise UnsupportedError(_explain_unknown_items(name, "hf_distca.place_rows"))
        _check_loss(trainer, name)
        columns = getattr(trainer.train_dataset, "column_names", None) or []
        documents = tuple(parts for parts in _DOCUMENTS[name] if set(parts) <= set(columns))
        if not documents:
            raise UnsupportedError(
                f"place_rows weighs the items of {name} by the token ids in"
                f" {' and '.join(_DOCUMENTS[name][0])}, but the rows have only these columns:"
                f" {', '.join(columns) or 'none'}. This happens if images are read in the collator,"
                f" or if rows are a stream. Leave place_rows out: {_AS_THEY_ARE}"
            )
        return cls(
            documents,
            # RewardTrainer drops pairs that are too long instead of cutting them.
            None if name == "RewardTrainer" else getattr(trainer.args, "max_length", None),
            # KTO compares each item with the KL of all items of its micro-batch.
            bool(getattr(trainer, "calculate_KL", False)),
        )

    def find_documents(self, rows: Any, *, quiet: bool) -> tuple[IntArray, IntArray]:
        """Find the documents of all items. `find_row_documents` does the same for packed rows.

        Returns:
            For each document its number of tokens and the index of its item, each (documents,)
            int64.
        """
        counts = {
            column: read_document_lengths(rows, column, quiet=quiet)
            for column in {part for parts in self.documents for part in parts}
        }
        lengths: IntArray = np.concatenate(
            [sum((counts[part] for part in parts), np.int64(0)) for parts in self.documents]
        )
        if self.max_length is not None:
            lengths = np.minimum(lengths, self.max_length)
        return lengths, np.tile(np.arange(len(rows)), len(self.documents))


def check_deals_documents(trainer: Trainer) -> None:
    """Check that a Trainer trains on documents. Some of TRL's Trainers train on other items.

    Raises:
        UnsupportedError: names the Trainer, and the call to make instead.
    """
    name = _find_trl_name(trainer)
    if name in _DOCUMENTS:
        items = "completions" if name == "KTOTrainer" else "pairs"
        raise UnsupportedError(
            f"{name} trains on {items}, which must stay whole, but hf_distca.deal and"
            " --tokens-per-rank cut documents. Call hf_distca.place_rows(trainer) instead: it"
            f" places {items} so that nodes have equal attention, and keeps the loss. With one"
            f" node, no call is needed: {_AS_THEY_ARE}"
        )
    if name is not None:
        raise UnsupportedError(_explain_unknown_items(name, "hf_distca.deal or --tokens-per-rank"))


def _find_trl_name(trainer: Trainer) -> str | None:
    """Find the name of the TRL class from which a Trainer is derived; None if the Trainer trains on
    documents.
    """
    names = [
        base.__name__
        for base in type(trainer).__mro__
        if base.__module__.partition(".")[0] == "trl"
    ]
    return None if not names or "SFTTrainer" in names else names[0]


def _explain_unknown_items(name: str, call: str) -> str:
    reason = (
        "groups of completions that are written in the step: their lengths are not known when rows"
        " are read, and TRL's sampler repeats each prompt for the ranks of its group"
        if name in {"GRPOTrainer", "RLOOTrainer"}
        else "items that hf_distca does not know, with a loss that may not be a mean over them"
    )
    return f"{name} trains on {reason}. Train without {call}: {_AS_THEY_ARE}"


def _check_loss(trainer: Any, name: str) -> None:
    """Raise for losses that depend on which items share a rank."""
    size = trainer.args.per_device_train_batch_size
    losses = [
        *sorted(_LOSSES_OF_RANKS & set(getattr(trainer, "loss_types", ()))),
        *(["router_aux_loss_coef"] if getattr(trainer, "aux_loss_enabled", False) else []),
    ]
    if losses and size > 1:
        raise UnsupportedError(
            f"{name} with {' and '.join(losses)} and per_device_train_batch_size={size} has a loss"
            " that depends on which items share a rank, but place_rows moves items between ranks."
            f" Set per_device_train_batch_size=1, or leave place_rows out: {_AS_THEY_ARE}"
        )
