"""Input and output types of attention kernels, and functions that kernels share.

Attention tasks are slices of *pools*: tensors of query rows, and tensors of keys and values.

Shape suffixes: T tokens (query rows or keys of a pool), H query heads, K key/value heads, D head
dim, V value head dim.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch.nn.functional import pad

from hf_distca.errors import KernelError

Given = ParamSpec("Given")
Result = TypeVar("Result")


def disable_gradients(method: Callable[Given, Result]) -> Callable[Given, Result]:
    """Run a method without recording gradients.

    Recording is usually off already when a layer calls the method, and switching it off again would
    cost time.
    """

    @wraps(method)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if not torch.is_grad_enabled():
            return method(*args, **kwargs)
        with torch.no_grad():
            return method(*args, **kwargs)

    return call


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """Options of the attention weights, which are the softmax of cap(q k^T * scale) over the
    visible keys.

    Attributes:
        scale: factor on q k^T.
        window: the most keys that a row sees, including its own position; None for no limit.
        softcap: if given, cap(x) = softcap * tanh(x / softcap) (Gemma 2, arXiv 2408.00118, section
            2). Without it, cap(x) = x.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:  # kernels scale masked scores: -inf * 0 would be NaN
            raise KernelError(
                f"The scale of the scores must be finite and positive, got {self.scale}."
            )
        if self.window is not None and self.window < 1:
            raise KernelError(
                f"A window of {self.window} keys leaves nothing to attend to. It must be at least"
                " 1, which is the row's own position."
            )
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise KernelError(
                f"softcap divides the scores and must be finite and positive, got {self.softcap}."
                " None switches it off."
            )

    def find_hiding_window(self, keys: int) -> int | None:
        """Return the window if it hides keys from the last row of a task with `keys` keys.

        Return None if there is no window, or if it hides no keys.
        """
        return self.window if self.window is not None and self.window < keys else None


class KernelRequest(NamedTuple):
    """The problem that a kernel is asked to run.

    Attributes:
        device: device of the tensors.
        dtype: dtype of q, k and v.
        head_dim, value_head_dim: width of q and k, and of v and the output.
        scores: scale, window and softcap.
        gqa_ratio: query heads for each key/value head.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    value_head_dim: int
    scores: ScoreOptions
    gqa_ratio: int = 2


@dataclass(frozen=True, eq=False)
class TaskBatch:
    """Core-attention tasks (CA-tasks) over a pool of query rows and a pool of keys. All numbers are
    on the host.

    Task i has query rows ``[query_start[i], query_start[i] + query_length[i])`` of the query pool
    and keys ``[key_start[i], key_start[i] + key_length[i])`` of the key pool. Its last query row
    sees all its keys, and each earlier row sees one key fewer (causal, aligned bottom right), so
    ``key_length >= query_length >= 1``. With a window of w keys, a row sees only the last w of
    these keys. Query rows of different tasks never overlap. Keys may overlap, because several
    slices of a document share one copy of its prefix.

    Kernels cache derived data, such as their calls, in `derived` under separate keys. These data
    are reused, because all layers of a micro-batch run the same batches, in forward and backward.
    """

    query_start: Sequence[int]
    query_length: Sequence[int]
    key_start: Sequence[int]
    key_length: Sequence[int]
    derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.query_start)

    @cached_property
    def runs(self) -> list[tuple[int, int, int, int]]:
        """First row, number of rows, first key and number of keys of each task."""
        return list(
            zip(self.query_start, self.query_length, self.key_start, self.key_length, strict=True)
        )

    @cached_property
    def required_sizes(self) -> tuple[float, float]:
        """Numbers of query rows and of keys in the smallest pools that hold all tasks; infinite if
        a task is not valid.
        """
        fit = [row >= 0 <= key and 1 <= rows <= keys for row, rows, key, keys in self.runs]
        if not all(fit):
            return math.inf, math.inf
        return (
            max([row + rows for row, rows, _, _ in self.runs], default=0),
            max([key + keys for _, _, key, keys in self.runs], default=0),
        )

    @cached_property
    def shares_keys(self) -> bool:
        """True if any two tasks have a key in common, so that gradients of keys must be summed."""
        runs = sorted(zip(self.key_start, self.key_length, strict=True))
        return any(a + n > b for (a, n), (b, _) in itertools.pairwise(runs))


class Operands(NamedTuple):
    """Tensors that a task reads in forward. Tensors with a row per query come before tensors with a
    row per key, as in `BackwardInputs` and in messages.
    """

    q_THD: torch.Tensor
    k_TKD: torch.Tensor
    v_TKV: torch.Tensor


class Outputs(NamedTuple):
    """Results of a task in forward: output and log-sum-exp."""

    o_THV: torch.Tensor
    lse_TH: torch.Tensor


class BackwardInputs(NamedTuple):
    """Tensors that a task reads in backward. Tensors with a row per query come first."""

    do_THV: torch.Tensor
    q_THD: torch.Tensor
    o_THV: torch.Tensor
    lse_TH: torch.Tensor
    k_TKD: torch.Tensor
    v_TKV: torch.Tensor

    @property
    def operands(self) -> Operands:
        """The tensors that forward reads."""
        return Operands(self.q_THD, self.k_TKD, self.v_TKV)


class Grads(NamedTuple):
    """Results of a task in backward. dk and dv may be sums, in a wider dtype than k and v."""

    dq_THD: torch.Tensor
    dk_TKD: torch.Tensor
    dv_TKV: torch.Tensor


Tensors = Operands | Outputs | BackwardInputs | Grads
# Number of tensors with a row per query. These tensors come first, and the remaining ones have a
# row per key.
_QUERY_TENSORS: dict[type, int] = {Operands: 1, Outputs: 2, BackwardInputs: 4, Grads: 1}


def get_query_rows(tensors: Tensors) -> tuple[torch.Tensor, ...]:
    """Return the tensors with one row per query."""
    return tensors[: _QUERY_TENSORS[type(tensors)]]


def get_key_rows(tensors: Tensors) -> tuple[torch.Tensor, ...]:
    """Return the tensors with one row per key. `Outputs` has no such tensors."""
    return tensors[_QUERY_TENSORS[type(tensors)] :]


def find_first_reason(*reasons: tuple[bool, str]) -> str | None:
    """Return the text of the first (condition, text) pair whose condition is true, else None."""
    return next((text for holds, text in reasons if holds), None)


def find_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU; (0, 0) for other devices, or without a GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.get_device_capability(device)


class Kernel(Protocol):
    """An attention kernel: exact core attention of a `TaskBatch`, forward and backward.

    ``forward`` and ``backward`` never make the host wait for the device, and may cache data that
    they derive from `tasks`.
    """

    @property
    def name(self) -> str:
        """Name of the kernel, one of `KernelName`."""
        ...

    def __hash__(self) -> int: ...

    def unsupported_reason(self, case: KernelRequest) -> str | None:
        """Return why this kernel cannot run the given case, or None if it can."""
        ...

    def forward(self, pools: Operands, tasks: TaskBatch, scores: ScoreOptions) -> Outputs:
        """Compute attention output and log-sum-exp.

        Returns:
            o_THV in q's dtype, and lse_TH (natural logarithm) in float32, or float64 for float64
            inputs. Rows that no task covers are 0 in both. o_THV is contiguous; lse_TH may have any
            strides.
        """
        ...

    def backward(self, pools: BackwardInputs, tasks: TaskBatch, scores: ScoreOptions) -> Grads:
        """Compute gradients of q, k and v.

        Each gradient has the size of its pool, and is 0 in rows that no task covers. If
        ``tasks.shares_keys`` is true, dk and dv are summed and returned in float32, or float64 for
        float64 inputs. Otherwise they may be in k's dtype.
        """
        ...


def choose_accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of log-sum-exps and gradient sums: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def choose_key_gradient_dtype(tasks: TaskBatch, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of dk and dv: float32 or float64 if tasks share keys, else `dtype`."""
    return choose_accumulation_dtype(dtype) if tasks.shares_keys else dtype


