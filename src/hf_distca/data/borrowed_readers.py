"""Everything that `data` takes from torch's loaders and from datasets without their promise to keep it.

tests/test_borrowed.py holds that each name is there and does what is said here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data._utils import worker

__all__ = ["in_no_worker", "kept_rows", "ranks_of_split"]


# ---- torch 2.13.0


@contextmanager
def in_no_worker() -> Iterator[None]:
    """Let `torch.utils.data.get_worker_info` say, in a loader's worker, that there is none; nothing public sets what it says."""
    info = worker._worker_info
    worker._worker_info = None
    try:
        yield
    finally:
        worker._worker_info = info


# ---- datasets 5.2.0


def ranks_of_split(stream: Any) -> int:
    """Among how many ranks `datasets.distributed.split_dataset_by_node` divided a stream; 1 if it did not."""
    split = getattr(stream, "_distributed", None)
    return 1 if split is None else int(split.world_size)


def kept_rows(documents: Any) -> Any:
    """The table whose first column says which stored rows a data set has, None for all; nothing public tells without reading."""
    return documents._indices
