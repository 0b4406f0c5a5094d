"""The two nano-batches of a batch: where it is cut, what each of them gets of a layer's arguments, and how outputs are joined.

One row is cut among its tokens, between documents if a document starts near the middle. Several rows are cut among the rows.
A document that crosses the cut needs, in the second nano-batch, the keys that the first one made: they are handed over inside
the layer, with their gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from hf_distca.agreement.documents import Documents
from hf_distca.errors import UnsupportedError
from hf_distca.integration.handle import AttentionHandle

__all__ = ["Handover", "NanoBatches", "cut"]

# A cut between documents is taken if the smaller nano-batch then has at least this part of the tokens.
_SMALLEST = 3 / 8


@dataclass(eq=False)
class Handover:
    """Keys and values that the second nano-batch reads of the first: those of its last `tokens` tokens."""

    tokens: int
    given: tuple[torch.Tensor, torch.Tensor] | None = None

    def context(self, nano: int, k_TKD: torch.Tensor, v_TKV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What a nano-batch attends to in front of its own keys and values, which are given."""
        if not self.tokens:
            return None
        if nano == 1:
            self.given = k_TKD[-self.tokens :], v_TKV[-self.tokens :]
            return None
        if self.given is None:
            raise UnsupportedError("the second nano-batch of a layer called attention before the first: set ping_pong=False.")
        given, self.given = self.given, None
        return given


@dataclass(eq=False)
class NanoBatches:
    """How one batch is cut, for one kind of layer. Nano-batches have the numbers 1 and 2.

    Attributes:
        batch_size, length: shape of the batch.
        axis: 0 if rows are cut, 1 if tokens are.
        at: index on that axis where the second nano-batch begins.
        sizes: of both on that axis. A batch of one token is all in the second; the first computes that token as padding, and its
            output is dropped: so it takes part in every exchange, as on the other ranks.
        handles: what stands for the mask in each.
        layers: ids of the layers that ran so, for a recompute to do the same.
    """

    batch_size: int
    length: int
    axis: int
    at: int
    sizes: tuple[int, int]
    handles: tuple[AttentionHandle, AttentionHandle]
    layers: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, handle: AttentionHandle, documents: Documents, tile: int) -> NanoBatches:
        """Cut a batch whose documents each lie on one rank, or were dealt for it."""
        rows, length = handle.batch_size, handle.length
        axis, at, parts = cut(rows, length, documents, tile)
        sizes = max(at, 1), (length if axis else rows) - at
        handover = Handover(parts[1].context)
        first, second = (
            handle.of_nano_batch(nano, (rows, size) if axis else (size, length), part, handover)
            for nano, (size, part) in enumerate(zip(sizes, parts, strict=True), 1)
        )
        first.second = second
        return cls(rows, length, axis, at, sizes, (first, second))

    @property
    def pointless(self) -> bool:
        """Whether both are planned and neither exchanges anything: there is nothing to hide."""
        work = [work for handle in self.handles for work in handle.work.values()]
        return len(work) > 1 and not any(one.route.exchanges for one in work)

    def part(self, nano: int, value: Any) -> Any:
        """The part of an argument of a layer, or of several in a tuple, list or dictionary, that a nano-batch gets."""
        if isinstance(value, torch.Tensor):
            dim = self._dim(value)
            if dim is None:
                return value
            return value.narrow(dim, 0 if nano == 1 else self.at, self.sizes[nano - 1])
        if isinstance(value, AttentionHandle):
            return self.handles[nano - 1]
        if isinstance(value, Cache):
            return None  # as under activation checkpointing: a cache would be filled twice
        if isinstance(value, dict):
            return {name: self.part(nano, one) for name, one in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self.part(nano, one) for one in value)
        return value

    def join(self, first: Any, second: Any) -> Any:
        """The output of a layer from those of its nano-batches.

        Raises:
            UnsupportedError: if an output is not made of tensors that have the cut axis.
        """
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
            shapes = tuple(first.shape), tuple(second.shape)
            if tuple(shape[self.axis] if len(shape) > self.axis else 0 for shape in shapes) != self.sizes:
                raise UnsupportedError(
                    f"a decoder layer returned tensors of shapes {shapes[0]} and {shapes[1]} for nano-batches of {self.sizes} "
                    f"{'tokens' if self.axis else 'rows'}, which ping-pong cannot join: set DistCAConfig(ping_pong=False)."
                )
            return torch.cat([first.narrow(self.axis, 0, self.at), second], self.axis)
        if first is None and second is None:
            return None
        if type(first) in (tuple, list) and type(second) is type(first) and len(first) == len(second):
            return type(first)(self.join(*pair) for pair in zip(first, second, strict=True))
        raise UnsupportedError(
            f"a decoder layer returned {type(first).__name__} and {type(second).__name__} for its nano-batches, which "
            "ping-pong cannot join: set DistCAConfig(ping_pong=False)."
        )

    def _dim(self, tensor: torch.Tensor) -> int | None:
        """The dimension of an argument that the cut goes through, None if it is the same for all tokens."""
        shape = tuple(tensor.shape)
        if self.axis == 0:
            return next((d for d in range(len(shape) - 1) if shape[d : d + 2] == (self.batch_size, self.length)), None)
        if len(shape) == 1 and tensor.is_floating_point():
            return None  # a vector of the layer's width may be as long as the batch; what tokens have one by one are integers
        return next((d for d in range(len(shape)) if shape[d] == self.length and (d == 0 or shape[d - 1] == 1)), None)


def cut(batch_size: int, length: int, documents: Documents, tile: int) -> tuple[int, int, tuple[Documents, Documents]]:
    """Where a (batch_size, length) batch is cut: axis and index as in `NanoBatches`, and the documents of both."""
    axis = 0 if batch_size > 1 else 1
    if documents.dealt is not None and documents.dealt.first_tokens is not None:
        at = documents.dealt.first_tokens
    else:
        at = batch_size // 2 if axis == 0 else _middle(length, documents, tile)
    first, second = documents.cut(at if axis else at * length)
    if not at:
        first = replace(first, keep=np.zeros(0, dtype=np.int64))
    return axis, at, (first, second)


def _middle(length: int, documents: Documents, tile: int) -> int:
    """The token to cut a row at."""
    starts = np.cumsum(documents.rows[:-1, 2])
    tokens = starts if documents.keep is None else documents.keep[starts]
    near = tokens[np.minimum(tokens, length - tokens) >= _SMALLEST * length]
    if len(near):
        return int(near[np.abs(near - length / 2).argmin()])
    half = length // 2
    return half // tile * tile if half >= 4 * tile else half
