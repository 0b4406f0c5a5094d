"""Raises where the host would wait for a device: at every operation that reads the values of a
tensor.

On CPUs such reads cost nothing and go unnoticed. On a GPU, each of them stops the host until the
GPU has done all launched work. So tests put `NoHostSyncs` around code that must not wait, and CPU
tensors stand for GPU tensors.

Exchanges over gloo are exempt: gloo moves host memory, and the host waits for it. The same
exchanges over NCCL do not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations whose result, or its size, depends on values: CUDA's implementations copy data to the
# host and wait.
READS = frozenset(
    {
        "_local_scalar_dense",  # item, bool, int, float, index: conversions of a tensor to a number
        "is_nonzero",
        "equal",
        "allclose",
        "nonzero",
        "nonzero_numpy",
        "masked_select",
        "_unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "unique_dim_consecutive",
        "bincount",
        "histc",  # reads values only without a given range
        "repeat_interleave",  # unless the size of the output is given
        "tensor_split",
        "_pad_packed_sequence",
    }
)
# Operations that take masks as well as positions, and count the elements that a mask selects.
INDEXING = frozenset(
    {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
)
# Copies from one device to another.
COPIES = frozenset(
    {"_to_copy", "copy_", "_foreach_copy_", "copy", "_copy_from", "_copy_from_and_resize"}
)
# Methods that read memory without an operation.
METHODS = ("tolist", "numpy", "__array__", "__dlpack__")


class HostSyncError(AssertionError):
    """The host would wait for a device."""


class NoHostSyncs(TorchDispatchMode):
    """Raises `HostSyncError` at each read of a tensor.

    Args:
        of: the tensors that stand for device tensors, as do all results computed from them. Other
            tensors may be read. None for all tensors.

    Attributes:
        operations: number of operations that were checked.
    """

    def __init__(self, of: Iterable[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.operations = 0
        self._known: dict[int, StorageWeakRef] | None = None
        if of is not None:
            self._known = {}
            self._note(of)

    def __enter__(self) -> NoHostSyncs:
        for name in METHODS:
            setattr(torch.Tensor, name, self._refusing(name, getattr(torch.Tensor, name)))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for name in METHODS:
            _restore(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        on_device = [value for value in given if self._is_known(value)]
        if on_device:
            self._check(func, given, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if on_device:
            self._note(value for value in tree_leaves(result) if isinstance(value, torch.Tensor))
        return result

    def _check(
        self, func: Any, given: list[torch.Tensor], args: Any, kwargs: dict[str, Any]
    ) -> None:
        name = func.overloadpacket.__name__
        if (
            name in READS
            and kwargs.get("output_size") is None
            and not _has_range(name, args, kwargs)
        ):
            raise HostSyncError(f"{func} reads a tensor on the host")
        if name in INDEXING and any(
            one.dtype in (torch.bool, torch.uint8)
            for one in tree_leaves(args[1])
            if one is not None
        ):
            raise HostSyncError(f"{func} with a mask counts its elements on the host")
        if name in COPIES:
            devices = {one.device.type for one in given} | (
                {torch.device(kwargs["device"]).type} if kwargs.get("device") else set()
            )
            if len(devices) > 1:
                raise HostSyncError(f"{func} copies between {' and '.join(sorted(devices))}")

    def _refusing(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def refuse(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._is_known(tensor):
                raise HostSyncError(f"Tensor.{name} reads a tensor on the host")
            return method(tensor, *args, **kwargs)

        return refuse

    def _is_known(self, tensor: torch.Tensor) -> bool:
        if self._known is None:
            return True
        return StorageWeakRef(tensor.untyped_storage()).cdata in self._known

    def _note(self, tensors: Iterable[torch.Tensor]) -> None:
        if self._known is not None:
            for tensor in tensors:
                # Keep the reference, so that its `cdata` is not used again.
                reference = StorageWeakRef(tensor.untyped_storage())
                self._known.setdefault(reference.cdata, reference)


def _has_range(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether this is a histogram (x, bins, min, max) with a given range."""
    bounds = dict(zip(("min", "max"), args[2:], strict=False)) | kwargs
    return name == "histc" and bounds.get("min", 0) != bounds.get("max", 0)


# The methods that `torch.Tensor` itself defines; it inherits the others.
_OWN = {name: vars(torch.Tensor)[name] for name in METHODS if name in vars(torch.Tensor)}


def _restore(name: str) -> None:
    if name in _OWN:
        setattr(torch.Tensor, name, _OWN[name])
    else:
        delattr(torch.Tensor, name)
