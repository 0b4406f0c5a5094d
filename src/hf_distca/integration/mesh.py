"""Which ranks share core attention, when the user does not say so."""

from __future__ import annotations

import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["data_parallel_group", "find_members"]

# accelerate's names for the dimensions along which ranks hold different tokens.
_DATA_DIMENSIONS = ("dp_replicate", "dp_shard")


def find_members() -> dist.ProcessGroup | None:
    """The data-parallel ranks of accelerate's device mesh if it has one, else None for the world."""
    if not AcceleratorState._shared_state:  # noqa: SLF001 - constructing one would initialise it
        return None
    mesh: DeviceMesh | None = getattr(AcceleratorState(), "device_mesh", None)
    return None if mesh is None else data_parallel_group(mesh)


def data_parallel_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks of `mesh` that differ in their data-parallel coordinates only.

    A mesh without the names "dp_replicate" and "dp_shard" is taken whole, so pass the part of it that is data-parallel.
    """
    names = mesh.mesh_dim_names or ()
    data = tuple(name for name in _DATA_DIMENSIONS if name in names)
    part = mesh[data] if data and len(data) < len(names) else mesh
    return part.get_group() if part.ndim == 1 else part._flatten().get_group()  # noqa: SLF001 - the documented way to join dimensions
