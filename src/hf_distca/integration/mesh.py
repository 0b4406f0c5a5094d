"""Which ranks share core attention, when the user does not say so."""

from __future__ import annotations

import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

__all__ = ["data_parallel_group", "find_members", "mesh_of"]

# Names of the dimensions along which ranks hold different tokens: the first two are accelerate's, the last is transformers'.
_DATA_DIMENSIONS = ("dp_replicate", "dp_shard", "fsdp")


def find_members() -> dist.ProcessGroup | None:
    """The data-parallel ranks of accelerate's device mesh if it has one, else None for the world."""
    if not AcceleratorState._shared_state:  # noqa: SLF001 - constructing one would initialise it
        return None
    mesh: DeviceMesh | None = getattr(AcceleratorState(), "device_mesh", None)
    return None if mesh is None else data_parallel_group(mesh)


def mesh_of(model: object) -> DeviceMesh | None:
    """The mesh on which transformers laid out a model that was loaded with a `DistributedConfig`, None for other objects."""
    manager = getattr(model, "_mesh_manager", None) if isinstance(model, PreTrainedModel) else None
    return None if manager is None else manager.get_mesh(("pp", "dp_replicate", "fsdp", "tp"))


def data_parallel_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks of `mesh` that differ in their data-parallel coordinates only.

    A mesh without the names "dp_replicate", "dp_shard" and "fsdp" is taken whole, so pass the part of it that is data-parallel.
    """
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    data = tuple(name for name in _DATA_DIMENSIONS if name in sizes)
    part = mesh[tuple(name for name in data if sizes[name] > 1) or data[:1]] if data else mesh
    if part.ndim == 1:
        return part.get_group()
    # Joining dimensions by the mesh itself needs all ranks of the world at once; those of another pipeline stage come later.
    backend = dist.get_backend(part.get_group(0))
    ranks = part.mesh.flatten().tolist()
    group: dist.ProcessGroup = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
    return group
