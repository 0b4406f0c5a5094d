"""Private names of torch, transformers and accelerate that distca uses although they may change.

Only this file, `data.borrowed_readers` and `pipeline.borrowed_pipelining` use private names of
these packages. tests/test_borrowed.py checks this rule, and that each name exists and behaves as
described here. tests/oldest.sh runs that test with the oldest supported versions. Check the three
files when a new version of torch, transformers or accelerate comes out. The heading of each block
lists the versions in which its names were seen. transformers is imported inside functions, because
its import takes seconds.
"""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch._C import _autograd
from torch._C import _len_torch_dispatch_stack as has_dispatch_modes
from torch._C._autograd import _profiler_enabled as is_profiling
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch._C._dynamo.eval_frame import get_eval_frame_callback as compiler_of_calls
from torch._dynamo.decorators import skip as leave_uncompiled
from torch._dynamo.eval_frame import OptimizedModule as CompiledModule
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d as c10d
from torch.distributed._composable.contract import _get_registry
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "BOTH_WAYS_MASK_PARTS",
    "CAUSAL_MASK_PARTS",
    "CompiledModule",
    "MASK_BLOCKS",
    "MASK_BOTH_WAYS",
    "MASK_BOTH_WAYS_WINDOW",
    "MASK_CHUNKS",
    "MASK_UNION",
    "MASK_WINDOW",
    "PrefixStore",
    "Store",
    "TCPStore",
    "TorchDispatchMode",
    "allow_saved_tensor_hooks",
    "get_changed_flash_attention",
    "get_version",
    "has_no_values",
    "is_checkpointed",
    "is_profiling",
    "compiler_of_calls",
    "copy_each",
    "count_shifted_targets",
    "cpu_attention",
    "cpu_attention_backward",
    "cuda_attention",
    "cuda_attention_backward",
    "dispatch_modes",
    "efficient_attention",
    "efficient_attention_backward",
    "forbid_saved_tensor_hooks",
    "group_in_store",
    "group_of_members",
    "has_dispatch_modes",
    "has_partial_state",
    "is_in_backward",
    "is_in_transform",
    "is_of_package",
    "is_policy_mode",
    "leave_uncompiled",
    "let_names_pass",
    "get_mesh",
    "list_group_names",
    "pop_dispatch_mode",
    "pop_saved_tensor_hooks",
    "push_dispatch_mode",
    "push_saved_tensor_hooks",
    "set_batch_size",
    "store_of_world",
    "get_timeout",
    "top_saved_tensor_hooks",
    "why_saved_tensor_hooks_are_forbidden",
    "without_dispatch_modes",
]


# ---- torch 2.13.0

# Functions for the hooks on saved tensors, which activation checkpointing uses. torch shows only
# the pair of hooks that was pushed last.
allow_saved_tensor_hooks = _autograd._saved_tensors_hooks_enable
forbid_saved_tensor_hooks = _autograd._saved_tensors_hooks_disable
why_saved_tensor_hooks_are_forbidden = _autograd._saved_tensors_hooks_get_disabled_error_message
top_saved_tensor_hooks = _autograd._top_saved_tensors_default_hooks
push_saved_tensor_hooks = _autograd._push_saved_tensors_default_hooks
pop_saved_tensor_hooks = _autograd._pop_saved_tensors_default_hooks

# Functions for the dispatch modes of a thread. `compiler_of_calls` returns None if torch would not
# compile a call. `leave_uncompiled` marks a function that torch must not compile. Functions that
# the marked function calls may still be compiled. The mark costs nothing without torch.compile.
dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack
push_dispatch_mode = _python_dispatch._push_mode
pop_dispatch_mode = _python_dispatch._pop_mode
without_dispatch_modes = _python_dispatch._disable_current_modes


def has_no_values() -> bool:
    """Return whether this runs in a transform of torch.func or under FakeTensorMode. There, new
    tensors have no values to read, or values that other ranks do not have.
    """
    return is_in_transform() or any(isinstance(mode, FakeTensorMode) for mode in dispatch_modes())


# Returns whether this runs in a transform of torch.func, such as grad or vmap.
is_in_transform = torch._C._are_functorch_transforms_active


def is_in_backward() -> bool:
    """Return whether this runs inside a backward, where every forward is a recompute."""
    return torch._C._current_graph_task_id() != -1


