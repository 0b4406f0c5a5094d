"""Costs of a core-attention task (CA-task) and of an exchange, in seconds.

One direction of a CA-task with n query rows and m keys costs the sum of three parts::

    seconds = task_seconds + bytes / bytes_per_second + flops(n, m) / flops_per_second

Flops are counted in whole kernel tiles, because small slices are slow. So a row also counts the
keys of its tile that come after the row. The flop count of causal attention follows
FlashAttention-2 (arXiv 2307.08691, section 4.1): 4 * head_dim per query-key pair and head in
forward, and 2.5 times as many in backward. Only the bytes that a block of the kernel reads first
and writes last are counted, because no matrix product hides them. All other bytes move while
products run. A block of forward holds rows of one query head, and a block of backward holds keys of
one query head (section 3.2). So the bytes of forward are q and o of each row. The bytes of backward
are q, o, do and dq of each row, and k, v, dk and dv of each key and query head. If query heads
share keys, backward reads dk and dv once more to add them up. Rows and keys that only fill up a
tile are neither read nor written.

The three coefficients are built-in figures times a factor for the GPU and the kernel
(`schedule.gpus`), or the user's own figures. A kernel may also move its rows more than once
(`KernelCost.row_passes`). In backward, an extra kernel may first read o and do, and another may
read dq in float32 at the end.

With a sliding window of w keys, position p sees keys (p - w, p]. Only the pairs of this band are
counted, and only the last n + w - 1 keys are read.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from hf_distca.errors import ConfigError
from hf_distca.schedule.layout import FloatArray
from hf_distca.schedule.slice_cost import count_task_work

# Limits on the figures of a device: bytes or operations per second, and seconds. Outside these
# limits, sums of seconds become infinite and their ratios NaN.
MIN_RATE = 1.0
MAX_SECONDS = 1e6
# Value of `window` for layers in which a row sees all keys before it.
ALL_KEYS = 2**62


def count_causal_pairs(
    rows: npt.ArrayLike, keys: npt.ArrayLike, window: int | None = None
) -> FloatArray:
    """Count the query-key pairs of `rows` query rows that end at document position `keys`.

    The last row sees `keys` keys, its own position included, or the last `window` of them.
    """
    n, m = np.broadcast_arrays(rows, keys)
    return np.asarray(
        count_task_work(n, m, 1, ALL_KEYS if window is None else window)[1], dtype=np.float64
    )


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads and widths of one attention layer.

    Attributes:
        query_heads, key_value_heads: head counts (equal for MHA).
        head_dim, value_head_dim: width of q and k, and of v and o.
        element_bytes: bytes of one element of q, k, v (2 for bf16).
    """

    query_heads: int
    key_value_heads: int
    head_dim: int
    value_head_dim: int
    element_bytes: int

    def __post_init__(self) -> None:
        if (
            min(self.query_heads, self.key_value_heads) < 1
            or min(self.head_dim, self.value_head_dim, self.element_bytes) < 1
            or self.query_heads % self.key_value_heads
        ):
            raise ConfigError(
                f"{self}: all must be >= 1, and query_heads must be a multiple of key_value_heads."
            )

    @property
    def heads_per_key_head(self) -> int:
        """Number of query heads for each key/value head."""
        return self.query_heads // self.key_value_heads

    @property
    def query_bytes(self) -> int:
        """Bytes of one token's q."""
        return self.query_heads * self.head_dim * self.element_bytes

    @property
    def output_bytes(self) -> int:
        """Bytes of one token's o."""
        return self.query_heads * self.value_head_dim * self.element_bytes

    @property
    def key_value_bytes(self) -> int:
        """Bytes of one token's k and v."""
        return self.key_value_heads * (self.head_dim + self.value_head_dim) * self.element_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's q and o."""
        return self.query_bytes + self.output_bytes

    @property
    def backward_key_bytes(self) -> int:
        """Bytes that backward reads and writes in memory for a key: k, v, dk and dv, once for each
        query head. If query heads share keys, dk and dv count twice.
        """
        return (3 if self.heads_per_key_head > 1 else 2) * self.row_bytes

    @property
    def lse_bytes(self) -> int:
        """Bytes of one token's log-sum-exp, kept in float32."""
        return 4 * self.query_heads

    @property
    def moved_query_bytes(self) -> int:
        """Bytes exchanged for one moved query token: q, o and lse in forward; q, o, dO, lse and dq
        in backward.
        """
        return 3 * self.query_bytes + 3 * self.output_bytes + 2 * self.lse_bytes

    @property
    def moved_key_bytes(self) -> int:
        """Bytes exchanged for one moved key token: k, v in forward; k, v, dk and dv in backward."""
        return 3 * self.key_value_bytes

    @property
    def pair_flops(self) -> int:
        """Forward floating-point operations of one query-key pair over all heads."""
        return 2 * self.query_heads * (self.head_dim + self.value_head_dim)


