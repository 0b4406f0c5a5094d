"""Private names of torch's data loaders and of the package datasets. They may change.

tests/test_borrowed.py checks that each name exists and behaves as described here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data._utils import worker

# ---- torch 2.13.0


@contextmanager
def hide_worker_info() -> Iterator[None]:
    """Make `torch.utils.data.get_worker_info` return None in a loader's worker.

    There is no public function for this.
    """
    info = worker._worker_info
    worker._worker_info = None
    try:
        yield
    finally:
        worker._worker_info = info


# ---- datasets 5.2.0


def count_split_ranks(stream: Any) -> int:
    """Count the ranks among which `datasets.distributed.split_dataset_by_node` divided a stream.

    The count of an undivided stream is 1.
    """
    split = getattr(stream, "_distributed", None)
    return 1 if split is None else int(split.world_size)


def get_row_indices(documents: Any) -> Any:
    """Return the indices of a data set's rows among the stored rows, as a table with one column.

    Return None if the data set has all stored rows in their stored order.
    """
    return documents._indices
