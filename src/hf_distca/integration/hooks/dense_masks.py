"""Dense masks for forwards that sdpa computes on this rank alone: forwards that read a cache, and
forwards whose tensors have no values to plan with or to send (meta tensors, FakeTensorMode,
transforms of torch.func).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import (
    and_masks,
    find_packed_sequence_indices,
    packed_sequence_mask_function,
    sdpa_mask,
)

from hf_distca.agreement.documents import PackedDocuments
from hf_distca.borrowed import has_dispatch_modes, has_no_values, is_in_transform
from hf_distca.errors import UnsupportedError
from hf_distca.integration.callers import MaskCall
from hf_distca.integration.families import warn_of_packing
from hf_distca.integration.mask_objects import CachedMask, DenseMask

_META = torch.device("meta")


def choose_dense_mask(
    sizes: dict[str, Any], mask_function: Callable[..., Any], **options: Any
) -> CachedMask | DenseMask | None:
    """Make the dense mask of a forward that sdpa computes; return None for any other forward.

    Args:
        sizes, mask_function, options: arguments of `sdpa_mask`.

    Raises:
        UnsupportedError: if a transform of torch.func gets a cut document, or documents without
            position ids.
    """
    length, offset = sizes["q_length"], sizes.get("q_offset", 0)
    arguments = sizes | options | {"allow_is_causal_skip": False}
    if (
        sizes.get("kv_offset")
        or sizes["kv_length"] != length
        or not isinstance(offset, int)
        or offset
    ):
        # Generation computes one token at a time, on this rank alone, so there is no work to move.
        dense = sdpa_mask(mask_function=mask_function, **arguments)
        # With `allow_is_causal_skip=False`, `sdpa_mask` never returns None.
        return torch.Tensor.as_subclass(dense, CachedMask)  # type: ignore[arg-type]
    is_usual = not is_in_transform() and not has_dispatch_modes()  # cheaper than `has_no_values`
    if sizes.get("device") != _META and (is_usual or not has_no_values()):
        return None
    if is_in_transform():
        mask_function = _keep_documents_apart(mask_function, options["config"])
    dense = sdpa_mask(mask_function=mask_function, **arguments)
    return None if dense is None else DenseMask(dense)


def _keep_documents_apart(mask_function: Callable[..., Any], config: Any) -> Callable[..., Any]:
    """Return a mask function that also keeps packed documents apart. transformers keeps them apart
    only if the model has no cache.
    """
    call = MaskCall()
    packed, positions = call.find_argument("distca_documents"), call.position_ids
    if isinstance(packed, PackedDocuments) and (any(packed.starts or ()) or positions is None):
        raise UnsupportedError(
            "a transform of torch.func got a document that spans ranks, or documents without"
            " position_ids, but in a transform each rank computes alone. Give whole documents, with"
            " position_ids; or compute gradients with backward()."
        )
    places = None if positions is None else find_packed_sequence_indices(positions)
    if places is None:
        return mask_function
    warn_of_packing(getattr(config, "model_type", None))
    return and_masks(mask_function, packed_sequence_mask_function(places))
