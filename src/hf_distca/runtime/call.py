"""A call of core attention on one rank: its messages and tasks, forward and backward.

A call has three phases, forward and backward: `begin`, `serve` and `finish`. They consist of these
steps, in this order: `send_queries_and_keys`; `forward_keys`, `run_local` and `run_arrived`, which
sends results back; and `collect`. With `Operands`
they run forward, and results are `Outputs`; with `Saved` they run backward, and results are
`Grads`. Steps that start an exchange return it; the step that waits for it takes it as an argument.

`home` holds the tensors of this rank's own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from hf_distca.borrowed import is_profiling
from hf_distca.kernels.base import (
    Grads,
    Kernel,
    Operands,
    Outputs,
    Saved,
    Scores,
    TaskBatch,
    Tensors,
    get_key_rows,
    get_query_rows,
)
from hf_distca.kernels.flash import leave_room_for_messages
from hf_distca.runtime.empty_rows import make_empty_results, make_empty_saved
from hf_distca.runtime.group import AttentionGroup, Phase
from hf_distca.runtime.messages import (
    MessagePart,
    Pending,
    concat_rows,
    enter_side_stream,
    launch,
    put_rows,
    view_rows,
)
from hf_distca.runtime.meter import Meter, mark_now, start_mark
from hf_distca.runtime.outputs import LayerOutputs
from hf_distca.runtime.route import KeyRelay, Route, Wave

Handed = TypeVar("Handed", bound=Tensors)
Results = TypeVar("Results", bound=Outputs | Grads)


def split_head_groups(tensors: Handed, groups: int) -> Handed:
    """Split each token's row into one row for each head group: views, if the tensors are
    contiguous.
    """
    if groups == 1:
        return tensors
    return _remake(
        tensors,
        (t.contiguous().view(len(t) * groups, t.shape[1] // groups, *t.shape[2:]) for t in tensors),
    )


def merge_head_groups(tensors: Handed, groups: int) -> Handed:
    """Undo `split_head_groups`."""
    if groups == 1:
        return tensors
    return _remake(
        tensors, (t.view(len(t) // groups, t.shape[1] * groups, *t.shape[2:]) for t in tensors)
    )


def _remake(tensors: Handed, others: Iterable[torch.Tensor]) -> Handed:
    """Make the same named tuple of other tensors."""
    return type(tensors)(*others)


class Inputs(NamedTuple):
    """Inputs of a layer's attention.

    Attributes:
        q_THD, k_TKD, v_TKV: this rank's tokens in layout order, T >= 0; k and v un-repeated for
            GQA.
        sink_H: logit of the attention sink of each head; it may require a gradient.
        context_k_TKD, context_v_TKV: keys and values of the route's context, in front of k and v;
            both or none, with gradient. They are saved without a copy, so that context which
            something else keeps anyway takes no memory.
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
        """Queries, and keys and values with their context in front."""
        if self.context_k_TKD is None or self.context_v_TKV is None:
            return Operands(self.q_THD, self.k_TKD, self.v_TKV)
        return Operands(
            self.q_THD,
            torch.cat([self.context_k_TKD, self.k_TKD]),
            torch.cat([self.context_v_TKV, self.v_TKV]),
        )


@dataclass(eq=False)  # not frozen: to make one takes four times as long then
class AttentionServer:
    """A rank in its role of running CA-tasks, with one kernel. Keeps nothing between calls.

    Attributes:
        kernel: the attention kernel.
        scores: scale, window and softcap of the layer.
        meter: where kernel seconds are counted.
        reporting: makes a context manager that reports an exception to the other ranks; entered
            when a kernel raises one.
    """

    kernel: Kernel
    scores: Scores
    meter: Meter
    reporting: Callable[[], AbstractContextManager[None]] = nullcontext

    def run(
        self, pools: Operands | Saved, tasks: TaskBatch, *, beside: bool = False
    ) -> Outputs | Grads:
        """Compute outputs of a batch, or its gradients; zeros in rows that no task covers.

        With `beside` the kernel leaves room for messages.
        """
        device = pools.q_THD.device
        backward = isinstance(pools, Saved)
        mark = start_mark("server") if is_profiling() else None
        self.meter.count(kernel_calls=1, backward_calls=int(backward))
        begin = mark_now(device) if self.meter.timed else None
        kernel = leave_room_for_messages(self.kernel) if beside else self.kernel
        compute: Callable[..., Outputs | Grads] = kernel.backward if backward else kernel.forward
        try:
            # Kernels compute in the dtypes that they are given, and in wider ones: the user's
            # autocast is not for them.
            if torch.is_autocast_enabled(device.type):
                with torch.autocast(device.type, enabled=False):
                    results = compute(pools, tasks, self.scores)
            else:
                results = compute(pools, tasks, self.scores)
        except Exception:
            with self.reporting():
                raise
        if begin is not None:
            self.meter.span("server", begin, mark_now(device))
        if mark is not None:
            mark.__exit__(None, None, None)
        return results


