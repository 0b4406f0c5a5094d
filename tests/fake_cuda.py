"""A GPU without hardware: tensors with its device, dtypes and shapes, but no memory.

torch's FakeTensorMode runs every operation for its shapes alone, on devices that do not exist, and
raises if an operation would mix devices. A build of torch for CPUs refuses some calls before the
mode sees them. Their underlying operations run instead. Such a build also has no autograd on these
devices: `Tape` calls autograd functions one after another, and then backwards. `cuda_autograd` adds
autograd to a separate process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_distca import kernels
from hf_distca.kernels import flash

CUDA = torch.device("cuda", 0)
# A build for CUDA would look for the real GPU.
needs_cpu_build = pytest.mark.skipif(
    torch.version.cuda is not None, reason="a torch built for CUDA needs a real GPU"
)


def _getitem(plain: Any) -> Any:
    def getitem(tensor: torch.Tensor, key: Any) -> Any:
        if tensor.device.type != "cuda":
            return plain(tensor, key)
        keys = list(key) if isinstance(key, tuple) else [key]
        if any(isinstance(one, torch.Tensor) for one in keys):
            return torch.ops.aten.index(tensor, keys)
        given = sum(one is not None and one is not Ellipsis for one in keys)
        if Ellipsis in keys:
            place = keys.index(Ellipsis)
            keys[place : place + 1] = [slice(None)] * (tensor.dim() - given)
        dim = 0
        for one in keys:
            if one is None:
                tensor, dim = tensor.unsqueeze(dim), dim + 1
            elif isinstance(one, slice):
                if one != slice(None):
                    tensor = torch.ops.aten.slice(tensor, dim, one.start, one.stop, one.step or 1)
                dim += 1
            else:
                tensor = torch.ops.aten.select(tensor, dim, one)
        return tensor

    return getitem


def _to(plain: Any) -> Any:
    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        device = next(
            (
                torch.device(one)
                for one in (*args, kwargs.get("device"))
                if isinstance(one, (str, torch.device))
            ),
            None,
        )
        if device is None or device.type != "cuda" or tensor.device.type == "cuda":
            return plain(tensor, *args, **kwargs)
        dtype = next(
            (one for one in (*args, kwargs.get("dtype")) if isinstance(one, torch.dtype)), None
        )
        return torch.ops.aten._to_copy(
            tensor, device=CUDA, dtype=dtype, non_blocking=kwargs.get("non_blocking", False)
        )

    return to


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor
        if tensor.is_contiguous()
        else torch.ops.aten.clone(tensor, memory_format=torch.contiguous_format)
    )


def _copy_(tensor: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return torch.ops.aten.copy_(tensor, source, non_blocking)


class _Changed(TorchFunctionMode):
    """Replaces some functions by others.

    Patching methods of `torch.Tensor` leaves traces even after they are restored: once
    `__getitem__` was patched, CPython takes tensors for sequences, and `torch.tensor` of a list of
    numbers fails from then on.
    """

    def __init__(self, changes: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        super().__init__()
        self.changes = changes

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.changes.get(function, function)(*args, **(kwargs or {}))


class _EfficientBackward(TorchDispatchMode):
    """Gives the shapes of memory-efficient attention's backward, because torch 2.13 has a shape
    function for other arguments than the operation takes.
    """

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is not torch.ops.aten._efficient_attention_backward.default:
            return function(*args, **(kwargs or {}))
        do, q, k, v, _, o, *_ = args
        assert do.is_contiguous()
        assert o.is_contiguous()
        assert do.shape == o.shape == q.shape
        assert {x.dtype for x in (do, q, k, v, o)} == {q.dtype}
        return *(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)), None


@contextmanager
def fake_cuda(
    capability: tuple[int, int] = (9, 0), *, autograd: bool = False
) -> Iterator[list[tuple[int, ...]]]:
    """Let tensors lie on a fake GPU of this compute capability. Yields the shapes of the tensors
    that were pinned.

    With `autograd`, gradients are recorded; this needs a process that began with the library of
    `cuda_autograd`.
    """
    pinned: list[tuple[int, ...]] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.device.type == "cpu", "only host memory can be pinned"
        pinned.append(tuple(tensor.shape))
        return tensor

    plain = torch.Tensor
    changes: dict[Callable[..., Any], Callable[..., Any]] = {plain.pin_memory: pin_memory}
    if not autograd:
        changes |= {
            plain.__getitem__: _getitem(plain.__getitem__),
            plain.to: _to(plain.to),
            plain.contiguous: _contiguous,
            plain.copy_: _copy_,
        }
    gpu = {
        "is_available": lambda: True,
        "get_device_capability": lambda device=None: capability,
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda including_emulation=True: True,
    }
    with (
        _Changed(changes),
        patch.multiple(torch.cuda, **gpu),
        patch.object(torch.backends.cuda, "is_flash_attention_available", lambda: True),
        # Do not use cached results of the real GPU or of another fake one.
        patch.object(kernels, "_select_once", kernels._select_once.__wrapped__),
        patch.object(kernels, "_check_once", kernels._check_once.__wrapped__),
        patch.object(
            flash,
            "_make_random_state",
            cache(flash._make_random_state.__wrapped__),
        ),
        FakeTensorMode(),
        _EfficientBackward(),
        nullcontext() if autograd else torch.no_grad(),
    ):
        yield pinned


class _Context:
    """The context of an autograd function."""

    needs_input_grad = (True,) * 16
    saved_tensors: tuple[torch.Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        self.saved_tensors = tensors


class Tape:
    """Replaces `torch.autograd.Function.apply` for functions that are chained by their first
    output.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[type[torch.autograd.Function], _Context]] = []

    def apply(self, function: type[torch.autograd.Function], *inputs: Any) -> torch.Tensor:
        """Run the forward of a function."""
        self.calls.append((function, _Context()))
        result: torch.Tensor = function.forward(self.calls[-1][1], *inputs)
        return result

    def backward(self, gradient: torch.Tensor) -> list[list[torch.Tensor | None]]:
        """Return the gradients of the inputs of each function, the last one first. Each function
        gets the gradient of the next one's anchor.
        """
        found = []
        while self.calls:
            function, context = self.calls.pop()
            grads = list(function.backward(context, gradient))
            gradient = grads[1]
            found.append(grads)
        return found