def check_pools(pools: Operands | BackwardInputs, tasks: TaskBatch) -> None:
    """Raise an error if the shapes of pools do not match, or if a pool is shorter than the tasks
    need.

    Without this check, a kernel that takes raw offsets would read memory outside the pool.
    """
    # Most layers have the same shapes, so shapes that passed are not checked again.
    shapes = q, k, v = pools.q_THD.shape, pools.k_TKD.shape, pools.v_TKV.shape
    if tasks.derived.get(check_pools) == shapes:
        return
    shown = f"q {tuple(q)}, k {tuple(k)}, v {tuple(v)}"
    if not len(q) == len(k) == len(v) == 3:
        raise KernelError(f"Pools must have the dimensions (tokens, heads, head dim), got {shown}.")
    if q[2] != k[2] or k[:2] != v[:2]:
        raise KernelError(
            "q and k must have the same head dim, and k and v the same tokens and heads, got"
            f" {shown}."
        )
    if q[1] % max(k[1], 1):
        raise KernelError(f"Query heads must be a multiple of key/value heads, got {shown}.")
    most_rows, most_keys = tasks.required_sizes
    if most_rows <= q[0] and most_keys <= k[0]:
        tasks.derived[check_pools] = shapes
        return
    for query_start, rows, key_start, keys in tasks.runs:
        if not 1 <= rows <= keys:
            raise KernelError(
                f"A task has {rows} query rows and {keys} keys. It needs at least one row, and at"
                " least as many keys as rows."
            )
        if min(query_start, key_start) < 0 or query_start + rows > q[0] or key_start + keys > k[0]:
            raise KernelError(
                f"A task has query rows [{query_start}, {query_start + rows}) of a pool of {q[0]}"
                f" and keys [{key_start}, {key_start + keys}) of a pool of {k[0]}; the pools and"
                " the tasks belong to different plans."
            )


def pad_last(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return `x` with its last dimension padded with zeros to `size`, and with stride 1 there. If
    nothing needs to change, the result is `x` itself.

    Padding is exact, because zeros add nothing to a dot product, and value columns of zeros give
    output columns of zeros.
    """
    if x.shape[-1] < size:
        return pad(x, (0, size - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()
