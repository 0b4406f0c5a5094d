"""What the autograd functions of one call of core attention hand on: messages under way and tensors in use.

Everywhere here, *own* is what belongs to this rank's tokens: what it is the home of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch

from hf_distca.borrowed import copy_each
from hf_distca.runtime.exchange import Expected, Landed, Part, Pending, expect, joined, launch, part_of
from hf_distca.runtime.format import Run
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.keys import Passing
from hf_distca.runtime.outputs import LayerOutputs
from hf_distca.runtime.route import Route, Wave
from hf_distca.runtime.server import AttentionServer, Grads, Operands, Outputs, Saved, in_groups

__all__ = ["Call", "Inputs"]

T = TypeVar("T")
# Keys and values, the last parts of a dispatch.
_KEY_PARTS = 2


class Inputs(NamedTuple):
    """What a layer gives.

    Attributes:
        q_THD, k_TKD, v_TKV: this rank's tokens in layout order, T >= 0; k and v un-repeated for GQA.
        context: keys and values of the route's context, in front of k and v; with gradient. Kept as they are, so that context
            which is kept elsewhere anyway takes no memory.
        sink_H: logit of the attention sink of each head; it may require a gradient.
    """

    q_THD: torch.Tensor
    k_TKD: torch.Tensor
    v_TKV: torch.Tensor
    context: tuple[torch.Tensor, torch.Tensor] | None = None
    sink_H: torch.Tensor | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        return [tensor for tensor in (*self[:3], *(self.context or ()), self.sink_H) if tensor is not None]

    @property
    def operands(self) -> Operands:
        """Queries, and keys and values with their context in front."""
        if self.context is None:
            return Operands(self.q_THD, self.k_TKD, self.v_TKV)
        context_k, context_v = self.context
        return Operands(self.q_THD, torch.cat([context_k, self.k_TKD]), torch.cat([context_v, self.v_TKV]))


class Held(Generic[T]):
    """Holds one thing from one autograd function to the next. It is taken once: an exception leaves nothing behind."""

    def __init__(self) -> None:
        self._thing: T | None = None

    def put(self, thing: T) -> None:
        """Hold it."""
        self._thing = thing

    def take(self) -> T:
        """Hand it over."""
        thing, self._thing = self._thing, None
        if thing is None:
            raise RuntimeError("core attention ran out of order: what its next step needs was never made")
        return thing


class Call:
    """One call.

    Attributes:
        route, group, server: this rank's route, the attention group of the route, and what runs the tasks.
        kept: where the outputs are kept for a recompute; None to keep nothing.
        recalled: the outputs in a recompute that finds them there: nothing is launched and no kernel runs.
        operands, outputs, saved, grads: this rank's own. Outputs and gradients are still without those that come back.
        dispatch, returned: the messages under way.
        passed: gradients on the way to relays, with those of rows that this rank received: of queries, and of the key pool.
    """

    def __init__(self, route: Route, group: AttentionGroup, server: AttentionServer, kept: LayerOutputs | None = None) -> None:
        self.route, self.group, self.server, self.kept = route, group, server, kept
        recalled = None if kept is None else kept.take()
        self.recalled = None if recalled is None else Outputs(*recalled)
        self.operands: Held[Operands] = Held()
        self.outputs: Held[Outputs] = Held()
        self.saved: Held[Saved] = Held()
        self.grads: Held[Grads] = Held()
        self.dispatch: Held[Pending | Landed] = Held()
        self.returned: Held[Pending] = Held()
        self.passed: Held[tuple[Pending, torch.Tensor, list[tuple[torch.Tensor, torch.dtype]]]] = Held()
        self._no_keys: list[torch.Tensor] = []
        self._expected: Expected | None = None

    @property
    def exchanges(self) -> bool:
        """Whether any rank moves anything, forward or backward."""
        return self.route.exchanges

    @property
    def last(self) -> Wave:
        """The last wave."""
        return self.route.waves[-1]

    def finish(self, outputs: Outputs) -> Outputs:
        """The outputs as they are, kept for a recompute."""
        if self.kept is not None:
            self.kept.keep(*outputs)
        return outputs

    def recall(self) -> Outputs:
        """Hand over what is recalled."""
        recalled, self.recalled = self.recalled, None
        if recalled is None:
            raise RuntimeError("core attention has no outputs of an earlier forward to recall")
        return Outputs(*(tensor.detach() for tensor in recalled))

    def begin_backward(self) -> None:
        """The outputs of the forward are not needed for a recompute any more."""
        self.server.tracer.backward = True
        if self.group.data is not None:
            self.group.data.begin_backward()
        if self.kept is not None:
            self.kept.drop()

    def launch_dispatch(self, wave: Wave, own: Operands | Saved) -> None:
        """Send rows of this rank's own to the servers of a wave, and be ready for what comes back."""
        parts = [Part(t, wave.queries) for t in own.query_rows] + [Part(t, wave.keys) for t in own.key_rows]
        self.server.meter.count(dispatches=1)
        self.dispatch.put(self._launch(wave, parts, "dispatch"))
        if wave.passing is not None:
            self._no_keys = [t.new_empty((0, *t.shape[1:])) for t in own.key_rows]
        elif not self.route.bounded:
            self._expected = self._expect_return(wave, own)

    def pass_on(self, passing: Passing) -> None:
        """Wait for a dispatch, and send the keys on that this rank is the relay of."""
        came = self.dispatch.take().sections()
        keys = zip(came[-_KEY_PARTS:], self._no_keys, strict=True)
        parts = [Part(_picked(sections, passing, empty), passing.keys) for sections, empty in keys]
        self.server.meter.count(dispatches=1)
        self.dispatch.put(Landed(came, self._launch(self.last, parts, "dispatch", "relays' dispatch")))

    def pass_back(self, passing: Passing) -> None:
        """Wait for gradients of the keys that this rank passed on, add them up, and launch the return."""
        pending, dq_THD, pools = self.passed.take()
        keys = []
        for copies in pending.sections():
            pool_TKD, dtype = pools.pop(0)
            keys.append(_sum_passed(pool_TKD, copies, passing).to(dtype))
            del pool_TKD
        self.launch_return(self.last, [dq_THD], keys)

    def launch_return(self, wave: Wave, queries: Sequence[torch.Tensor], keys: Sequence[torch.Tensor] = ()) -> None:
        """Send what was computed for the rows of other ranks back: rows of received queries, and of the key pool."""
        parts = [Part(t.contiguous(), wave.queries.way_back) for t in queries]
        parts += [Part(t.contiguous(), wave.pool.way_back) for t in keys]
        self.server.meter.count(returns=1)
        expected, self._expected = self._expected, None
        self.returned.put(self._launch(wave, parts, "return", expected=expected))

    def _expect_return(self, wave: Wave, own: Operands | Saved) -> Expected | None:
        """Be ready for the return before this rank computes its own tasks."""
        queries, keys = own.answer_bytes
        parts = [(wave.queries.way_back, size) for size in queries] + [(wave.pool.way_back, size) for size in keys]
        return expect(self.group.data, parts, own.q_THD.device, wave.formats, "return")

    def attend_own(self, own: Operands) -> Outputs:
        """Run this rank's own tasks, which wait for no message. Returns the outputs of all its tokens, in rows of head groups."""
        kept, groups = self.route.kept, self.route.groups
        outputs = in_groups(self.server.forward(own, self.route.own), groups)
        if kept is not None:
            for whole, pool in zip(outputs, self.server.serve(kept, in_groups(own, groups), None), strict=True):
                _put(whole, kept.own_queries, [pool])
        return outputs

    def attend_own_backward(self, own: Saved) -> Grads:
        """As `attend_own`, for gradients. Those of keys may be wide enough for sums."""
        kept, groups = self.route.kept, self.route.groups
        grads = in_groups(self.server.backward(own, self.route.own), groups)
        if kept is None:
            return grads
        dq_THD, *pools = self.server.serve_backward(kept, in_groups(own, groups), None)
        _put(grads.dq_THD, kept.own_queries, [dq_THD])
        return Grads(grads.dq_THD, *(_add_own(total, pool, kept) for total, pool in zip(grads[1:], pools, strict=True)))

    def serve(self, wave: Wave, own: Operands, outputs: Outputs, dispatch: Pending | Landed) -> None:
        """Serve a wave whose dispatch is under way, launch its return, and put rows of this rank's own into `outputs`."""
        pools = self.server.serve(wave, own, dispatch)
        self.launch_return(wave, [pool[wave.own_rows :] for pool in pools])
        for whole, pool in zip(outputs, pools, strict=True):
            _put(whole, wave.own_queries, [pool])

    def land(self, wave: Wave, outputs: Outputs) -> None:
        """Wait for a return and put what came into `outputs`."""
        came = self.returned.take().sections()
        with self.server.tracer.span("unpack"), self.server.meter.exchanging(outputs.o_THV.device):
            for whole, sections in zip(outputs, came, strict=True):
                _put(whole, wave.queries.runs, sections)

    def serve_backward(self, wave: Wave, own: Saved, grads: Grads, dispatch: Pending | Landed) -> Grads:
        """As `serve`, for gradients of this rank's own. Returns them; those of keys may be new ones, wide enough for sums.

        With relays, gradients of keys go to these first, and `pass_back` launches the return.
        """
        dq_THD, *pools = self.server.serve_backward(wave, own, dispatch)
        _put(grads.dq_THD, wave.own_queries, [dq_THD])
        sums: list[torch.Tensor] = []
        keys: list[torch.Tensor] = []
        kept: list[tuple[torch.Tensor, torch.dtype]] = []
        for total, tensor in zip(grads[1:], own.key_rows, strict=True):
            pool = pools.pop(0)
            sums.append(_add_own(total, pool, wave))
            # Copies travel in the dtype of k and v; sums of them do not.
            keys.append(pool.to(tensor.dtype))
            if wave.passing is not None:
                kept.append((pool if wave.passing.size else keys[-1], tensor.dtype))
            del pool
        if wave.passing is None:
            self.launch_return(wave, [dq_THD[wave.own_rows :]], keys)
        else:
            parts = [Part(tensor.contiguous(), wave.passing.way_back) for tensor in keys]
            self.server.meter.count(returns=1)
            self.passed.put((self._launch(wave, parts, "return", "return to relays"), dq_THD[wave.own_rows :], kept))
        return Grads(grads.dq_THD, *sums)

    def land_backward(self, wave: Wave, grads: Grads) -> Grads:
        """As `land`, for gradients of this rank's own. Returns them; those of keys may be new ones, wide enough for sums."""
        came_dq, *copies = self.returned.take().sections()
        with self.server.tracer.span("unpack"), self.server.meter.exchanging(grads.dq_THD.device):
            _put(grads.dq_THD, wave.queries.runs, came_dq)
            sums = (_sum_copies(total, sections, wave) for total, sections in zip(grads[1:], copies, strict=True))
            return Grads(grads.dq_THD, *sums)

    def _launch(
        self, wave: Wave, parts: Sequence[Part], name: str, said: str | None = None, expected: Expected | None = None
    ) -> Pending:
        tracer, meter = self.server.tracer, self.server.meter
        with tracer.span("pack"), meter.exchanging(parts[0].tensor.device):
            pending = launch(self.group.data, parts, wave.formats, said or name, expected)
        meter.count(sent_bytes=pending.sent_bytes)
        pending.watch(tracer, name, meter)
        return pending


