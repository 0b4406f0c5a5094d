"""Models that compute entirely in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Float64Throughout(TorchFunctionMode):
    """Keeps float64 tensors where the code of a model converts them to float32, as in rules of
    recurrent layers, norms and gates.

    Differences then show errors below 1e-5, which the rounding of float32 would hide.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not args or not isinstance(args[0], torch.Tensor) or args[0].dtype != torch.float64:
            return func(*args, **kwargs or {})
        if func is torch.Tensor.float:
            return args[0]
        wide = {torch.float32: torch.float64}
        kept = [
            wide.get(value, value) if isinstance(value, torch.dtype) else value for value in args
        ]
        named = {
            name: wide.get(value, value) if name == "dtype" else value
            for name, value in (kwargs or {}).items()
        }
        return func(*kept, **named)