@dataclass(frozen=True, slots=True)
class KernelCost:
    """Costs of a kernel in one direction (forward or backward).

    The fixed time of a call is about the same on all ranks, so plans leave it out.

    Attributes:
        task_seconds, bytes_per_second, flops_per_second: fixed seconds of a task, bytes of memory
            per second, and floating-point operations per second. Bytes or operations at an infinite
            rate cost nothing.
        row_passes: number of times that the bytes of a row are moved.

    Raises:
        ConfigError: if a figure is out of range.
    """

    task_seconds: float
    bytes_per_second: float
    flops_per_second: float
    row_passes: float = 1.0

    def __post_init__(self) -> None:
        if not (
            0 <= self.task_seconds <= MAX_SECONDS
            and all(rate >= MIN_RATE for rate in (self.bytes_per_second, self.flops_per_second))
            and 0 < self.row_passes < math.inf
        ):
            raise ConfigError(
                f"{self}: task_seconds must be from 0 to 1e6, rates must be at least 1, and"
                " row_passes must be positive and finite."
            )

    @property
    def coefficients(self) -> FloatArray:
        """Seconds per task, per byte and per flop: shape (3,)."""
        return np.array([self.task_seconds, 1 / self.bytes_per_second, 1 / self.flops_per_second])

    def scale(self, factor: float) -> Self:
        """Return the costs of a kernel that takes `factor` times as long."""
        return replace(
            self,
            task_seconds=self.task_seconds * factor,
            bytes_per_second=self.bytes_per_second / factor,
            flops_per_second=self.flops_per_second / factor,
        )


