"""Cut a batch and the arguments of a layer into two nano-batches for ping-pong, and join the
outputs of the layer.

A batch of several rows is cut between rows. A batch of one row is cut between documents if a
document starts near the middle of the row, or if tokens see later tokens; else inside a document.
If a document crosses the cut, the second nano-batch needs keys and values of the first. These keys
and values are passed on inside the layer, and gradients flow back to the first nano-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from hf_distca.agreement.documents import Documents
from hf_distca.borrowed import is_in_backward
from hf_distca.errors import UnsupportedError
from hf_distca.integration.mask_objects import MaskObject

# A row is cut between documents if each nano-batch then has at least this fraction of the row.
_MIN_PART = 3 / 8


@dataclass(eq=False)
class NanoBatches:
    """The cut of a batch in two, for one kind of layer. The nano-batches have the numbers 1 and 2.

    Attributes:
        shape: (rows, tokens) of the batch.
        axis: 0 if the batch is cut between rows, 1 if between tokens.
        border: index on the axis at which the second nano-batch begins.
        documents: documents of each nano-batch.
        layer_ids: ids of the layers that ran as nano-batches. Their recomputes must run as
            nano-batches too.
        first_half_states: keys and values of the first nano-batch, kept until the layer's cache
            takes the keys and values of both nano-batches.
        first_half_kv: keys and values of the first nano-batch's last tokens, kept until the second
            nano-batch attends to them.
    """

    shape: tuple[int, int]
    axis: int
    border: int
    documents: tuple[Documents, Documents]
    layer_ids: set[int] = field(default_factory=set)
    first_half_states: tuple[torch.Tensor, ...] = ()
    first_half_kv: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def cut_batch(
        cls, shape: tuple[int, int], documents: Documents, tile: int, cuts_documents: bool = True
    ) -> NanoBatches:
        """Cut a batch. Each of its documents must lie on one rank, or must have been dealt for
        ping-pong. Without `cuts_documents`, the second nano-batch begins with a document.
        """
        return cls(shape, *choose_cut(*shape, documents, tile, cuts_documents))

    @property
    def sizes(self) -> tuple[int, int]:
        """Sizes of the two nano-batches along `axis`.

        If a batch has only one token, the token is in the second nano-batch. The first nano-batch
        computes this token as padding and drops the output, so that this rank takes part in both
        exchanges, like the other ranks.
        """
        return max(self.border, 1), self.shape[self.axis] - self.border

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(rows, tokens) of each nano-batch."""
        rows, length = self.shape
        return tuple((rows, size) if self.axis else (size, length) for size in self.sizes)

    def pass_keys(
        self, nano: int, k_TKD: torch.Tensor, v_TKV: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """For the first nano-batch, store the keys and values that the second nano-batch needs. For
        the second nano-batch, return these keys and values as its context.
        """
        tokens = self.documents[1].context_tokens
        if not tokens:
            return ()
        if nano == 1:
            self.first_half_kv = k_TKD[-tokens:], v_TKV[-tokens:]
            return ()
        if self.first_half_kv is None:
            raise UnsupportedError(
                "the second nano-batch of a layer called attention before the first one did: set"
                " DistCAConfig(ping_pong=False)."
            )
        context, self.first_half_kv = self.first_half_kv, None
        return context

    def select_part(self, nano: int, value: Any) -> Any:
        """Return a nano-batch's part of an argument of a layer. A tuple, list or dictionary of
        arguments is cut item by item.
        """
        if isinstance(value, torch.Tensor):
            dim = self._find_dim(value)
            start = 0 if nano == 1 else self.border
            return value if dim is None else value.narrow(dim, start, self.sizes[nano - 1])
        if isinstance(value, MaskObject):
            return value.select_half(nano)
        if isinstance(value, Cache):  # a recompute must not fill the cache a second time
            return None if is_in_backward() else NanoCache(value, self, nano)
        if isinstance(value, dict):
            return {name: self.select_part(nano, item) for name, item in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self.select_part(nano, item) for item in value)
        return value

    def merge_outputs(self, first: Any, second: Any) -> Any:
        """Join the outputs of a layer's nano-batches.

        Raises:
            UnsupportedError: if an output contains anything but None and tensors that can be joined
                along `axis`.
        """
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
            cut = slice(self.axis, self.axis + 1)
            if (*first.shape[cut], *second.shape[cut]) == self.sizes:
                return torch.cat([first.narrow(self.axis, 0, self.border), second], self.axis)
        elif first is None and second is None:
            return None
        elif (
            type(first) in (tuple, list)
            and type(second) is type(first)
            and len(first) == len(second)
        ):
            return type(first)(
                self.merge_outputs(*pair) for pair in zip(first, second, strict=True)
            )
        shown = (
            (
                f"a tensor of {tuple(part.shape)}"
                if isinstance(part, torch.Tensor)
                else type(part).__name__
            )
            for part in (first, second)
        )
        raise UnsupportedError(
            f"a decoder layer returned {' and '.join(shown)} for nano-batches of {self.sizes}"
            f" {'tokens' if self.axis else 'rows'}, which ping-pong cannot join: set"
            " DistCAConfig(ping_pong=False)."
        )

    def _find_dim(self, tensor: torch.Tensor) -> int | None:
        """Return the dimension along which a tensor is cut; None if both nano-batches get the whole
        tensor.
        """
        shape = tuple(tensor.shape)
        # A float vector has one entry for each channel of the layer, and may match the length of
        # the batch by chance. Vectors with an entry for each token have an integer dtype.
        is_vector = len(shape) == 1 and tensor.is_floating_point()
        if self.axis == 1 and shape[:1] == self.shape[1:] and not is_vector:
            return 0
        starts = (d for d in range(len(shape) - 1) if shape[d : d + 2] == self.shape)
        return next((start + self.axis for start in starts), None)


class NanoCache:
    """An object that replaces a cache in a nano-batch. It returns no cached keys, and fills the
    cache with the keys and values of both nano-batches.
    """

    def __init__(self, cache: Cache, cut: NanoBatches, nano: int) -> None:
        self.cache, self.cut, self.nano = cache, cut, nano

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take keys and values of a nano-batch, (rows, heads, tokens, width), and return them
        unchanged. The second nano-batch updates the cache with the keys and values of both
        nano-batches.
        """
        cut, states = self.cut, (key_states, value_states)
        if self.nano == 1:
            cut.first_half_states = states
            return states
        axis = 2 if cut.axis else 0
        keys, values = (
            torch.cat([first.narrow(axis, 0, cut.border), second], axis)
            for first, second in zip(cut.first_half_states, states, strict=True)
        )
        cut.first_half_states = ()
        self.cache.update(keys, values, *args, **kwargs)
        return states

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


def choose_cut(
    batch_size: int, length: int, documents: Documents, tile: int, cuts_documents: bool = True
) -> tuple[int, int, tuple[Documents, Documents]]:
    """Choose the cut of a (batch_size, length) batch. Return `axis`, `border` and `documents` of
    `NanoBatches`. For `cuts_documents` see `NanoBatches.cut_batch`.
    """
    axis = 0 if batch_size > 1 else 1
    if documents.dealt_share is not None and documents.dealt_share.first_nano_tokens is not None:
        border = documents.dealt_share.first_nano_tokens
    else:
        border = (
            batch_size // 2
            if axis == 0
            else _choose_border(length, documents, tile, cuts_documents)
        )
    first, second = documents.split_at(border if axis else border * length)
    if not border:
        first = replace(first, token_indices=np.zeros(0, dtype=np.int64))
    return axis, border, (first, second)


def _choose_border(length: int, documents: Documents, tile: int, cuts_documents: bool) -> int:
    """Choose the token at which the second nano-batch of a row begins."""
    starts = np.cumsum(documents.runs[:-1, 2])
    tokens = starts if documents.token_indices is None else documents.token_indices[starts]
    least = _MIN_PART * length if cuts_documents else 0
    candidates = tokens[np.minimum(tokens, length - tokens) >= least]
    if len(candidates):
        return int(candidates[np.abs(candidates - length / 2).argmin()])
    half = length // 2 if cuts_documents else 0
    return half // tile * tile if half >= 4 * tile else half
