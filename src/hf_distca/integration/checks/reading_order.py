"""Checks for loaders that would give ranks wrong batches: one rank reads the batches of all ranks,
batches come out of order, or batches are split or joined.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, IterableDatasetShard
from accelerate.utils import DistributedType
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, SequentialSampler

from hf_distca.data.collator import PackingCollator
from hf_distca.data.shares import Shares, StreamedShares
from hf_distca.errors import UnsupportedError
from hf_distca.integration.checks.replaced_parts import get_collator_origin

# For each case: a value that is true if the case occurs, and a text that says what is wrong and
# what to set.
Cases = Iterable[tuple[object, str]]

# Columns of a share that must reach the model.
_REQUIRED_COLUMNS = {"distca_documents", "position_ids", "shift_labels"}


def check_dispatch(loader: object, shares: bool) -> None:
    """Raise for a loader in which rank 0 reads packed documents for all ranks.

    Such loaders are accelerate's default for iterable datasets. accelerate concatenates the rows of
    all ranks into one tensor, broadcasts the tensor and cuts it. For rows of different lengths and
    for `PackedDocuments`, this fails on rank 0, while the other ranks wait.
    """
    if (
        isinstance(loader, DataLoaderDispatcher)
        and loader.state.distributed_type != DistributedType.NO
        and (shares or isinstance(_get_collator(loader), PackingCollator))
    ):
        raise UnsupportedError(
            "rank 0 would read the batches of all ranks and broadcast them, as accelerate does by"
            " default for iterable datasets, but packed documents cannot be broadcast. Set"
            ' TrainingArguments(accelerator_config={"dispatch_batches": False}). Each rank then'
            " reads the whole dataset, in the same order, and accelerate selects the rank's part."
            " Do not split the dataset by rank yourself, because accelerate would split it again."
        )


def _get_collator(loader: object) -> object:
    """Return the collator of a loader, without the Trainer's wrapper that drops columns."""
    collator = getattr(loader, "collate_fn", None)
    return getattr(collator, "data_collator", collator)


def find_reading_cases(loader: Any, shares: Shares | StreamedShares, *, training: bool) -> Cases:
    """Yield the cases in which ranks would get wrong shares or no shares. In training, also yield
    the case in which every epoch would have the same order.
    """
    package, name = get_collator_origin(_get_collator(loader))
    # Columns that the Trainer keeps; all required columns if it drops no columns.
    columns = getattr(getattr(loader, "collate_fn", None), "signature_columns", _REQUIRED_COLUMNS)
    dropped = _REQUIRED_COLUMNS - set(columns or _REQUIRED_COLUMNS)
    batches, shard, processes = _find_sampler(loader)
    yield (
        not getattr(loader, "in_order", True),
        "batches come as workers finish them: ranks would hold shares of different global"
        " batches. Set dataloader_in_order=True.",
    )
    yield (
        package in {"transformers", "trl"} or name == "default_collate",
        f"{name} cannot make batches of them. Set"
        " data_collator=hf_distca.PackingCollator() in the Trainer, or"
        " collate_fn=hf_distca.PackingCollator() in a DataLoader.",
    )
    yield (
        dropped,
        f"the Trainer drops {', '.join(sorted(dropped))} from them. Set"
        " TrainingArguments(remove_unused_columns=False).",
    )
    yield (
        getattr(shard, "split_batches", False),
        f"split_batches=True cuts batches of {getattr(shard, 'batch_size', None)} into one part for"
        ' each process. Set accelerator_config={"split_batches": False} and'
        " per_device_train_batch_size=1.",
    )
    yield (
        processes is None,
        f"{type(getattr(batches, 'sampler', batches)).__name__} reads them in its own order."
        ' Set TrainingArguments(train_sampling_strategy="sequential"), or shuffle=False in a'
        " DataLoader, and leave out _get_train_sampler and get_train_dataloader of your own"
        " Trainer class: epochs of shares are shuffled already. To choose the order yourself,"
        ' sort the rows, and set train_sampling_strategy="sequential" before hf_distca.deal, or'
        " call hf_distca.document_shares(..., seed=None).",
    )
    if processes is None:
        return
    yield (
        batches.batch_size != 1,
        f"batches of {batches.batch_size}. Set per_device_train_batch_size=1 and"
        " per_device_eval_batch_size=1; tokens_per_rank decides how large a batch is.",
    )
    yield (
        not _is_for_ranks(processes, shares),
        f"{processes} {'process reads' if processes == 1 else 'processes read'} them. Make them"
        " for as many ranks as there are data-parallel processes, and let accelerate prepare"
        " the loader.",
    )
    items = 0 if isinstance(loader.dataset, IterableDataset) else len(loader.dataset)
    yield (
        items % processes and not batches.drop_last,
        f"{items} of them for {processes} processes: the last batches would be filled up with"
        " the first shares. Set dataloader_drop_last=True.",
    )
    shuffled = isinstance(shares, StreamedShares) or shares.batches.seed is not None
    yield (
        training and shuffled and not hasattr(loader.dataset, "set_epoch"),
        f"a {type(loader.dataset).__name__} around them does not pass set_epoch on"
        " (`select`, `concatenate_datasets` and Subset do not): every epoch would have the order"
        " of the first. Select documents before document_shares, or give the object around shares"
        " a method set_epoch.",
    )


def _is_for_ranks(processes: int, shares: Shares | StreamedShares) -> bool:
    """Return whether shares are made for the number of ranks that read them."""
    ranks, config = shares.deal_settings.ranks, shares.deal_settings.config
    if getattr(shares, "rank", None) is not None:  # a stream with the shares of one rank
        return processes == 1
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    # Several groups of ranks take turns: each global batch goes to one group.
    if ranks > 1 and (config.group_size == ranks or config.group_ranks(world) == ranks < world):
        return processes % ranks == 0
    return processes == ranks


def _find_sampler(loader: Any) -> tuple[Any, Any, int | None]:
    """Find the batch sampler, the `BatchSamplerShard` that accelerate put around it, and the number
    of processes that read its batches. The number is None if batches do not follow the order of the
    data set.
    """
    if isinstance(loader.dataset, IterableDatasetShard):
        return loader.dataset, loader.dataset, loader.dataset.num_processes
    if isinstance(loader.dataset, IterableDataset):
        return loader, None, 1
    shard = None
    batches = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    while hasattr(batches, "batch_sampler"):  # accelerate wraps batch samplers
        shard = batches if isinstance(batches, BatchSamplerShard) else shard
        batches = batches.batch_sampler
    sampler = getattr(batches, "sampler", None)
    if isinstance(sampler, DistributedSampler) and not sampler.shuffle:
        return batches, shard, sampler.num_replicas
    in_order = isinstance(sampler, SequentialSampler)
    return batches, shard, getattr(shard, "num_processes", 1) if in_order else None


def find_shares(dataset: object) -> Shares | StreamedShares | None:
    """Return the shares that a data set or a loader reads, even through wrappers of the Trainer,
    TRL or accelerate; None if it reads no shares.
    """
    while dataset is not None and not isinstance(dataset, Shares | StreamedShares):
        form = getattr(dataset, "format", None)
        options = form.get("format_kwargs", {}) if isinstance(form, dict) else {}
        dataset = options.get("transform", getattr(dataset, "dataset", None))
    return dataset
