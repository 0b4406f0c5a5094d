"""One call of core attention on one rank: what it sends, runs and collects, forward and backward.

The methods are in the order in which a rank comes to them: `send_queries_and_keys`, `run_local`, `run_arrived`, which sends
outputs back, and `collect_outputs`. Backward has the same four. Each that launches an exchange returns it, and the one that waits
for it takes it.

`home` are the tensors of this rank's own tokens, which it is the home of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from hf_distca.kernels.base import Grads, Kernel, Operands, Outputs, Saved, Scores, TaskBatch
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.messages import Part, Pending, launch
from hf_distca.runtime.meter import Mark, Meter, now
from hf_distca.runtime.outputs import LayerOutputs
from hf_distca.runtime.route import KeyRelay, Route, Wave
from hf_distca.runtime.row_runs import joined, put_rows, rows_of

__all__ = ["AttentionServer", "Call", "Inputs", "in_groups", "joined_groups"]

Handed = TypeVar("Handed", Operands, Outputs, Saved, Grads)
_Pools = TypeVar("_Pools", Operands, Saved)
_Results = TypeVar("_Results", Outputs, Grads)
# Keys and values, the last parts of a dispatch.
_KEY_PARTS = 2


def in_groups(tensors: Handed, groups: int) -> Handed:
    """Tensors with so many rows a token, one for each head group: views, if they are contiguous."""
    if groups == 1:
        return tensors
    return type(tensors)(*(t.contiguous().view(len(t) * groups, t.shape[1] // groups, *t.shape[2:]) for t in tensors))


def joined_groups(tensors: Handed, groups: int) -> Handed:
    """What `in_groups` was given."""
    if groups == 1:
        return tensors
    return type(tensors)(*(t.view(len(t) // groups, t.shape[1] * groups, *t.shape[2:]) for t in tensors))


class Inputs(NamedTuple):
    """What a layer gives.

    Attributes:
        q_THD, k_TKD, v_TKV: this rank's tokens in layout order, T >= 0; k and v un-repeated for GQA.
        sink_H: logit of the attention sink of each head; it may require a gradient.
        context_k_TKD, context_v_TKV: keys and values of the route's context, in front of k and v; both or none, with gradient.
            Kept as they are, so that context which is kept elsewhere anyway takes no memory.
    """

    q_THD: torch.Tensor
    k_TKD: torch.Tensor
    v_TKV: torch.Tensor
    sink_H: torch.Tensor | None = None
    context_k_TKD: torch.Tensor | None = None
    context_v_TKV: torch.Tensor | None = None

    @property
    def context_tokens(self) -> int:
        """Tokens of the context."""
        return 0 if self.context_k_TKD is None else len(self.context_k_TKD)

    @property
    def operands(self) -> Operands:
        """Queries, and keys and values with their context in front."""
        if self.context_k_TKD is None or self.context_v_TKV is None:
            return Operands(*self[:3])
        return Operands(self.q_THD, torch.cat([self.context_k_TKD, self.k_TKD]), torch.cat([self.context_v_TKV, self.v_TKV]))


@dataclass(frozen=True, eq=False)
class AttentionServer:
    """A rank in its role of running CA-tasks, with one kernel. Keeps nothing between calls.

    Attributes:
        kernel: the attention kernel.
        scores: scale, window and softcap of the layer.
        meter: where kernel seconds are counted.
        reporting: a context for kernel calls, which tells other ranks of an exception.
    """

    kernel: Kernel
    scores: Scores
    meter: Meter
    reporting: Callable[[], AbstractContextManager[None]] = nullcontext

    def forward(self, pools: Operands, tasks: TaskBatch) -> Outputs:
        """Outputs of a batch; zeros in rows that no task covers."""
        return self._timed(self.kernel.forward, pools, tasks)

    def backward(self, pools: Saved, tasks: TaskBatch) -> Grads:
        """Gradients of a batch."""
        return self._timed(self.kernel.backward, pools, tasks)

    def _timed(self, run: Callable[[_Pools, TaskBatch, Scores], _Results], pools: _Pools, tasks: TaskBatch) -> _Results:
        device, backward = pools.q_THD.device, isinstance(pools, Saved)
        self.meter.count(kernel_calls=1, backward_calls=int(backward))
        begin = now(device)
        # Kernels compute in the dtypes that they are given, and in wider ones: the user's autocast is not for them.
        with self.reporting(), torch.autocast(device.type, enabled=False):
            results = run(pools, tasks, self.scores)
        self.meter.span("server", begin, now(device), backward=backward)
        return results


class Call:
    """One call.

    Attributes:
        route, group, server: this rank's route, the attention group of the route, and what runs the tasks.
        stored: where the outputs are kept for a recompute; None to keep nothing.
        recalled: the outputs in a recompute that finds them there: nothing is launched and no kernel runs.
        backward: whether backward has begun.
    """

    def __init__(self, route: Route, group: AttentionGroup, server: AttentionServer, stored: LayerOutputs | None = None) -> None:
        self.route, self.group, self.server, self.stored = route, group, server, stored
        recalled = None if stored is None else stored.take()
        self.recalled = None if recalled is None else Outputs(*recalled)
        self.backward = False
        self._handed: tuple[Operands | Outputs | Saved | Grads, Pending | None] | None = None
        # Of relays: gradients of received queries; those of the key pool, wide enough for sums, and the dtypes they travel in.
        self._relayed: tuple[torch.Tensor, list[tuple[torch.Tensor, torch.dtype]]] | None = None

    @property
    def exchanges(self) -> bool:
        """Whether any rank moves anything, forward or backward."""
        return self.route.exchanges

    @property
    def last(self) -> Wave:
        """The last wave."""
        return self.route.waves[-1]

    def hand_on(self, tensors: Operands | Outputs | Saved | Grads, pending: Pending | None) -> None:
        """Hold this rank's own tensors and the exchange under way for the next autograd function."""
        self._handed = tensors, pending

    def take(self, kind: type[Handed]) -> tuple[Handed, Pending | None]:
        """What the autograd function before handed on. It is taken once, so that an exception leaves nothing behind."""
        handed, self._handed = self._handed, None
        if handed is None or not isinstance(handed[0], kind):
            raise RuntimeError("core attention ran out of order: what its next step needs was never made")
        return handed[0], handed[1]

    def begin_backward(self) -> None:
        """From now on exchanges and spans are of backward, and a recompute needs no outputs any more."""
        self.backward = True
        if self.group.data is not None:
            self.group.data.begin_backward()
        if self.stored is not None:
            self.stored.drop()

    # A pipeline may exchange in one direction only. In the other one there is nothing to launch and nothing to wait for.

    def send_queries_and_keys(self, wave: Wave, home: Operands | Saved) -> Pending | None:
        """Send rows of this rank's own to the servers of a wave."""
        if not self.route.exchanges:
            return None
        parts = [Part(t, wave.queries) for t in home.query_rows] + [Part(t, wave.keys) for t in home.key_rows]
        return self._launch(wave, parts, "dispatch", dispatches=1)

    def pass_on_keys(self, home: Operands | Saved, dispatch: Pending | None) -> Pending | None:
        """Where keys are relayed, wait for the dispatch and send those on that this rank is the relay of.

        Args:
            home: in rows of head groups.
            dispatch: as `send_queries_and_keys` returned it.
        """
        passing = self.last.passing
        if passing is None or dispatch is None:
            return dispatch
        came = self._arrived(dispatch, "dispatch")
        keys = zip(came[-_KEY_PARTS:], home.key_rows, strict=True)
        parts = [Part(passing.pick(sections, like), passing.keys) for sections, like in keys]
        second = self._launch(self.last, parts, "relays' dispatch", dispatches=1)
        second.before = came
        return second

    def run_local(self, home: Operands) -> Outputs:
        """Run this rank's own tasks, which wait for no message. Returns the outputs of all its tokens, in rows of head groups."""
        wave, groups = self.route.local_wave, self.route.groups
        outputs = in_groups(self.server.forward(home, self.route.own), groups)
        if wave is not None:
            pools = self.server.forward(Operands(*self._pools(wave, in_groups(home, groups), None)), wave.arrived)
            put_rows(outputs, wave.own_queries, [[pool] for pool in pools])
        return outputs

    def run_local_backward(self, home: Saved) -> Grads:
        """As `run_local`, for gradients. Those of keys may be wide enough for sums."""
        wave, groups = self.route.local_wave, self.route.groups
        grads = in_groups(self.server.backward(home, self.route.own), groups)
        if wave is None:
            return grads
        dq_THD, *pools = self.server.backward(Saved(*self._pools(wave, in_groups(home, groups), None)), wave.arrived)
        put_rows(grads[:1], wave.own_queries, [[dq_THD]])
        return Grads(grads.dq_THD, *(wave.pool.add_own(total, pool) for total, pool in zip(grads[1:], pools, strict=True)))

    def run_arrived(self, wave: Wave, home: Operands, outputs: Outputs, dispatch: Pending | None) -> Pending | None:
        """Run the tasks that a dispatch brings, put rows of this rank's own into `outputs`, and send the others back."""
        if dispatch is None:
            return None
        pools = self.server.forward(Operands(*self._pools(wave, home, dispatch)), wave.arrived)
        returned = self._send_back(wave, [pool[wave.own_rows :] for pool in pools])
        put_rows(outputs, wave.own_queries, [[pool] for pool in pools])
        return returned

    def run_arrived_backward(
        self, wave: Wave, home: Saved, grads: Grads, dispatch: Pending | None
    ) -> tuple[Grads, Pending | None]:
        """As `run_arrived`, for gradients. Returns this rank's own, too: those of keys may be new ones, wide enough for sums.

        Where keys are relayed, gradients of keys go to the relays first, and `collect_grads` sends all of them home.
        """
        if dispatch is None:
            return grads, None
        dq_THD, *pools = self.server.backward(Saved(*self._pools(wave, home, dispatch)), wave.arrived)
        put_rows(grads[:1], wave.own_queries, [[dq_THD]])
        received_dq_THD, passing = dq_THD[wave.own_rows :], wave.passing
        sums: list[torch.Tensor] = []
        copies: list[torch.Tensor] = []
        wide: list[tuple[torch.Tensor, torch.dtype]] = []
        for total, tensor in zip(grads[1:], home.key_rows, strict=True):
            pool = pools.pop(0)
            sums.append(wave.pool.add_own(total, pool))
            # Copies travel in the dtype of k and v; sums of them do not.
            copies.append(pool.to(tensor.dtype))
            if passing is not None:
                wide.append((pool if passing.size else copies[-1], tensor.dtype))
            del pool
        if passing is None:
            returned = self._send_back(wave, [received_dq_THD], copies)
        else:
            parts = [Part(t.contiguous(), passing.way_back) for t in copies]
            returned = self._launch(wave, parts, "return to relays", returns=1)
            self._relayed = received_dq_THD, wide
        return Grads(grads.dq_THD, *sums), returned

    def collect_outputs(self, wave: Wave, outputs: Outputs, returned: Pending | None) -> None:
        """Wait for a return and put what came into `outputs`."""
        if returned is None:
            return
        came, begin = self._arrived(returned, "return"), now(returned.device)
        put_rows(outputs, wave.queries.runs, came)
        self._span("unpack", begin, now(returned.device))

    def collect_grads(self, wave: Wave, grads: Grads, returned: Pending | None) -> Grads:
        """As `collect_outputs`, for gradients. Returns this rank's own; those of keys may be new ones, wide enough for sums."""
        if returned is None:
            return grads
        if wave.passing is not None:
            returned = self._send_home(wave, wave.passing, returned)
        (came_dq, *copies), begin = self._arrived(returned, "return"), now(returned.device)
        put_rows(grads[:1], wave.queries.runs, [came_dq])
        sums = [wave.add_copies(total, sections) for total, sections in zip(grads[1:], copies, strict=True)]
        self._span("unpack", begin, now(returned.device))
        return Grads(grads.dq_THD, *sums)

    def _send_home(self, wave: Wave, passing: KeyRelay, returned: Pending) -> Pending:
        """Wait for gradients of the keys that this rank passed on, add them up, and send all gradients to the homes."""
        relayed, self._relayed = self._relayed, None
        if relayed is None:
            raise RuntimeError("core attention ran out of order: a relay has no gradients of its own pool")
        dq_THD, pools = relayed
        keys = []
        for copies in self._arrived(returned, "return"):
            pool_TKD, dtype = pools.pop(0)
            keys.append(passing.add_copies(pool_TKD, copies).to(dtype))
            del pool_TKD
        return self._send_back(wave, [dq_THD], keys)

    def _send_back(self, wave: Wave, queries: Sequence[torch.Tensor], keys: Sequence[torch.Tensor] = ()) -> Pending:
        """Send what was computed for the rows of other ranks back: rows of received queries, and of the key pool."""
        parts = [Part(t.contiguous(), wave.queries.way_back) for t in queries]
        parts += [Part(t.contiguous(), wave.pool.way_back) for t in keys]
        return self._launch(wave, parts, "return", returns=1)

    def _launch(self, wave: Wave, parts: Sequence[Part], name: str, **counted: int) -> Pending:
        """Launch an exchange of this name, which is `counted` as a dispatch or a return."""
        begin = now(parts[0].tensor.device)
        pending = launch(self.group.data, parts, wave.formats, name)
        pending.launched = now(pending.device)
        self._span("pack", begin, pending.launched)
        self.server.meter.count(sent_bytes=pending.sent_bytes, **counted)
        return pending

    def _arrived(self, pending: Pending, name: str) -> list[list[torch.Tensor]]:
        """Wait for an exchange. Returns its sections, as `Pending.sections`."""
        begin = now(pending.device)
        came = pending.sections()
        end = now(pending.device)
        self._span("wait", begin, end)
        self._span(name, pending.launched, end)
        return came

    def _span(self, name: str, begin: Mark, end: Mark) -> None:
        self.server.meter.span(name, begin, end, backward=self.backward)

    def _pools(self, wave: Wave, home: Operands | Saved, dispatch: Pending | None) -> list[torch.Tensor]:
        """Pools of what a wave's tasks read.

        Rows go from the message straight to their pools, and the message is freed. Only where the pools are the whole message, as
        it lies, are they views of it: one pool alone that is a view would keep all of the message.
        """
        received: list[list[torch.Tensor]] = [[] for _ in home] if dispatch is None else self._arrived(dispatch, "dispatch")
        if wave.as_received:
            return [section for (section,) in received]
        cut = len(home.query_rows)
        queries = [
            joined([*(rows_of(tensor, *run[1:]) for run in wave.own_queries), *sections], tensor)
            for tensor, sections in zip(home.query_rows, received[:cut], strict=True)
        ]
        keys = zip(home.key_rows, received[cut:], strict=True)
        return queries + [wave.pool.assemble(tensor, sections) for tensor, sections in keys]
