"""Which calls of attention can be made together: those of one kind."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hf_distca.agreement.announce import PlanKey
from hf_distca.errors import UnsupportedError
from hf_distca.kernels.base import Operands, Scores
from hf_distca.runtime.call import Inputs
from hf_distca.schedule.cost import AttentionShape

__all__ = ["DTYPES", "WHY_NOT_OTHERS", "Kind"]

DTYPES = (torch.float64, torch.float32, torch.bfloat16)  # ranks tell each other the index
WHY_NOT_OTHERS = (
    "Pipeline stages run in float64, float32 or bfloat16. float16 needs a GradScaler, which would skip the optimizer's step on "
    "the stages whose own gradients overflow and not on the others: use bfloat16."
)


class Kind(NamedTuple):
    """All that a server must know of a layer.

    Attributes:
        key: which plan its tasks are from.
        dtype: of q, k and v.
        scale, softcap: as in `Scores`.
    """

    key: PlanKey
    dtype: torch.dtype
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, key: PlanKey, inputs: Inputs, scores: Scores) -> Kind:
        """The kind of a call.

        Raises:
            UnsupportedError: if its dtype is none that travels.
        """
        dtype = inputs.q_THD.dtype
        if dtype not in DTYPES:
            raise UnsupportedError(f"attention of a pipeline stage is computed in {dtype}. {WHY_NOT_OTHERS}")
        return cls(key, dtype, scores.scale, scores.softcap)

    def __str__(self) -> str:
        shape, window = self.key.shape, self.key.window
        seen = "all keys" if window is None else f"the last {window} keys"
        return f"{shape.query_heads} heads of width {shape.head_dim} in {self.dtype} that see {seen} (scale {self.scale:g})"

    def scores(self, window: int | None) -> Scores:
        """The scores of tasks of a plan with this window."""
        return Scores(self.scale, window, self.softcap)

    def row(self) -> list[int]:
        """The kind as int64 numbers."""
        shape, key = self.key.shape, self.key
        heads = [shape.query_heads, shape.key_value_heads, shape.head_dim, shape.value_head_dim, shape.element_bytes]
        limits = [key.window or 0, key.chunk or 0, zlib.crc32(key.device.encode())]
        return [*heads, *limits, DTYPES.index(self.dtype), _bits(self.scale), _bits(self.softcap or 0.0)]

    @classmethod
    def from_row(cls, row: Sequence[int], device: str) -> Kind:
        """The kind that numbers stand for, on a rank with devices of this type.

        Raises:
            UnsupportedError: if they are of a rank with devices of another type.
        """
        *heads, window, chunk, where, dtype, scale, softcap = (int(number) for number in row)
        if where != zlib.crc32(device.encode()):
            raise UnsupportedError(f"the stages of a pipeline are on devices of different types, here {device!r}.")
        key = PlanKey(AttentionShape(*heads), device, window or None, chunk or None)
        return cls(key, DTYPES[dtype], _float(scale), _float(softcap) or None)

    def nothing(self, device: torch.device) -> Operands:
        """Operands without rows."""
        shape = self.key.shape
        queries, keys = shape.query_heads, shape.key_value_heads
        rows = (queries, shape.head_dim), (keys, shape.head_dim), (keys, shape.value_head_dim)
        return Operands(*(torch.empty((0, *each), dtype=self.dtype, device=device) for each in rows))


def _bits(number: float) -> int:
    found: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return found


def _float(bits: int) -> float:
    found: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return found
