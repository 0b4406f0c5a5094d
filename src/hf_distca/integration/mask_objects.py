"""Objects that transformers gets instead of mask tensors under distca."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from hf_distca.errors import UnsupportedError


class MaskObject:
    """Base class of objects that replace mask tensors, with the methods that transformers calls."""

    # Generation with static caches makes masks before the forward, and expects 4-D tensors.
    ndim: ClassVar[int] = 4

    def contiguous(self) -> Self:
        """Return the object itself."""
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise an error: another attention implementation uses this object as its mask."""
        raise UnsupportedError(
            f"{getattr(func, '__name__', func)} of torch got distca's mask: a layer has another"
            " attn_implementation than its model. Set the same attn_implementation for the model"
            " and all its layers."
        )

    def select_half(self, nano: int) -> MaskObject:
        """Return the mask for nano-batch 1 or 2."""
        return self


@dataclass(frozen=True, eq=False)
class ForeignMask(MaskObject):
    """A mask that distca does not compute. An error is raised when attention is called with the
    mask, not when the mask is made.

    Decoders such as Bart's make such a mask for cross attention even if they run as causal language
    models, which have no cross attention.

    Attributes:
        features: unsupported features of the mask, for the error.
    """

    features: str


@dataclass(frozen=True, eq=False)
class DenseMask(MaskObject):
    """The dense mask of a forward whose tensors have no values to read (meta tensors, for example).
    sdpa computes such a forward, on this rank alone.
    """

    mask: torch.Tensor


class CachedMask(torch.Tensor):
    """The dense mask of a forward that reads a key/value cache. sdpa computes such a forward, on
    this rank alone.

    The mask is a tensor, because generation with static caches handles masks as tensors. It has its
    own class, to distinguish it from a mask that a user made.
    """
