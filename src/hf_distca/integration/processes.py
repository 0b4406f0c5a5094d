"""Find the ranks that share core attention by default, and print messages for the user.

Messages are printed to standard error, in a way that does not break progress bars.
`transformers.utils.logging.disable_progress_bar()` switches off the messages about slow activities.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Timer

import torch.distributed as dist
from accelerate.state import AcceleratorState, is_initialized
from torch.distributed.device_mesh import DeviceMesh
from tqdm import tqdm
from transformers.utils.logging import is_progress_bar_enabled

from hf_distca.config import DistCAConfig
from hf_distca.errors import UnsupportedError
from hf_distca.runtime.members import Members

LOG = logging.getLogger("hf_distca")

# Names of mesh dimensions along which ranks hold different tokens. accelerate uses the first two,
# transformers the third.
_DATA_DIMENSIONS = ("dp_replicate", "dp_shard", "fsdp", "dp")
_MODEL_DIMENSIONS = ("tp", "pp")  # ranks hold the same tokens, and different heads or layers
_SEQUENCE_DIMENSIONS = ("cp", "sp", "ulysses")  # ranks hold parts of the same documents


def find_members() -> Members | None:
    """Find the data-parallel ranks of accelerate's device mesh. If there is no mesh, return None,
    which means all ranks.

    Raises:
        UnsupportedError: if accelerate cuts sequences over ranks.
    """
    if not is_initialized():
        return None
    state = AcceleratorState()
    mesh: DeviceMesh | None = getattr(state, "device_mesh", None)
    if mesh is not None:
        return find_data_parallel_ranks(mesh)
    # If DeepSpeed cuts sequences, accelerate makes no mesh.
    parallelism = getattr(state, "parallelism_config", None)
    if parallelism is not None:
        # Accelerate 1.11 has no `sp_size`.
        _check_dimensions({"cp": parallelism.cp_size, "sp": getattr(parallelism, "sp_size", 1)})
    return None


def choose_group_size(
    members: dist.ProcessGroup | Members | None, config: DistCAConfig
) -> int | None:
    """Return the size of the groups in which these ranks share core attention; None if all of them
    form one group. Log a size that the user did not choose.

    A process group that the user made is one attention group, unless `config` has a group size.
    """
    if config.group_size is not None or isinstance(members, dist.ProcessGroup):
        return config.group_size
    ranks = (members or Members.from_group(None)).ranks
    size = config.group_ranks(len(ranks))
    if size == len(ranks):
        return None
    if dist.get_rank() == min(ranks):
        LOG.info(
            "%d ranks share attention in groups of %d; DistCAConfig(group_size=%d) would make them"
            " one group",
            *(len(ranks), size, len(ranks)),
        )
    return size


def find_data_parallel_ranks(mesh: DeviceMesh, extra_dimension: str | None = None) -> Members:
    """Return this rank, and the ranks of `mesh` that differ from it only in data-parallel
    coordinates, or in the dimension named `extra_dimension`.

    If no dimension of the mesh has a known name, all its ranks are returned. The known names are
    "dp_replicate", "dp_shard", "fsdp", "dp", "tp", "pp", "cp", "sp" and "ulysses".

    Raises:
        UnsupportedError: if the mesh has known names, but a dimension of several ranks is neither
            for data nor for the model.
    """
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    part = mesh
    if sizes.keys() & {*_DATA_DIMENSIONS, *_MODEL_DIMENSIONS, *_SEQUENCE_DIMENSIONS}:
        _check_dimensions({name: size for name, size in sizes.items() if name != extra_dimension})
        data = tuple(
            name
            for name, size in sizes.items()
            if size > 1 and (name in _DATA_DIMENSIONS or name == extra_dimension)
        )
        if not data:
            return Members((dist.get_rank(),), dist.get_backend())
        part = mesh[data]
    return Members(tuple(part.mesh.flatten().tolist()), dist.get_backend(part.get_group(0)))


def _check_dimensions(sizes: dict[str, int]) -> None:
    """Raise unless every dimension with several ranks is known to be for data or for the model."""
    for name, size in sizes.items():
        if size > 1 and name not in (*_DATA_DIMENSIONS, *_MODEL_DIMENSIONS):
            raise UnsupportedError(
                f'the device mesh has a dimension "{name}" of {size} ranks, but distca knows only'
                f" {_DATA_DIMENSIONS} for data and {_MODEL_DIMENSIONS} for the model. If these"
                " ranks hold parts of a sequence, distca would take each part for whole documents."
                ' Set the size to 1 (for "cp" and "sp": cp_size=1, sp_size=1 in accelerate\'s'
                " ParallelismConfig): distca replaces context and sequence parallelism, because it"
                " shares the attention of long documents between data-parallel ranks."
            )


@cache
def warn_once(text: str, *values: object) -> None:
    """Log a warning, but only once for the same text and values."""
    LOG.warning(text, *values)


_SLOW_SECONDS = 1.0


def print_lines(text: str) -> None:
    """Write lines to standard error."""
    tqdm.write(text, file=sys.stderr)


@contextmanager
def print_if_slow(activity: str) -> Iterator[None]:
    """Print the name of an activity on rank 0 as soon as it takes more than a second, and its
    duration when it ends.
    """
    if not is_progress_bar_enabled() or (
        dist.is_available() and dist.is_initialized() and dist.get_rank() != 0
    ):
        yield
        return
    started = time.perf_counter()
    timer = Timer(_SLOW_SECONDS, print_lines, [f"distca: {activity} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    seconds = time.perf_counter() - started
    if seconds > _SLOW_SECONDS:
        print_lines(f"distca: {activity} took {seconds:.1f} s")
