"""What the autograd functions of one call of core attention hand on: messages under way and tensors in use."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_distca.runtime.exchange import Part, Pending, launch
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.outputs import LayerOutputs
from hf_distca.runtime.route import Route, Wave
from hf_distca.runtime.server import AttentionServer

__all__ = ["Call"]


class Call:
    """One call. What is taken is handed over: an exception leaves none of it behind."""

    def __init__(self, route: Route, group: AttentionGroup, server: AttentionServer, outputs: LayerOutputs | None) -> None:
        self.route, self.group, self.server, self.outputs = route, group, server, outputs
        # In a recompute the outputs are here already: nothing is launched and no kernel runs.
        self.kept = None if outputs is None else outputs.take()
        self.home: Sequence[torch.Tensor] = ()
        self.grads: Sequence[torch.Tensor] = ()
        self.dispatch: Pending | None = None
        self.returned: Pending | None = None

    @property
    def last(self) -> Wave:
        """The last wave."""
        return self.route.waves[-1]

    def begin_backward(self) -> None:
        """The outputs of the forward are not needed for a recompute any more."""
        self.server.tracer.backward = True
        if self.outputs is not None:
            self.outputs.drop()

    def launch_dispatch(self, wave: Wave, queries: Sequence[torch.Tensor], keys: Sequence[torch.Tensor]) -> None:
        """Send rows of home to the servers of a wave."""
        parts = [Part(t, wave.queries) for t in queries] + [Part(t, wave.keys) for t in keys]
        self.server.meter.count(dispatches=1)
        self.dispatch = self._launch(parts, "dispatch")

    def launch_return(self, wave: Wave, queries: Sequence[torch.Tensor], keys: Sequence[torch.Tensor] = ()) -> None:
        """Send what was computed for other ranks back."""
        parts = [Part(t.contiguous(), wave.queries.way_back) for t in queries]
        parts += [Part(t.contiguous(), wave.keys.way_back) for t in keys]
        self.server.meter.count(returns=1)
        self.returned = self._launch(parts, "return")

    def take_dispatch(self) -> Pending:
        """The dispatch under way."""
        pending, self.dispatch = self.dispatch, None
        return _launched(pending)

    def take_return(self) -> Pending:
        """The return under way."""
        pending, self.returned = self.returned, None
        return _launched(pending)

    def take_home(self) -> Sequence[torch.Tensor]:
        """The rank's own tensors that the next function needs."""
        home, self.home = self.home, ()
        return home

    def take_grads(self) -> Sequence[torch.Tensor]:
        """Gradients of the rank's own tensors, still without those that come back."""
        grads, self.grads = self.grads, ()
        return grads

    def serve(self, wave: Wave, home: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor], dispatch: Pending) -> None:
        """Serve a wave whose dispatch is under way, launch its return, and put rows of home into the outputs."""
        at_home, received = self.server.serve(wave, home, dispatch)
        self.launch_return(wave, received)
        for whole, rows in zip(wholes, at_home, strict=True):
            whole.index_copy_(0, wave.home_queries, rows)

    def land(self, wave: Wave, wholes: Sequence[torch.Tensor]) -> None:
        """Wait for a return and put what came into the outputs."""
        came = self.take_return().sections()
        with self.server.tracer.span("unpack"):
            for whole, sections in zip(wholes, came, strict=True):
                _put(whole, wave, sections)

    def serve_backward(
        self, wave: Wave, home: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], dispatch: Pending
    ) -> list[torch.Tensor]:
        """As `serve` for dq, dk, dv of home. Returns them; those of keys may be new ones, wide enough for sums."""
        dq_THD, *sums = grads
        home_dq, received_dq, pools = self.server.serve_backward(wave, home, dispatch)
        dq_THD.index_copy_(0, wave.home_queries, home_dq[0])
        keys = []
        for place, own in enumerate(home[-2:]):
            pool = pools.pop(0)
            sums[place] = _add_home(sums[place], pool, wave)
            # Copies travel in the dtype of k and v; sums of them do not.
            keys.append(wave.pool.received_rows(pool.to(own.dtype)))
            del pool
        self.launch_return(wave, received_dq, keys)
        return [dq_THD, *sums]

    def land_backward(self, wave: Wave, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """As `land` for dq, dk, dv of home. Returns them; those of keys may be new ones, wide enough for sums."""
        dq_THD, *sums = grads
        came_dq, *copies = self.take_return().sections()
        with self.server.tracer.span("unpack"):
            _put(dq_THD, wave, came_dq)
            return [dq_THD, *(_sum_copies(total, sections, wave) for total, sections in zip(sums, copies, strict=True))]

    def _launch(self, parts: Sequence[Part], name: str) -> Pending:
        self.server.meter.count(sent_bytes=sum(sum(part.rows.send) * part.row_bytes for part in parts))
        tracer = self.server.tracer
        with tracer.span("pack"):
            pending = launch(self.group.data, parts)
        pending.watch(tracer, name)
        return pending


def _launched(pending: Pending | None) -> Pending:
    if pending is None:
        raise RuntimeError("core attention ran backward out of order: its exchange was never launched")
    return pending


def _put(whole: torch.Tensor, wave: Wave, sections: Sequence[torch.Tensor]) -> None:
    """Write the rows that came back where they were sent from; a rank that was sent none sent no section."""
    indices = [index for index in wave.queries.index_per_rank or () if len(index)]
    for index, section in zip(indices, sections, strict=True):
        whole.index_copy_(0, index, section)


def _accumulator(grad_TKD: torch.Tensor) -> torch.Tensor:
    """Sums of copies are taken in float32, or in float64 for float64 gradients."""
    return grad_TKD if grad_TKD.dtype == torch.float64 else grad_TKD.float()


def _sum_copies(grad_TKD: torch.Tensor, sections: Sequence[torch.Tensor], wave: Wave) -> torch.Tensor:
    """Add the gradients of the copies that other ranks held, rank after rank so that the sum has one order."""
    if not sections:
        return grad_TKD
    total = _accumulator(grad_TKD)
    indices = [index for index in wave.keys.index_per_rank or () if len(index)]
    for index, section in zip(indices, sections, strict=True):
        total.index_add_(0, index, section.to(total.dtype))
    return total


def _add_home(grad_TKD: torch.Tensor, pool_TKD: torch.Tensor, wave: Wave) -> torch.Tensor:
    """Add the gradients of home keys that were read in the pool."""
    if not len(wave.pool.home):
        return grad_TKD
    total = _accumulator(grad_TKD)
    return total.index_add_(0, wave.pool.from_home, pool_TKD.index_select(0, wave.pool.home).to(total.dtype))
