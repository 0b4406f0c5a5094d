"""Core attention of one layer across ranks, as three autograd functions.

::

    forward    Dispatch: launch q, k, v  ->  Serve: local, wait, arrived, launch o, lse  ->  Return: wait
    backward   Dispatch: wait  <-  Serve: local, wait, arrived, launch dq, dk, dv  <-  Return: launch q, k, v, o, lse, dO

Each launch and its wait are in different functions, so other work can be recorded, forward and backward, while a message
travels; the local tasks always are. Only `_Return` saves for backward, and only what plain flash attention saves: the rank's
own q, k, v, o and lse. Servers keep nothing. The functions are chained by an anchor, a scalar without meaning.

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
from hf_distca.runtime.route import Route
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

    def launch_dispatch(self, queries: Sequence[torch.Tensor], keys: Sequence[torch.Tensor]) -> None:
        self.home = (*queries, *keys)
        parts = [Part(t, self.route.queries) for t in queries] + [Part(t, self.route.keys) for t in keys]
        self.server.meter.count(dispatches=1)
        self.dispatch = self._launch(parts)

    def launch_return(self, queries: Sequence[torch.Tensor], keys: Sequence[torch.Tensor] = ()) -> None:
        parts = [Part(t.contiguous(), self.route.queries.way_back) for t in queries]
        parts += [Part(t.contiguous(), self.route.keys.way_back) for t in keys]
        self.server.meter.count(returns=1)
        self.returned = self._launch(parts)

    def take_dispatch(self) -> list[torch.Tensor]:
        pending, self.dispatch = self.dispatch, None
        return _wait(pending)

    def take_return(self) -> list[torch.Tensor]:
        pending, self.returned = self.returned, None
        return _wait(pending)

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
            call.launch_dispatch([q_THD], [k_TKD, v_TKV])
        return q_THD.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _anchor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        dq_THD, dk_TKD, dv_TKV = call.grads
        _, k_TKD, v_TKV = call.home
        call.grads = call.home = ()
        received_dq, received_dk, received_dv = call.take_return()
        dq_THD.index_copy_(0, _index(call.route.queries.index), received_dq)
        dk_TKD = _sum_copies(dk_TKD, received_dk, call.route)
        dv_TKV = _sum_copies(dv_TKV, received_dv, call.route)
        return None, dq_THD, dk_TKD.to(k_TKD.dtype), dv_TKV.to(v_TKV.dtype)


class _Serve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        if call.kept is not None:
            return anchor.clone()
        route, server = call.route, call.server
        o_THV, lse_TH = server.forward(call.home[0], call.home[1], call.home[2], route.local)
        home, received = server.serve(route, call.home, call.take_dispatch())
        call.launch_return(received)
        for whole, rows in zip((o_THV, lse_TH), home, strict=True):
            whole.index_copy_(0, route.home_queries, rows)
        call.home = (o_THV, lse_TH)
        return anchor.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, anchor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        route, server = call.route, call.server
        do_THV, q_THD, o_THV, lse_TH, k_TKD, v_TKV = call.home
        dq_THD, dk_TKD, dv_TKV = server.backward((do_THV, q_THD, k_TKD, v_TKV, o_THV, lse_TH), route.local)
        home_dq, received_dq, pool_grads = server.serve_backward(route, call.home, call.take_dispatch())
        keys = [route.pool.received_rows(pool).to(k_TKD.dtype) for pool in pool_grads]
        call.launch_return(received_dq, keys)
        dq_THD.index_copy_(0, route.home_queries, home_dq[0])
        dk_TKD, dv_TKV = (_add_home(d, pool, route) for d, pool in zip((dk_TKD, dv_TKV), pool_grads, strict=True))
        call.grads, call.home = (dq_THD, dk_TKD, dv_TKV), (q_THD, k_TKD, v_TKV)
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
            o_THV, lse_TH = call.home
            call.home = ()
            for whole, rows in zip((o_THV, lse_TH), call.take_return(), strict=True):
                whole.index_copy_(0, _index(call.route.queries.index), rows)
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
        ctx.call.launch_dispatch([do_THV.contiguous(), q_THD, o_THV, lse_TH], [k_TKD, v_TKV])
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


def _wait(pending: Pending | None) -> list[torch.Tensor]:
    if pending is None:
        raise RuntimeError("core attention ran backward out of order: its exchange was never launched")
    return pending.wait()


def _index(index: torch.Tensor | None) -> torch.Tensor:
    if index is None:
        raise RuntimeError("a route always names the rows it sends")
    return index


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


def _sum_copies(grad_TKD: torch.Tensor, received_TKD: torch.Tensor, route: Route) -> torch.Tensor:
    """Add the gradients of the copies that other ranks held, rank after rank so that the sum has one order."""
    if not len(received_TKD):
        return grad_TKD
    total = _accumulator(grad_TKD)
    pieces = zip(route.keys.index_per_rank or (), torch.split(received_TKD, list(route.keys.send)), strict=True)
    for index, piece in pieces:
        if len(index):
            total.index_add_(0, index, piece.to(total.dtype))
    return total


def _add_home(grad_TKD: torch.Tensor, pool_TKD: torch.Tensor, route: Route) -> torch.Tensor:
    """Add the gradients of home keys that were read in the pool."""
    if not len(route.pool.home):
        return grad_TKD
    total = _accumulator(grad_TKD)
    return total.index_add_(0, route.pool.from_home, pool_TKD.index_select(0, route.pool.home).to(total.dtype))
