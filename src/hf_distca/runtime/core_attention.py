"""Core attention of one layer across ranks, as three autograd functions.

::

    forward    Dispatch: launch q, k, v  ->  Serve: local, wait, arrived, launch o, lse  ->  Return: wait
    backward   Dispatch: wait  <-  Serve: local, wait, arrived, launch dq, dk, dv  <-  Return: launch q, k, v, o, lse, dO

Each launch and its wait are in different functions, so other work can be recorded, forward and backward, while a message
travels; the local tasks always are. A route of several waves repeats what follows the local tasks inside Serve: all returns but
the last are waited for, and all dispatches but the first are launched there, so that one wave at a time is here.

Only `_Return` saves for backward, and only what plain flash attention saves: the rank's own q, k, v, o and lse. Servers keep
nothing: what was received never outlives the call. What one function hands to the next is taken before it is used, so that an
exception leaves none of it behind. The functions are chained by an anchor, a scalar without meaning.

Attention sinks (a learned logit per head that takes weight and gives no value, as in gpt-oss) are merged at home, after the
outputs came back: lse' = log(exp(lse) + exp(sink)), o' = o exp(lse - lse'). Backward with o' and lse' is then exact for q, k and
v, and d sink = -sum over rows of exp(sink - lse') rowsum(dO o'). So every kernel has them, and servers know nothing of it.

Shape suffixes: T tokens, H query heads, K key/value heads, D head dim, V value head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hf_distca.runtime.exchange import Part, Pending, launch
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.outputs import LayerOutputs
from hf_distca.runtime.pingpong import take_turns
from hf_distca.runtime.route import Route, Wave
from hf_distca.runtime.server import AttentionServer

__all__ = ["core_attention"]


def core_attention(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKV: torch.Tensor,
    *,
    route: Route,
    group: AttentionGroup,
    server: AttentionServer,
    sink_H: torch.Tensor | None = None,
    outputs: LayerOutputs | None = None,
) -> torch.Tensor:
    """Causal attention within documents, for the tokens of this rank, computed where the route says.

    Every rank of `group` must call it with routes of the same plan, the same number of times in the same order, forward and
    backward. A route without exchanges is a plain local call.

    Args:
        q_THD, k_TKD, v_TKV: this rank's tokens in layout order, T >= 0; k and v un-repeated for GQA.
        route: this rank's route.
        group: the attention group of the route.
        server: kernel, scores and meter.
        sink_H: logit of the attention sink of each head; it may require a gradient.
        outputs: where the layer's outputs are kept for recompute; None to keep nothing.

    Returns:
        o_THV in q's dtype.
    """
    server.meter.count(calls=1)
    q_THD, k_TKD, v_TKV = q_THD.contiguous(), k_TKD.contiguous(), v_TKV.contiguous()
    call = _Call(route, group, server, outputs)
    if not route.exchanges:
        o_THV = _apply(_Local, call, q_THD, k_TKD, v_TKV, sink_H)
        take_turns()  # to the other half, whose messages have had time to travel
        return o_THV
    # In ping-pong, the other half computes while these messages travel.
    anchor = _apply(_Dispatch, call, q_THD, k_TKD, v_TKV)
    take_turns()
    anchor = _apply(_Serve, call, anchor)
    take_turns()
    return _apply(_Return, call, anchor, q_THD.detach(), k_TKD.detach(), v_TKV.detach(), sink_H)


class _Call:
    """What the three functions of one call hand on: exchanges under way and home tensors in use."""

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
        return self.route.waves[-1]

    def launch_dispatch(self, wave: Wave, queries: Sequence[torch.Tensor], keys: Sequence[torch.Tensor]) -> None:
        parts = [Part(t, wave.queries) for t in queries] + [Part(t, wave.keys) for t in keys]
        self.server.meter.count(dispatches=1)
        self.dispatch = self._launch(parts)

    def launch_return(self, wave: Wave, queries: Sequence[torch.Tensor], keys: Sequence[torch.Tensor] = ()) -> None:
        parts = [Part(t.contiguous(), wave.queries.way_back) for t in queries]
        parts += [Part(t.contiguous(), wave.keys.way_back) for t in keys]
        self.server.meter.count(returns=1)
        self.returned = self._launch(parts)

    def take_dispatch(self) -> Pending:
        pending, self.dispatch = self.dispatch, None
        return _launched(pending)

    def take_return(self) -> Pending:
        pending, self.returned = self.returned, None
        return _launched(pending)

    def take_home(self) -> Sequence[torch.Tensor]:
        home, self.home = self.home, ()
        return home

    def take_grads(self) -> Sequence[torch.Tensor]:
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
        for whole, sections in zip(wholes, self.take_return().sections(), strict=True):
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
        _put(dq_THD, wave, came_dq)
        return [dq_THD, *(_sum_copies(total, sections, wave) for total, sections in zip(sums, copies, strict=True))]

    def finish(
        self, outputs: tuple[torch.Tensor, torch.Tensor], sink_H: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """o_THV and lse_TH with the sinks merged in, kept for a recompute."""
        o_THV, lse_TH = _with_sink(*outputs, sink_H)
        if self.outputs is not None:
            self.outputs.keep(o_THV, lse_TH)
        return o_THV, lse_TH

    def _launch(self, parts: Sequence[Part]) -> Pending:
        self.server.meter.count(sent_bytes=sum(sum(part.rows.send) * part.row_bytes for part in parts))
        return launch(self.group.data, parts)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKV: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        if call.kept is None:
            call.home = (q_THD, k_TKD, v_TKV)
            call.launch_dispatch(call.route.waves[0], [q_THD], [k_TKD, v_TKV])
        return q_THD.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _anchor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        dq_THD, dk_TKD, dv_TKV = call.land_backward(call.last, call.take_grads())
        return None, dq_THD, dk_TKD.to(dq_THD.dtype), dv_TKV.to(dq_THD.dtype)


class _Serve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        if call.kept is not None:
            return anchor.clone()
        route, server = call.route, call.server
        q_THD, k_TKD, v_TKV = home = call.take_home()
        dispatch = call.take_dispatch()
        outputs = server.forward(q_THD, k_TKD, v_TKV, route.local)
        for before, wave in zip((None, *route.waves), route.waves, strict=False):
            if before is not None:
                call.land(before, outputs)
                call.launch_dispatch(wave, [q_THD], [k_TKD, v_TKV])
                dispatch = call.take_dispatch()
            call.serve(wave, home, outputs, dispatch)
        call.home = outputs
        return anchor.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, anchor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        route, server = call.route, call.server
        do_THV, q_THD, o_THV, lse_TH, k_TKD, v_TKV = home = call.take_home()
        dispatch = call.take_dispatch()
        grads: Sequence[torch.Tensor] = server.backward((do_THV, q_THD, k_TKD, v_TKV, o_THV, lse_TH), route.local)
        for before, wave in zip((None, *route.waves), route.waves, strict=False):
            if before is not None:
                grads = call.land_backward(before, grads)
                call.launch_dispatch(wave, home[:4], home[4:])
                dispatch = call.take_dispatch()
            grads = call.serve_backward(wave, home, grads, dispatch)
        call.grads = grads
        return None, torch.zeros_like(anchor)


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        _anchor: torch.Tensor,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKV: torch.Tensor,
        sink_H: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.call = call
        if call.kept is None:
            o_THV, lse_TH = call.take_home()
            call.land(call.last, (o_THV, lse_TH))
            o_THV, lse_TH = call.finish((o_THV, lse_TH), sink_H)
        else:
            o_THV, lse_TH = (t.detach() for t in call.kept)
            call.kept = None
        ctx.save_for_backward(q_THD, k_TKD, v_TKV, o_THV, lse_TH, sink_H)
        return o_THV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_THV: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_THD, k_TKD, v_TKV, o_THV, lse_TH, sink_H = ctx.saved_tensors
        if ctx.call.outputs is not None:
            ctx.call.outputs.drop()
        # Without it nobody would take what is launched: only the sinks are trained.
        if ctx.needs_input_grad[1]:
            call: _Call = ctx.call
            call.home = (do_THV.contiguous(), q_THD, o_THV, lse_TH, k_TKD, v_TKV)
            call.launch_dispatch(call.route.waves[0], call.home[:4], call.home[4:])
        return None, do_THV.new_zeros(()), None, None, None, _sink_gradient(do_THV, o_THV, lse_TH, sink_H)


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKV: torch.Tensor,
        sink_H: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.call = call
        if call.kept is None:
            o_THV, lse_TH = call.finish(call.server.forward(q_THD, k_TKD, v_TKV, call.route.local), sink_H)
        else:
            o_THV, lse_TH = (t.detach() for t in call.kept)
            call.kept = None
        ctx.save_for_backward(q_THD, k_TKD, v_TKV, o_THV, lse_TH, sink_H)
        return o_THV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_THV: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        q_THD, k_TKD, v_TKV, o_THV, lse_TH, sink_H = ctx.saved_tensors
        if call.outputs is not None:
            call.outputs.drop()
        saved = (do_THV.contiguous(), q_THD, k_TKD, v_TKV, o_THV, lse_TH)
        dq_THD, dk_TKD, dv_TKV = call.server.backward(saved, call.route.local)
        d_sink_H = _sink_gradient(do_THV, o_THV, lse_TH, sink_H)
        return None, dq_THD, dk_TKD.to(k_TKD.dtype), dv_TKV.to(v_TKV.dtype), d_sink_H


def _apply(function: type[torch.autograd.Function], *inputs: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*inputs)  # type: ignore[no-untyped-call]
    return result


def _launched(pending: Pending | None) -> Pending:
    if pending is None:
        raise RuntimeError("core attention ran backward out of order: its exchange was never launched")
    return pending


def _put(whole: torch.Tensor, wave: Wave, sections: Sequence[torch.Tensor]) -> None:
    """Write the rows that came back where they were sent from; a rank that was sent none sent no section."""
    indices = [index for index in wave.queries.index_per_rank or () if len(index)]
    for index, section in zip(indices, sections, strict=True):
        whole.index_copy_(0, index, section)


def _with_sink(o_THV: torch.Tensor, lse_TH: torch.Tensor, sink_H: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp with the weight of the sinks taken away."""
    if sink_H is None:
        return o_THV, lse_TH
    merged_TH = torch.logaddexp(lse_TH, sink_H.to(lse_TH.dtype))
    return (o_THV * (lse_TH - merged_TH).exp().unsqueeze(-1)).to(o_THV.dtype), merged_TH


def _sink_gradient(
    do_THV: torch.Tensor, o_THV: torch.Tensor, lse_TH: torch.Tensor, sink_H: torch.Tensor | None
) -> torch.Tensor | None:
    if sink_H is None:
        return None
    weight_TH = (sink_H.to(lse_TH.dtype) - lse_TH).exp()
    delta_TH = (do_THV.to(lse_TH.dtype) * o_THV).sum(-1)
    return -(weight_TH * delta_TH).sum(0).to(sink_H.dtype)


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