class Call:
    """A call of core attention on one rank.

    Attributes:
        route, group, server: this rank's route, the attention group of the route, and the server
            that runs the tasks.
        stored: where the outputs are kept for a recompute; None to keep nothing.
        recomputed_outputs: stored outputs, in a recompute that finds them: nothing is launched and
            no kernel runs.
        backward: whether backward has begun.
        exchanges: whether any rank moves anything, forward or backward.
    """

    def __init__(
        self,
        route: Route,
        group: AttentionGroup,
        server: AttentionServer,
        stored: LayerOutputs | None = None,
    ) -> None:
        self.route, self.group, self.server, self.stored = route, group, server, stored
        recomputed = None if stored is None else stored.pop()
        self.recomputed_outputs = None if recomputed is None else Outputs(*recomputed)
        self.backward, self._has_rows = False, True
        self.exchanges = route.exchanges
        self._stashed: tuple[Tensors, Pending | None] | None = None
        # Of relays: gradients of received queries; those of the key pool, wide enough for sums, and
        # the dtypes they travel in.
        self._relayed: tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.dtype]]] = [], []

    def begin(self, tokens: Operands | Saved) -> None:
        """Launch the first dispatch, forward or, once that has begun, backward."""
        self._enter_phase("begin", tokens.q_THD.dtype)
        home = split_head_groups(tokens, self.route.groups)
        self._stashed = tokens, self.send_queries_and_keys(self.route.wave, home)

    def begin_without_rows(self, operands: Operands) -> None:
        """Begin on a rank that runs tasks of others only, with `make_empty_operands` of the
        layer.
        """
        self._has_rows = False
        self.begin(make_empty_saved(operands) if self.backward else operands)

    def serve(self) -> None:
        """Run the tasks of this rank, and send their results back."""
        kind: type[Operands] | type[Saved] = Saved if self.backward else Operands
        tokens, dispatch = self._pop_stashed(kind)
        self._enter_phase("serve")
        home = split_head_groups(tokens, self.route.groups)
        dispatch = self.forward_keys(home, dispatch)
        results = self.run_local(tokens) if self._has_rows else make_empty_results(home)
        self._stashed = self.run_arrived(self.route.wave, home, results, dispatch)

    def finish(self, kind: type[Results]) -> Results:
        """Wait for the results of this rank's own rows, and return them."""
        self._enter_phase("finish")
        return self.collect(self.route.wave, *self._pop_stashed(kind))

    def _enter_phase(self, phase: Phase, dtype: torch.dtype | None = None) -> None:
        if self.group.observer is not None:
            self.group.observer.enter_phase(self, phase, dtype)

    def _pop_stashed(self, kind: type[Handed]) -> tuple[Handed, Pending | None]:
        """Return the tensors and the exchange that the previous phase held for this one.

        They are released, so that an exception leaves nothing behind.
        """
        handed, self._stashed = self._stashed, None
        if handed is None or not isinstance(handed[0], kind):
            raise RuntimeError(
                "core attention ran out of order: what its next step needs was never made"
            )
        return handed[0], handed[1]

    def begin_backward(self) -> None:
        """Count exchanges and spans as backward from now on, and drop outputs that only a recompute
        needed.
        """
        self.backward = True
        if self.group.data is not None:
            self.group.data.begin_backward()
        if self.stored is not None:
            self.stored.drop()

    # A pipeline may exchange in one direction only. In the other one there is nothing to launch and
    # nothing to wait for.

    def send_queries_and_keys(self, wave: Wave, home: Operands | Saved) -> Pending | None:
        """Send this rank's own rows to the servers of a wave."""
        if not self.route.exchanges:
            return None
        # Log-sum-exps lie as kernels give them.
        parts = [MessagePart(t.contiguous(), wave.queries) for t in get_query_rows(home)] + [
            MessagePart(t, wave.keys) for t in get_key_rows(home)
        ]
        return self._launch(wave, parts, "dispatch", dispatches=1)

    def forward_keys(self, home: Operands | Saved, dispatch: Pending | None) -> Pending | None:
        """Wait for the dispatch, and forward the keys that this rank relays; without relays return
        the dispatch.

        On CUDA a side stream waits, so that this rank's own tasks, which are launched next, do not.
        `home` has rows of head groups.
        """
        passing = self.route.wave.passing
        if passing is None or dispatch is None:
            return dispatch
        with enter_side_stream(self.group.data, dispatch.device) as beside:
            first = dispatch.transfer
            came = self._await_sections(dispatch, "dispatch", beside)
            parts = [
                MessagePart(passing.copy_forwarded(sections, like), passing.keys)
                for sections, like in zip(
                    came[-len(get_key_rows(home)) :], get_key_rows(home), strict=True
                )
            ]
            second = self._launch(self.route.wave, parts, "relays' dispatch", beside, dispatches=1)
        second.earlier_sections = came
        if beside:
            second.earlier_transfer = first
        return second

    def run_local(self, home: Operands | Saved) -> Outputs | Grads:
        """Run this rank's own tasks, which wait for no message.

        Return results of all its tokens, in rows of head groups.
        """
        wave, groups = self.route.local_wave, self.route.groups
        results = self._run(home, self.route.local_tasks)
        if groups > 1:
            results = split_head_groups(results, groups)
        if wave is None:
            return results
        pools = self._run(
            self._build_pools(wave, split_head_groups(home, groups), None), wave.arrived
        )
        put_rows(
            get_query_rows(results), wave.own_queries, [[pool] for pool in get_query_rows(pools)]
        )
        sums = map(wave.pool.add_own, get_key_rows(results), get_key_rows(pools))
        return _remake(results, [*get_query_rows(results), *sums])

    def run_arrived(
        self, wave: Wave, home: Operands | Saved, results: Results, dispatch: Pending | None
    ) -> tuple[Results, Pending | None]:
        """Run the tasks that a dispatch brings, write this rank's own rows into `results`, and send
        the others back.

        Where keys are relayed, gradients of keys go to the relays first, and `collect` sends all of
        them home.

        Returns:
            This rank's own results, where gradients of keys may be new tensors, wide enough for
            sums; and the return under way.
        """
        if dispatch is None:
            return results, None
        pools = list(self._run(self._build_pools(wave, home, dispatch), wave.arrived))
        passing = wave.passing
        queries = [pools.pop(0) for _ in get_query_rows(results)]
        sums: list[torch.Tensor] = []
        copies: list[torch.Tensor] = []
        wide: list[tuple[torch.Tensor, torch.dtype]] = []
        # Outputs have no rows of keys.
        for total, tensor in zip(get_key_rows(results), get_key_rows(home), strict=False):
            pool = pools.pop(0)
            sums.append(wave.pool.add_own(total, pool))
            # Copies travel in the dtype of k and v; sums of them do not.
            copies.append(pool.to(tensor.dtype))
            if passing is not None:
                wide.append((pool if passing.size else copies[-1], tensor.dtype))
            del pool
        received = [pool[wave.own_rows :] for pool in queries]
        if passing is None or not copies:
            returned = self._send_back(wave, received, copies)
        else:
            parts = [MessagePart(t.contiguous(), passing.way_back) for t in copies]
            returned = self._launch(wave, parts, "return to relays", returns=1)
            self._relayed = received, wide
        put_rows(get_query_rows(results), wave.own_queries, [[pool] for pool in queries])
        return _remake(results, [*get_query_rows(results), *sums]), returned

    def collect(self, wave: Wave, results: Results, returned: Pending | None) -> Results:
        """Wait for a return and write the received rows into `results`.

        Return them; gradients of keys may be new tensors, as above.
        """
        if returned is None:
            return results
        if wave.passing is not None and get_key_rows(results):
            returned = self._send_home(wave, wave.passing, returned)
        came = self._await_sections(returned, "return")
        begin = mark_now(returned.device)
        queries = len(get_query_rows(results))
        put_rows(get_query_rows(results), wave.queries.runs, came[:queries])
        sums = list(map(wave.add_copies, get_key_rows(results), came[queries:]))
        self.server.meter.span("unpack", begin, mark_now(returned.device))
        return _remake(results, [*get_query_rows(results), *sums])

    def _run(self, pools: Operands | Saved, tasks: TaskBatch) -> Outputs | Grads:
        """Run tasks, leaving room for messages if any are under way, of this call or of the other
        nano-batch.
        """
        data = self.group.data
        return self.server.run(pools, tasks, beside=data is not None and data.under_way)

    def _send_home(self, wave: Wave, passing: KeyRelay, returned: Pending) -> Pending:
        """Wait for gradients of the keys that this rank forwarded, add them up, and send all
        gradients to the homes.
        """
        queries, pools = self._relayed
        self._relayed = ([], [])
        keys = []
        for copies in self._await_sections(returned, "return"):
            pool_TKD, dtype = pools.pop(0)
            keys.append(passing.add_copies(pool_TKD, copies).to(dtype))
            del pool_TKD
        return self._send_back(wave, queries, keys)

    def _send_back(
        self, wave: Wave, queries: Sequence[torch.Tensor], keys: Sequence[torch.Tensor] = ()
    ) -> Pending:
        """Send back results for the rows of other ranks: rows of received queries, and of the key
        pool.
        """
        parts = [MessagePart(t.contiguous(), wave.queries.way_back) for t in queries]
        parts += [MessagePart(t.contiguous(), wave.pool.way_back) for t in keys]
        return self._launch(wave, parts, "return", returns=1)

    def _launch(
        self,
        wave: Wave,
        parts: Sequence[MessagePart],
        name: str,
        beside: bool = False,
        **counted: int,
    ) -> Pending:
        """Launch an exchange of this name, `counted` as a dispatch or a return; with `beside`, it
        travels beside what this rank computes.
        """
        mark = start_mark(name) if is_profiling() else None
        begin = mark_now(parts[0].tensor.device)
        pending = launch(self.group.data, parts, wave.formats, name, self.group.is_near)
        if not beside:
            self.server.meter.span("pack", begin, mark_now(pending.device))
        if mark is not None:
            mark.__exit__(None, None, None)
        self.server.meter.count(
            sent_bytes=pending.sent_bytes, between_bytes=pending.between_bytes, **counted
        )
        return pending

    def _await_sections(
        self, pending: Pending, name: str, beside: bool = False
    ) -> list[list[torch.Tensor]]:
        """Wait for an exchange and return its `Pending.receive_sections`; `beside` says that a
        side stream waits.
        """
        mark = start_mark(f"wait for {name}") if is_profiling() else None
        begin = mark_now(pending.device)
        came = pending.receive_sections()
        if not beside:
            self.server.meter.span("wait", begin, mark_now(pending.device))
        if mark is not None:
            mark.__exit__(None, None, None)
        return came

    def _build_pools(
        self, wave: Wave, home: Operands | Saved, dispatch: Pending | None
    ) -> Operands | Saved:
        """Build the pools that a wave's tasks read.

        Rows go from the message straight to their pools, and the message is freed. The pools are
        views only where they are the whole message: a single pool as a view would keep all of the
        message alive.
        """
        received: list[list[torch.Tensor]] = (
            [[] for _ in home] if dispatch is None else self._await_sections(dispatch, "dispatch")
        )
        if wave.is_single_message:
            return _remake(home, [section for (section,) in received])
        cut = len(get_query_rows(home))
        queries = [
            concat_rows(
                [*(view_rows(tensor, *run[1:]) for run in wave.own_queries), *sections], tensor
            )
            for tensor, sections in zip(get_query_rows(home), received[:cut], strict=True)
        ]
        return _remake(
            home, [*queries, *map(wave.pool.assemble, get_key_rows(home), received[cut:])]
        )