def _pieces(runs: Sequence[Run], sections: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The rows of each run, which lie one after another in sections. No run is in two of them."""
    left, rest = iter(sections), 0
    for run in runs:
        if not rest:
            section = next(left)
            rest = len(section)
        yield part_of(section, len(section) - rest, run.rows)
        rest -= run.rows


def _put(whole: torch.Tensor, runs: Sequence[Run], sections: Sequence[torch.Tensor]) -> None:
    """Write the rows in sections where the runs say, by one operation."""
    if runs:
        places = [part_of(whole, *run[1:]) for run in runs]
        copy_each(places, list(_pieces(runs, sections)))


def _picked(sections: Sequence[torch.Tensor], passing: Passing, empty: torch.Tensor) -> torch.Tensor:
    """What is passed on, of the sections of one part."""
    return joined([part_of(sections[at], *run) for at, *run in passing.pieces if at is not None], empty)


def _sum_passed(pool_TKD: torch.Tensor, sections: Sequence[torch.Tensor], passing: Passing) -> torch.Tensor:
    """Add the gradients of the copies that were passed on to a pool's, rank after rank so that the sum has one order."""
    if not passing.size:
        return pool_TKD
    passed = pool_TKD.new_zeros((passing.size, *pool_TKD.shape[1:]), dtype=_accumulator(pool_TKD[:0]).dtype)
    for run, piece in zip(passing.keys.runs, _pieces(passing.keys.runs, sections), strict=True):
        passed.narrow(0, run.start, run.rows).add_(piece)
    total, start = _accumulator(pool_TKD), 0
    for row, rows in passing.rows:
        total.narrow(0, row, rows).add_(passed.narrow(0, start, rows))
        start += rows
    return total


def _accumulator(grad_TKD: torch.Tensor) -> torch.Tensor:
    """Sums of copies are taken in float32, or in float64 for float64 gradients."""
    return grad_TKD if grad_TKD.dtype == torch.float64 else grad_TKD.float()


def _sum_copies(grad_TKD: torch.Tensor, sections: Sequence[torch.Tensor], wave: Wave) -> torch.Tensor:
    """Add the gradients of the copies that other ranks held, rank after rank so that the sum has one order."""
    if not sections:
        return grad_TKD
    total = _accumulator(grad_TKD)
    for run, piece in zip(wave.keys.runs, _pieces(wave.keys.runs, sections), strict=True):
        part_of(total, *run[1:]).add_(piece)
    return total


def _add_own(grad_TKD: torch.Tensor, pool_TKD: torch.Tensor, wave: Wave) -> torch.Tensor:
    """Add the gradients of this rank's own keys that were read in the pool."""
    if not wave.pool.own:
        return grad_TKD
    total = _accumulator(grad_TKD)
    for at, (_, *run) in wave.pool.own:
        own = part_of(total, *run)
        own.add_(pool_TKD.narrow(0, at, len(own)))
    return total
