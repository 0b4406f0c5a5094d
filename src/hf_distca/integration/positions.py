"""Whether a model counts positions in documents that are in several parts as these say."""

from __future__ import annotations

from weakref import WeakSet

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_distca.agreement.documents import PackedDocuments
from hf_distca.errors import LayoutError

__all__ = ["check_positions"]

_checked: WeakSet[torch.nn.Module] = WeakSet()


def check_positions(
    model: PreTrainedModel, documents: PackedDocuments, position_ids: torch.Tensor | None, *, lacking: bool = False
) -> None:
    """Refuse a first batch whose position ids are not those of its documents, as when a loop leaves them out.

    Attention knows from the documents where parts begin. The rest of the model knows it from position ids, and counts a rank's
    tokens from 0 without them. Not asked again of a model that had the right ones, as it may wait for a device.

    Args:
        model: whose forward it is.
        documents: those that it was given, in parts.
        position_ids: (1 or batch, length), those that the model goes on with; None if they are not known. They may be larger than
            document positions by one number.
        lacking: whether the model was given none and counts tokens from 0, also where what it counts is not known (OPT).

    Raises:
        LayoutError: says what differs.
    """
    if model in _checked or documents.starts is None:
        return
    position = documents.positions
    if lacking:
        found = np.arange(len(position))
    elif position_ids is None or position_ids.numel() != len(position):
        return  # the latter is said where documents are read
    else:
        found = position_ids.reshape(-1).cpu().numpy()
    ahead = found - position
    wrong = np.flatnonzero((ahead != ahead[:1]) | (ahead < 0))
    if len(wrong):
        at = int(wrong[0])
        raise LayoutError(
            f"token {at} of the batch is at position {position[at]} of its document, by distca_documents, and "
            f"{type(model).__name__} has {found[at]} for it: give the model position_ids, as PackingCollator does for shares."
        )
    _checked.add(model)
