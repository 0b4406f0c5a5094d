"""Rows that lie apart are copied in words as wide as their sizes allow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_distca.runtime.messages import MessageLayout, RowRun, Rows, pack


class Copies(TorchDispatchMode):
    """Record the dtypes of copies' results."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.clone.default, torch.ops.aten._reshape_copy.default):
            self.dtypes.append(result.dtype)
        return result


@pytest.mark.parametrize(
    ("dtype", "width", "first", "word"),
    [
        (torch.float32, 4, 2, torch.int64),
        (torch.bfloat16, 64, 1, torch.int64),
        (torch.float32, 3, 1, torch.int32),
        (torch.bfloat16, 3, 0, torch.int16),
        (torch.uint8, 5, 1, torch.uint8),
        # One word per row, for which a reshape would return a view.
        (torch.float64, 1, 0, torch.int64),
    ],
    ids=str,
)
def test_rows_are_copied_in_the_widest_words_that_fit(
    dtype: torch.dtype, width: int, first: int, word: torch.dtype
) -> None:
    rows = torch.randint(0, 100, (12, width)).to(dtype)
    form = MessageLayout.from_parts(
        [(Rows((RowRun(1, first, 3, step=3),), {}), dtype, torch.Size([width]))]
    )
    with Copies() as copies:
        message = pack([rows], form.pieces)
    assert copies.dtypes == [word]
    sent = message[: 3 * width * dtype.itemsize].view(dtype).view(3, width)
    assert torch.equal(sent, rows[first : first + 9 : 3])