# The figures are rounded. "cpu" is one thread of a recent server core, with loopback as the link
# between processes of one machine. "cuda" is an H100 with flash-attention 2 and one 400 Gbit/s link
# per GPU. The forward rate of "cuda" is close to published rates for packed documents, and backward
# is assumed to reach 0.8 of this rate. Inside a node, NVLink 4 carries 450 GB/s each way (NVIDIA
# H100 datasheet: 900 GB/s in both directions together), and exchanges are assumed to reach two
# thirds of that. Other GPUs and kernels have a factor on these figures (`schedule.gpus`).
_BUILT_IN = {
    "cpu": (KernelCost(3e-5, 5e9, 4.5e10), KernelCost(6e-5, 5e9, 4.5e10), 1e9, 3e-4, None),
    "cuda": (KernelCost(5e-7, 2e12, 3.5e14), KernelCost(1e-6, 1.6e12, 2.8e14), 4e10, 3e-5, 3e11),
}


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of CA-tasks and of exchanges for one attention shape.

    Attributes:
        shape: heads and widths of the layer.
        forward, backward: the kernel's coefficients.
        exchange_bytes_per_second: rate at which one rank sends while all ranks send and receive the
            same amount. If nodes are told apart, this is the rate between nodes.
        exchange_seconds: fixed seconds of one exchange.
        tile: query rows of a kernel tile.
        name: source of the figures.
        window: keys that a query position sees, its own included, in layers with a sliding window;
            None for layers without a window.
        node_bytes_per_second: rate at which one rank sends to ranks of its node while it receives
            the same amount; None if this rate is not higher than the rate between nodes.
        ranks_per_link: number of ranks of a node that share a link to other nodes; 1 if each rank
            has its own link. The rate of the link is ``exchange_bytes_per_second`` times this
            number, even if only some of the ranks send.
        peer_seconds: seconds that each peer of a rank adds to the fixed seconds of an exchange. The
            peers are the ranks that the rank sends to or the ranks that it receives from, whichever
            are more.
    """

    shape: AttentionShape
    forward: KernelCost
    backward: KernelCost
    exchange_bytes_per_second: float
    exchange_seconds: float = 0.0
    tile: int = 128
    name: str = field(default="custom", compare=False)
    window: int | None = None
    node_bytes_per_second: float | None = None
    ranks_per_link: int = 1
    peer_seconds: float = 0.0

    def __post_init__(self) -> None:
        window, rate, per_link = self.window, self.node_bytes_per_second, self.ranks_per_link
        fixed = self.exchange_seconds, self.peer_seconds
        for is_right, text in (
            (
                window is None or window >= 1,
                f"window={window} must be at least 1, because a query position sees itself, or None"
                " for no window.",
            ),
            (
                rate is None or 0 < rate < math.inf,
                f"node_bytes_per_second={rate} must be a positive number, or None for one rate"
                " everywhere.",
            ),
            (
                type(per_link) is int and per_link >= 1,
                f"ranks_per_link={per_link!r} must be a whole number of at least 1.",
            ),
            (
                self.exchange_bytes_per_second >= MIN_RATE,
                f"exchange_bytes_per_second={self.exchange_bytes_per_second} must be at least 1.",
            ),
            (
                all(0 <= seconds <= MAX_SECONDS for seconds in fixed),
                f"exchange_seconds={self.exchange_seconds} and peer_seconds={self.peer_seconds}"
                " must be from 0 to 1e6.",
            ),
            (self.tile >= 1, f"tile={self.tile} must be at least 1."),
        ):
            if not is_right:
                raise ConfigError(text)

    @classmethod
    def make_analytic(
        cls, shape: AttentionShape, *, device_type: str = "cuda", tile: int = 128
    ) -> CostModel:
        """Make a model from the built-in figures of a device type (``"cpu"`` or ``"cuda"``;
        anything else is treated as ``"cuda"``).
        """
        kind = device_type if device_type in _BUILT_IN else "cuda"
        forward, backward, bandwidth, latency, inside = _BUILT_IN[kind]
        return cls(
            shape,
            forward,
            backward,
            bandwidth,
            latency,
            tile,
            f"analytic {kind}",
            node_bytes_per_second=inside,
        )

    @classmethod
    def make_of_pairs(cls, shape: AttentionShape) -> CostModel:
        """Make a model in which only causal pairs have a cost. Published planners balance this
        cost.

        2**30 pairs cost one second.
        """
        return cls(
            shape,
            KernelCost(0.0, np.inf, 2.0**30 * shape.pair_flops),
            KernelCost(0.0, np.inf, np.inf),
            np.inf,
            tile=1,
            name="causal pairs",
        )

    def scale(self, kernel: float = 1.0, exchange: float = 1.0) -> Self:
        """Return this model with `kernel` times its kernel seconds and `exchange` times its
        exchange seconds.
        """
        node_rate = self.node_bytes_per_second
        return replace(
            self,
            forward=self.forward.scale(kernel),
            backward=self.backward.scale(kernel),
            exchange_bytes_per_second=self.exchange_bytes_per_second / exchange,
            exchange_seconds=self.exchange_seconds * exchange,
            node_bytes_per_second=None if node_rate is None else node_rate / exchange,
            peer_seconds=self.peer_seconds * exchange,
        )

    def without_unused_window(self, longest: int) -> Self:
        """Return this model, without its window if no document is longer than the window.

        `longest` is the number of tokens of the longest document.
        """
        return (
            replace(self, window=None)
            if self.window is not None and self.window >= longest
            else self
        )

    def to_json(self) -> str:
        """Return the model as JSON, with the names of its attributes as keys.

        Infinite rates, which cost nothing, are written as null.
        """
        return json.dumps(
            asdict(
                self,
                dict_factory=lambda pairs: {
                    name: None if value == math.inf else value for name, value in pairs
                },
            ),
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> CostModel:
        """Read a model that `to_json` wrote.

        Raises:
            ConfigError: if the text is not a cost model. The message names the mistake.
        """
        try:
            data: Any = json.loads(text)
            rates = {"exchange_bytes_per_second": data["exchange_bytes_per_second"]}
            return cls(
                **data
                | {
                    "shape": AttentionShape(**data["shape"]),
                    "forward": KernelCost(**_read_rates(data["forward"])),
                    "backward": KernelCost(**_read_rates(data["backward"])),
                    **_read_rates(rates),
                }
            )
        except Exception as error:  # a wrong text can raise any exception
            raise ConfigError(
                f"the text is no cost model in JSON ({type(error).__name__}: {error}). Give an"
                f" object with the attributes of `CostModel` as keys, not {text!r:.100}."
            ) from error

    def count_work(
        self, rows: npt.ArrayLike, keys: npt.ArrayLike, heads: npt.ArrayLike = 1.0
    ) -> FloatArray:
        """Count the work of tasks, each with `rows` query rows that end at document position
        `keys`.

        Here and in the methods below, `heads` is the fraction of the heads that each task computes.
        The result has shape (2, tasks, 3). The first axis is forward and backward. The last axis is
        the number of tasks (1), bytes and flops.
        """
        n, m = np.broadcast_arrays(np.atleast_1d(rows), np.atleast_1d(keys))
        read, pairs = count_task_work(
            n, m, self.tile, ALL_KEYS if self.window is None else self.window
        )
        tasks = np.ones(n.shape)
        flops = pairs * (self.shape.pair_flops * np.asarray(heads))
        rows_moved = n * (self.shape.row_bytes * np.asarray(heads, dtype=np.float64))
        forward = rows_moved * self.forward.row_passes
        backward = (
            2.0 * rows_moved * self.backward.row_passes
            + read * self.shape.backward_key_bytes * heads
        )
        return np.array([[tasks, forward, flops], [tasks, backward, 2.5 * flops]]).transpose(
            0, 2, 1
        )

    def estimate_directions(
        self, rows: npt.ArrayLike, keys: npt.ArrayLike, heads: npt.ArrayLike = 1.0
    ) -> FloatArray:
        """Return the seconds of each task, forward and backward: shape (2, tasks)."""
        coefficients = np.stack([self.forward.coefficients, self.backward.coefficients])[:, None]
        parts = self.count_work(rows, keys, heads) * coefficients
        # A matrix product is avoided, because BLAS rounds differently on different processors. All
        # ranks must get equal seconds to make equal plans.
        task, moved, computed = np.moveaxis(parts, -1, 0)
        return np.asarray(task + moved + computed)

    def estimate_seconds(
        self, rows: npt.ArrayLike, keys: npt.ArrayLike, heads: npt.ArrayLike = 1.0
    ) -> FloatArray:
        """Return forward plus backward seconds of each task."""
        return np.asarray(self.estimate_directions(rows, keys, heads).sum(axis=0))

    @property
    def key_seconds(self) -> float:
        """Seconds of a moved key on the wire, forward plus backward. The fixed seconds of an
        exchange are not included.
        """
        return self.shape.moved_key_bytes / self.exchange_bytes_per_second


class MarginalCost(NamedTuple):
    """A cost model as plain numbers, for the compiled loop that weighs slices (`schedule.trial`).

    Attributes:
        task, row, key, pair: seconds of a task, query row, key and query-key pair, forward plus
            backward.
        query_bytes, key_bytes: bytes exchanged for a moved query token and for a moved key token.
        tile: query rows of a kernel tile.
        window: number of keys that a row sees; `ALL_KEYS` without a window.
    """

    task: float
    row: float
    key: float
    pair: float
    query_bytes: float
    key_bytes: float
    tile: int
    window: int

    @classmethod
    def from_cost_model(cls, cost: CostModel) -> Self:
        """Convert a cost model to marginal costs."""
        shape, forward, backward = cost.shape, cost.forward, cost.backward
        passes = (
            forward.row_passes / forward.bytes_per_second
            + 2.0 * backward.row_passes / backward.bytes_per_second
        )
        return cls(
            task=float(forward.task_seconds + backward.task_seconds),
            row=shape.row_bytes * passes,
            key=shape.backward_key_bytes / backward.bytes_per_second,
            pair=shape.pair_flops
            * (1 / forward.flops_per_second + 2.5 / backward.flops_per_second),
            query_bytes=float(shape.moved_query_bytes),
            key_bytes=float(shape.moved_key_bytes),
            tile=cost.tile,
            window=ALL_KEYS if cost.window is None else cost.window,
        )


class TransientBytes(NamedTuple):
    """Bytes of memory that each exchanged token takes during a call.

    The bytes are those of backward, because forward needs fewer. In backward, a query row consists
    of do, q, o and log-sum-exp, and a key of k and v. A server holds first the received tensors and
    the pools, then the pools and the gradients. A home holds first the rows that it sends, then the
    gradients that come back.

    Attributes:
        query, key: bytes of a query row and of a key in a server's pools.
        sent_query, sent_key: bytes of a query row and of a key that a home sends, for each server
            that gets them.
    """

    query: int
    key: int
    sent_query: int
    sent_key: int

    @classmethod
    def from_shape(cls, shape: AttentionShape) -> TransientBytes:
        """Compute the bytes for an attention shape."""
        # Bytes of one element of log-sum-exps and of summed gradients.
        wide = max(4, shape.element_bytes)
        row = shape.query_bytes + 2 * shape.output_bytes + shape.query_heads * wide
        key = shape.key_value_bytes
        wide_key = shape.key_value_bytes * wide // shape.element_bytes
        # Servers return key gradients in the narrow dtype, and the home widens them to add them up.
        return cls(
            2 * row, key + wide_key, row, key + (wide_key if wide > shape.element_bytes else 0)
        )

    def find_last_row(self, bound: int | None, window: int, groups: int) -> int:
        """Find the document position up to which query rows may move.

        The keys before this position, in one of `groups` head groups, take at most half of `bound`
        bytes, so that rows can take the other half. All rows may move if `window` keys fit in half
        of the bound, or if there is no bound (None).
        """
        most = ALL_KEYS if bound is None else bound * groups // (2 * self.key)
        return ALL_KEYS if window <= most else most

    def check_bound(self, bound: int | None) -> None:
        """Raise an error if a bound in bytes is too small for one query row and one key.

        Raises:
            ConfigError: if it is too small. The message states the bound and the bytes needed.
        """
        if bound is not None and bound < self.query + self.key:
            raise ConfigError(
                f"max_transient_bytes={bound} is less than the {self.query + self.key} bytes that"
                " one query row and one key take. Give enough for many rows, or None for no bound."
            )


def _read_rates(data: dict[str, Any]) -> dict[str, float]:
    """Read rates and seconds that were parsed from JSON. None stands for infinity."""
    return {name: math.inf if value is None else float(value) for name, value in data.items()}
