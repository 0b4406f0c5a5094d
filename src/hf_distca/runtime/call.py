"""A layer's call of core attention on one rank: its messages and tasks, forward and backward.

The call has three phases, in forward and in backward. `begin` sends queries and keys, `serve` runs
tasks and sends results back, and `finish` waits for results. `serve` has three steps:
`forward_keys`, `run_local` and `run_pooled`. Forward computes `Outputs` from `Operands`, and
backward computes `Grads` from `BackwardInputs`. A step that starts an exchange returns it, and the
step that waits for the exchange takes it as an argument.

The argument `home` of the steps holds the tensors of this rank's own tokens. This code runs in
every layer, between kernel launches. It therefore computes nothing that the route already has, and
avoids Python calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from hf_distca.borrowed import is_profiling
from hf_distca.kernels.base import (
    BackwardInputs,
    Grads,
    Kernel,
    Operands,
    Outputs,
    ScoreOptions,
    TaskBatch,
    Tensors,
)
from hf_distca.runtime.group import AttentionGroup, Phase
from hf_distca.runtime.messages import MessagePart, Pending, enter_side_stream, launch, put_rows
from hf_distca.runtime.meter import Meter, get_clock, show
from hf_distca.runtime.outputs import LayerOutputs
from hf_distca.runtime.route import KeyRelay, Pool, PooledTasks, Route
from hf_distca.schedule.cost import AttentionShape

Handed = TypeVar("Handed", bound=Tensors)
Results = TypeVar("Results", bound=Outputs | Grads)


def split_head_groups(tensors: Handed, groups: int) -> Handed:
    """Split each token's row into one row for each head group.

    The results are views if the tensors are contiguous.
    """
    if groups == 1:
        return tensors
    return type(tensors)(
        *(t.contiguous().view(len(t) * groups, t.shape[1] // groups, *t.shape[2:]) for t in tensors)
    )


def merge_head_groups(tensors: Handed, groups: int) -> Handed:
    """Undo `split_head_groups`."""
    if groups == 1:
        return tensors
    return type(tensors)(
        *(t.view(len(t) // groups, t.shape[1] * groups, *t.shape[2:]) for t in tensors)
    )


class Inputs(NamedTuple):
    """Inputs of a layer's attention.

    Attributes:
        q_THD, k_TKD, v_TKV: this rank's tokens in layout order, T >= 0. For GQA, k and v are not
            repeated.
        sink_H: logit of the attention sink of each head. It may require a gradient.
        context_k_TKD, context_v_TKV: keys and values of the context (earlier tokens without queries
            here). They lie in front of k and v, and get gradients. Pass both or neither. Both are
            saved without a copy, so they take no extra memory if other code keeps them.
    """

    q_THD: torch.Tensor
    k_TKD: torch.Tensor
    v_TKV: torch.Tensor
    sink_H: torch.Tensor | None = None
    context_k_TKD: torch.Tensor | None = None
    context_v_TKV: torch.Tensor | None = None

    @property
    def context_tokens(self) -> int:
        """Number of tokens of the context."""
        return 0 if self.context_k_TKD is None else len(self.context_k_TKD)

    @property
    def operands(self) -> Operands:
        """Queries, keys and values. Keys and values of the context come first."""
        if self.context_k_TKD is None or self.context_v_TKV is None:
            return Operands(self.q_THD, self.k_TKD, self.v_TKV)
        return Operands(
            self.q_THD,
            torch.cat([self.context_k_TKD, self.k_TKD]),
            torch.cat([self.context_v_TKV, self.v_TKV]),
        )


def make_empty_operands(
    shape: AttentionShape, dtype: torch.dtype, device: torch.device
) -> Operands:
    """Make q, k and v with zero rows, in the shapes of a layer."""
    queries, keys = shape.query_heads, shape.key_value_heads
    widths = (queries, shape.head_dim), (keys, shape.head_dim), (keys, shape.value_head_dim)
    return Operands(*(torch.empty((0, *width), dtype=dtype, device=device) for width in widths))


def make_empty_saved(operands: Operands) -> BackwardInputs:
    """Make backward inputs with zero rows, in the shapes of a layer.

    Args:
        operands: the result of `make_empty_operands` for the layer.
    """
    q_THD, k_TKD, v_TKV = operands
    # Kernels return log-sum-exps in float32 or wider.
    lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.promote_types(q_THD.dtype, torch.float32))
    o_THV = q_THD.new_empty((*q_THD.shape[:2], v_TKV.shape[2]))
    return BackwardInputs(o_THV, q_THD, o_THV, lse_TH, k_TKD, v_TKV)


@dataclass(frozen=True, eq=False)
class AttentionServer:
    """An attention server. It runs CA-tasks with one kernel, and keeps nothing between calls.

    Attributes:
        kernel: the attention kernel.
        scores: scale, window and softcap of the layers.
        meter: counts kernel calls and seconds.
    """

    kernel: Kernel
    scores: ScoreOptions
    meter: Meter

    def run(self, pools: Operands | BackwardInputs, tasks: TaskBatch) -> Outputs | Grads:
        """Compute outputs or gradients of a batch of tasks. Rows that no task covers are zero."""
        device_type = pools.q_THD.device.type
        if is_profiling() or torch.is_autocast_enabled(device_type):
            # Kernels choose dtypes by their inputs. The user's autocast would change these dtypes.
            with show("server"), torch.autocast(device_type, enabled=False):
                return self._compute(pools, tasks)
        return self._compute(pools, tasks)

    def _compute(self, pools: Operands | BackwardInputs, tasks: TaskBatch) -> Outputs | Grads:
        backward = isinstance(pools, BackwardInputs)
        self.meter.count(kernel_calls=1, backward_calls=int(backward))
        compute: Callable[..., Outputs | Grads] = (
            self.kernel.backward if backward else self.kernel.forward
        )
        clock = get_clock(pools.q_THD.device) if self.meter.timed else float
        begin = clock()
        results = compute(pools, tasks, self.scores)
        self.meter.span("server", begin, clock())
        return results


class LayerExchange:
    """A layer's call of core attention on one rank.

    Attributes:
        route, group, server: this rank's route, attention group and attention server.
        stored: the layer's entry in the output store; None if outputs are not stored.
        label: name of the call, the same on every rank; None in a group of one.
        recomputed_outputs: in a recompute, the outputs that the first forward stored; None if there
            are none. A recompute with these outputs launches no exchange and runs no kernel.
        backward: whether backward has begun.
        exchanges: whether any rank sends rows, in forward or backward.
    """

    def __init__(
        self,
        route: Route,
        group: AttentionGroup,
        server: AttentionServer,
        stored: LayerOutputs | None = None,
        label: str | None = None,
    ) -> None:
        self.route, self.group, self.server = route, group, server
        self.label, self.stored = label, stored
        recorded = None if stored is None else stored.take_recorded()
        self.recomputed_outputs = None if recorded is None else Outputs(*recorded)
        self.backward = False
        self.exchanges = route.exchanges
        # How many of the sent tensors, and how many of the results, have one row per query. The
        # others have one row per key.
        self._sent_queries, self._returned_queries = 1, 2
        self._stashed: tuple[Tensors, Pending | None] | None = None
        # If keys are relayed, backward keeps two lists of gradients here: those of received
        # queries, and those of the key pool, in the dtype in which they will be summed.
        self._relay_buffers: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []

    def begin(self, tokens: Operands | BackwardInputs) -> None:
        """Launch the first dispatch of forward, or of backward if `begin_backward` was called."""
        self._enter_phase("begin", tokens.q_THD.dtype)
        dispatch = None
        # In a pipeline, forward and backward have different routes. A route may exchange nothing
        # although `self.exchanges` is true.
        if self.route.exchanges:
            home, pooled = split_head_groups(tokens, self.route.groups), self.route.pooled
            rows = [pooled.queries] * self._sent_queries + [pooled.keys] * 2
            # Some kernels return log-sum-exps that are not contiguous.
            parts = [MessagePart(t.contiguous(), sent) for t, sent in zip(home, rows, strict=True)]
            dispatch = self._launch(parts, "dispatch", dispatches=1)
        self._stashed = tokens, dispatch

    def begin_without_rows(self, operands: Operands) -> None:
        """Begin on a rank that only serves other ranks.

        `operands` is the result of `make_empty_operands` for the layer.
        """
        self.begin(make_empty_saved(operands) if self.backward else operands)

    def serve(self) -> None:
        """Run the tasks of this rank and send results to their home ranks."""
        kind: type[Operands] | type[BackwardInputs] = BackwardInputs if self.backward else Operands
        tokens, dispatch = self._pop_stashed(kind)
        self._enter_phase("serve")
        home = split_head_groups(tokens, self.route.groups)
        dispatch = self.forward_keys(home, dispatch)
        self._stashed = self.run_pooled(home, self.run_local(tokens), dispatch)

    def finish(self, kind: type[Results]) -> Results:
        """Wait for the results of this rank's own rows, and return them.

        Gradients of keys may be new tensors in a wider dtype, float32 or float64.
        """
        self._enter_phase("finish")
        results, returned = self._pop_stashed(kind)
        if returned is None:
            return results
        pooled, queries = self.route.pooled, self._returned_queries
        if pooled.relay is not None and len(results) > queries:
            returned = self._send_home(pooled.relay, returned)
        received = self._await_sections(returned, "return")
        clock = get_clock(returned.device)
        begin = clock()
        put_rows(results[:queries], pooled.queries.returned, received[:queries])
        sums = list(map(pooled.add_copies, results[queries:], received[queries:]))
        self.server.meter.span("unpack", begin, clock())
        return type(results)(*results[:queries], *sums)

    def _enter_phase(self, phase: Phase, dtype: torch.dtype | None = None) -> None:
        if self.group.observer is not None:
            self.group.observer.enter_phase(self, phase, dtype)

    def _pop_stashed(self, kind: type[Handed]) -> tuple[Handed, Pending | None]:
        """Return the tensors and the exchange that the previous phase has left for this one.

        `self` drops its references to the tensors, so they are freed even after an exception.
        """
        handed, self._stashed = self._stashed, None
        if handed is None or not isinstance(handed[0], kind):
            raise RuntimeError(
                "a phase of core attention began before the previous phase of the same forward or "
                "backward had ended"
            )
        return handed[0], handed[1]

    def begin_backward(self) -> None:
        """Switch to backward, and discard the outputs that were stored for a recompute."""
        self.backward = True
        self._sent_queries, self._returned_queries = 4, 1
        if self.stored is not None:
            self.stored.discard()

    def forward_keys(
        self, home: Operands | BackwardInputs, dispatch: Pending | None
    ) -> Pending | None:
        """Wait for the dispatch, and forward the keys that this rank relays.

        Return the exchange with the forwarded keys; without relays, return the dispatch. On CUDA a
        side stream waits, so this rank's own tasks, which are launched next, need not wait. `home`
        has one row for each token and head group.
        """
        relay = self.route.pooled.relay
        if relay is None or dispatch is None:
            return dispatch
        with enter_side_stream(self.group.data, dispatch.device) as on_side_stream:
            first = dispatch.transfer
            received = self._await_sections(dispatch, "dispatch", on_side_stream)
            parts = [
                MessagePart(relay.forwarded.assemble(like, sections), relay.keys)
                for sections, like in zip(received[-2:], home[-2:], strict=True)
            ]
            second = self._launch(parts, "relays' dispatch", on_side_stream, dispatches=1)
        second.earlier_sections = received
        if on_side_stream:
            second.earlier_transfer = first
        return second

    def run_local(self, home: Operands | BackwardInputs) -> Outputs | Grads:
        """Run this rank's own tasks, which need no message.

        Return results for all tokens of this rank, with one row for each token and head group.
        """
        pooled, groups = self.route.local_pooled, self.route.groups
        results = self._run(home, self.route.local_tasks)
        if groups > 1:
            results = split_head_groups(results, groups)
        if pooled is None:
            return results
        pools = self._run(
            self._build_pools(pooled, split_head_groups(home, groups), None), pooled.tasks
        )
        queries = self._returned_queries
        put_rows(
            results[:queries], pooled.query_pool.own_copies, [[pool] for pool in pools[:queries]]
        )
        sums = map(pooled.key_pool.add_own, results[queries:], pools[queries:])
        return type(results)(*results[:queries], *sums)

    def run_pooled(
        self, home: Operands | BackwardInputs, results: Results, dispatch: Pending | None
    ) -> tuple[Results, Pending | None]:
        """Run the tasks for which the dispatch brings rows, and send results to other ranks.

        Results of this rank's own rows are written into `results`. If keys are relayed, their
        gradients go to the relays first, and `finish` sends them home.

        Returns:
            This rank's own results, and the exchange under way that returns results to other ranks.
            Gradients of keys may be new tensors in a wider dtype, float32 or float64.
        """
        if dispatch is None:
            return results, None
        pooled, queries = self.route.pooled, self._returned_queries
        relay, own_rows = pooled.relay, pooled.own_rows
        pools = list(self._run(self._build_pools(pooled, home, dispatch), pooled.tasks))
        query_pools, received = pools[:queries], [pool[own_rows:] for pool in pools[:queries]]
        del pools[:queries]
        sums: list[torch.Tensor] = []
        copies: list[torch.Tensor] = []
        wide: list[torch.Tensor] = []
        for total in results[queries:]:
            pool = pools.pop(0)
            sums.append(pooled.key_pool.add_own(total, pool))
            # Gradients of copies travel in the dtype of k and v, but are added in a wider one.
            copies.append(pool.to(home.v_TKV.dtype))
            if relay is not None:
                wide.append(pool if relay.forwarded.rows else copies[-1])
            del pool
        if relay is None or not copies:  # forward returns no gradients of keys
            returned = self._send_back(received, copies)
        else:
            parts = [MessagePart(t.contiguous(), relay.way_back) for t in copies]
            returned = self._launch(parts, "return to relays", returns=1)
            self._relay_buffers = received, wide
        put_rows(results[:queries], pooled.query_pool.own_copies, [[pool] for pool in query_pools])
        return type(results)(*results[:queries], *sums), returned

    def _run(self, pools: Operands | BackwardInputs, tasks: TaskBatch) -> Outputs | Grads:
        """Run tasks. Report errors to the other ranks, which would otherwise wait."""
        try:
            return self.server.run(pools, tasks)
        except Exception:
            with self.group.report_errors(f"computing {self.label}"):
                raise

    def _send_home(self, relay: KeyRelay, returned: Pending) -> Pending:
        """Add up the gradients of keys that this rank forwarded, and send all gradients home.

        The method waits for the gradients of forwarded keys.
        """
        queries, pools = self._relay_buffers
        self._relay_buffers = ([], [])
        keys = []
        for copies in self._await_sections(returned, "return"):
            keys.append(relay.add_copies(pools.pop(0), copies).to(queries[0].dtype))
        return self._send_back(queries, keys)

    def _send_back(
        self, queries: Sequence[torch.Tensor], keys: Sequence[torch.Tensor] = ()
    ) -> Pending:
        """Send the results of received rows back to the ranks that sent these rows.

        `queries` have one row for each received query, and `keys` one row for each row of the key
        pool.
        """
        pooled = self.route.pooled
        parts = [MessagePart(t.contiguous(), pooled.query_pool.way_back) for t in queries]
        parts += [MessagePart(t.contiguous(), pooled.key_pool.way_back) for t in keys]
        return self._launch(parts, "return", returns=1)

    def _launch(
        self,
        parts: Sequence[MessagePart],
        name: str,
        on_side_stream: bool = False,
        **counted: int,
    ) -> Pending:
        """Launch an exchange, and count it as a dispatch or as a return.

        Packing on a side stream is not timed, because it delays no computation.
        """
        clock = float if on_side_stream else get_clock(parts[0].tensor.device)
        purpose = name
        if self.label is not None:
            purpose = f"{name} in {'backward' if self.backward else 'forward'} of {self.label}"
        with show(name):
            begin = clock()
            pending = launch(
                self.group.data, parts, self.route.pooled.layouts, purpose, self.group.node_ranks
            )
            counted["sent_bytes"] = pending.layout.payload
            counted["between_bytes"] = pending.layout.between
            self.server.meter.span("pack", begin, clock(), **counted)
        return pending

    def _await_sections(
        self, pending: Pending, name: str, on_side_stream: bool = False
    ) -> list[list[torch.Tensor]]:
        """Wait for an exchange, and return the received sections."""
        clock = float if on_side_stream else get_clock(pending.device)
        with show(f"wait for {name}"):
            begin = clock()
            received = pending.receive_sections()
            self.server.meter.span("wait", begin, clock())
        return received

    def _build_pools(
        self, pooled: PooledTasks, home: Operands | BackwardInputs, dispatch: Pending | None
    ) -> Operands | BackwardInputs:
        """Build the pools that tasks read.

        If both pools together are exactly one message, the pools are views of this message.
        Otherwise rows are copied, because views would keep whole messages alive.
        """
        received = (
            [[] for _ in home] if dispatch is None else self._await_sections(dispatch, "dispatch")
        )
        if pooled.is_single_message:
            return type(home)(*(section for (section,) in received))
        pools = [pooled.query_pool] * self._sent_queries + [pooled.key_pool] * 2
        return type(home)(*map(Pool.assemble, pools, home, received))
