"""Loaders that would hand ranks other batches than distca needs, refused by name."""

from __future__ import annotations

from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import DistributedType

from hf_distca.data.collator import PackingCollator
from hf_distca.errors import UnsupportedError

__all__ = ["check_loader"]


def check_loader(loader: object) -> None:
    """Refuse a loader of several processes in which rank 0 reads the batches of `PackingCollator` for all ranks.

    accelerate does so for iterable datasets unless told otherwise. It joins the rows of all ranks to one tensor, broadcasts and
    cuts it, which neither rows of different lengths nor `PackedDocuments` survive: rank 0 fails while the others wait for it.

    Raises:
        UnsupportedError: if `loader` is such a loader.
    """
    if not isinstance(loader, DataLoaderDispatcher) or loader.state.distributed_type == DistributedType.NO:
        return
    collator = getattr(loader, "collate_fn", None)
    collator = getattr(collator, "data_collator", collator)  # the Trainer wraps it to drop columns
    if isinstance(collator, PackingCollator):
        raise UnsupportedError(
            "rank 0 would read the batches of all ranks and broadcast them, as accelerate does by default for iterable datasets; "
            'packed documents cannot travel so. Set TrainingArguments(accelerator_config={"dispatch_batches": False}). Each rank '
            "then reads the dataset, in the same order, and accelerate leaves it its share: do not split the dataset by rank "
            "yourself, or each rank gets a share of its share."
        )
