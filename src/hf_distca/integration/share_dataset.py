"""The data set of shares as `datasets` has them, which the Trainer and TRL take."""

from __future__ import annotations

import datasets
import numpy as np
import pyarrow as pa

from hf_distca.data.shares import Shares

__all__ = ["ShareDataset", "lazy_dataset"]


class ShareDataset(datasets.Dataset):  # type: ignore[misc]  # without type information
    """Numbers of items, which a transform makes into shares when they are read."""

    def set_epoch(self, epoch: int) -> None:
        """Shuffle as in another epoch. accelerate's loaders call it, and with them the Trainer."""
        self.format["format_kwargs"]["transform"].set_epoch(epoch)


def lazy_dataset(shares: Shares) -> ShareDataset:
    """A data set of these shares. Its column bears a name that every model takes, so that no Trainer removes it as unused."""
    made: ShareDataset = ShareDataset(pa.table({"input_ids": np.arange(len(shares))})).with_transform(shares)
    return made