def get_version(tensor: torch.Tensor) -> int:
    """Return the version counter of a tensor. Every in-place change of the tensor or of a view of
    it increases the counter.

    torch documents this attribute, although its name is private.
    """
    return tensor._version


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy tensors into targets of the same shapes, in one operation."""
    torch._foreach_copy_(list(targets), list(sources))


def is_checkpointed(module: torch.nn.Module) -> bool:
    """Return whether the activations of a module are checkpointed by a wrapper around it or by its
    hooks.
    """
    return isinstance(module, CheckpointWrapper) or "checkpoint" in (_get_registry(module) or ())


def is_policy_mode(mode: TorchDispatchMode) -> bool:
    """Return whether a dispatch mode belongs to selective activation checkpointing."""
    return isinstance(mode, (_CachingTorchDispatchMode, _CachedTorchDispatchMode))


# The operation that torch's scaled_dot_product_attention runs on CPUs, and its backward. The
# forward also returns the log-sum-exp.
cpu_attention: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
cpu_attention_backward: Any = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
)


# torch's own flash-attention 2 and memory-efficient attention. Both accept sequences of different
# lengths in one call.
cuda_attention: Any = torch.ops.aten._flash_attention_forward
cuda_attention_backward: Any = torch.ops.aten._flash_attention_backward
efficient_attention: Any = torch.ops.aten._efficient_attention_forward
efficient_attention_backward: Any = torch.ops.aten._efficient_attention_backward


def list_group_names() -> set[str]:
    """Return the names of the process groups that this rank is in."""
    return set(c10d._world.pg_names.values())


def group_of_members(
    ranks: tuple[int, ...], backend: str, timeout: datetime.timedelta, name: str, purpose: str
) -> dist.ProcessGroup:
    """Make a process group that is not bound to a device. Only its members call this function,
    whereas `dist.new_group` must be called by all ranks.
    """
    world = c10d._get_default_group()
    return _make_group(
        world,
        (ranks, ranks.index(world.rank())),
        list(ranks),
        (store_of_world(), backend, timeout),
        (name, purpose),
    )


def group_in_store(
    place: tuple[tuple[int, ...], int],
    store: Store,
    backend: str,
    timeout: datetime.timedelta,
    name: str,
) -> dist.ProcessGroup:
    """Make a process group of processes that meet in a store. These processes may belong to
    different worlds, or to no world.

    Args:
        place: the numbers of all processes, used like global ranks, and the index of this process.
        store, backend, timeout: see `dist.init_process_group`.
        name: name that no other group of this process has.
    """
    # An empty list of global ranks keeps torch from looking for them in this process's world.
    return _make_group(c10d.GroupMember.WORLD, place, [], (store, backend, timeout), (name, name))


def _make_group(
    world: dist.ProcessGroup | None,
    place: tuple[tuple[int, ...], int],
    global_ranks: list[int],
    over: tuple[Store, str, datetime.timedelta],
    names: tuple[str, str],
) -> dist.ProcessGroup:
    """Make a process group that is not bound to a device, even if this process's world is bound to
    one.
    """
    (ranks, rank), (store, backend, timeout) = place, over
    device = None if world is None else world.bound_device_id
    if world is not None:
        world.bound_device_id = None
    group: dist.ProcessGroup
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            rank,
            global_ranks,
            c10d.Backend(backend),
            store,
            c10d.GroupName(names[0]),
            backend_options=_make_options(backend, timeout),
            timeout=timeout,
            group_desc=names[1],
        )
    finally:
        if world is not None:
            world.bound_device_id = device
    c10d._world.pg_group_ranks[group] = {number: index for index, number in enumerate(ranks)}
    return group


def _make_options(backend: str, timeout: datetime.timedelta) -> Any:
    """Return options of NCCL with a stream of high priority; None for other backends.

    Messages and the kernel of a rank's own tasks become ready at the same time. If the kernel began
    first, messages without priority would wait until the kernel ends.
    """
    if "nccl" not in backend:
        return None
    options = c10d.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    options._timeout = timeout
    return options


def store_of_world() -> Store:
    """Return the store in which the ranks of the world met."""
    store: Store = c10d._get_default_store()
    return store


def get_timeout(group: dist.ProcessGroup | None) -> datetime.timedelta:
    """Return the timeout of collectives of a process group, or of the world if `group` is None.
    This is the longest timeout of the group's backends.
    """
    group = group or c10d._get_default_group()
    return max(group._get_backend(device).options._timeout for device in group._device_types)


# ---- accelerate 1.11.0 to 1.15.0


def has_partial_state() -> bool:
    """Return whether accelerate has already chosen its processes and device. Asking a
    `PartialState` would make accelerate choose them now.
    """
    from accelerate import PartialState

    return bool(PartialState._shared_state)


# ---- transformers 5.5.3, 5.6.0, 5.9.0, 5.16.1, 5.19.0 and 5.23.0

# Names of the functions from which transformers composes masks.
MASK_UNION, MASK_CHUNKS, MASK_BLOCKS = "or_masks", "chunked_overlay", "blockwise_overlay"
MASK_WINDOW = "sliding_window_overlay"  # its only argument is `sliding_window`
# Names of the functions for bidirectional attention, without and with a window.
MASK_BOTH_WAYS = "bidirectional_mask_function"
MASK_BOTH_WAYS_WINDOW = "sliding_window_bidirectional_overlay"
BOTH_WAYS_MASK_PARTS = frozenset({MASK_BOTH_WAYS, MASK_BOTH_WAYS_WINDOW, "and_masks"})
# Functions from which causal masks are composed. If a mask contains any other function, distca does
# not know which keys the mask hides. Versions before 5.23 lack some of these functions.
CAUSAL_MASK_PARTS = frozenset(
    {
        "causal_mask_function",
        "and_masks",
        "packed_sequence_mask_function",
        MASK_WINDOW,
        "remap_positions_for_packed_sequence",
        MASK_CHUNKS,
    }
)


def get_mesh(model: PreTrainedModel) -> DeviceMesh | None:
    """Return the mesh of a model that was loaded with a `DistributedConfig`, else None.

    Seen in 5.23.0. Versions up to 5.19.0 do not keep the mesh, so users must give
    `hf_distca.configure` the group.
    """
    manager = getattr(model, "_mesh_manager", None)
    if manager is None:
        return None
    mesh: DeviceMesh = manager.get_mesh(("pp", "dp_replicate", "fsdp", "tp"))
    return mesh._get_root_mesh()  # the whole mesh, which may have more dimensions


def get_changed_flash_attention() -> Callable[..., Any] | None:
    """Return the function with which another package has replaced transformers'
    `_flash_attention_forward`; None if no package has replaced it.
    """
    from transformers import modeling_flash_attention_utils
    from transformers.integrations import flash_attention

    for module in (modeling_flash_attention_utils, flash_attention):
        function: Callable[..., Any] = module._flash_attention_forward
        if getattr(function, "__module__", None) != modeling_flash_attention_utils.__name__:
            return function
    return None


_passing: dict[str, str] = {}


def let_names_pass(names: Mapping[str, str]) -> None:
    """Make transformers accept each key of `names` as an attention implementation, even if the
    package of this implementation is missing. A model that asks for a key gets `names[key]`.

    transformers checks the implementation of a model when the model is made and when the
    implementation is changed. For a missing package, transformers would look for a kernel on the
    hub.
    """
    from transformers import PreTrainedModel

    if not _passing:
        ask = PreTrainedModel._check_and_adjust_attn_implementation

        @wraps(ask)
        def check(self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> Any:
            return (
                _passing[attn_implementation]
                if attn_implementation in _passing
                else ask(self, attn_implementation, *args, **kwargs)
            )

        PreTrainedModel._check_and_adjust_attn_implementation = check  # type: ignore[method-assign]
    _passing.update(names)


def is_of_package(function: Callable[..., Any]) -> bool:
    """Return whether a function of a modeling module runs the function of a package (fla,
    mamba-ssm, ...) instead of its fallback in torch.

    Kernels from the hub do not count, because transformers loads them later. Seen in transformers
    5.18.0 and 5.23.0, and in kernels 0.17.2.
    """
    # If the package `kernels` is installed, `function` is an `nn.Module` with a `forward`.
    decorated = getattr(type(function), "forward", function)
    while getattr(decorated, "__closure__", None) is not None:
        held = inspect.getclosurevars(decorated).nonlocals
        if "is_new_implementation" in held:
            return bool(held["is_new_implementation"])
        decorated = held.get("func")
    return False


def set_batch_size(trainer: Any, rows: int) -> None:
    """Set the number of rows in a batch of this process. The Trainer reads this number from its
    arguments only when the Trainer is created.
    """
    trainer._train_batch_size = rows


@cache
def count_shifted_targets() -> None:
    """Make the Trainer count the targets of a step in `shift_labels` if a batch has this key.

    Since 5.11 the Trainer does this itself. Older versions count the targets in `labels`, where one
    target is missing wherever a document is cut.
    """
    if Version(version("transformers")) >= Version("5.11.0"):
        return
    from transformers import Trainer

    count = Trainer._get_num_items_in_batch

    @wraps(count)
    def count_shifted(self: Any, batch_samples: list[Any], device: Any) -> Any:
        batches = [
            {"labels": batch["shift_labels"]} if "shift_labels" in batch else batch
            for batch in batch_samples
        ]
        return count(self, batches, device)

    Trainer._get_num_items_in_batch = count_shifted  # type: ignore[method-assign]
