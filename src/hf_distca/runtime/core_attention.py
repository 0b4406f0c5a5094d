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

from hf_distca.runtime.call import Call
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
    context: tuple[torch.Tensor, torch.Tensor] | None = None,
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
        context: keys and values of the route's context, in front of k and v; with gradient. Kept as they are, so that context
            which is kept elsewhere anyway takes no memory.
        sink_H: logit of the attention sink of each head; it may require a gradient.
        outputs: where the layer's outputs are kept for recompute; None to keep nothing.

    Returns:
        o_THV in q's dtype.
    """
    server.meter.count(calls=1)
    q_THD, k_TKD, v_TKV = q_THD.contiguous(), k_TKD.contiguous(), v_TKV.contiguous()
    call = Call(route, group, server, outputs)
    keys = (*(context or (None, None)), k_TKD, v_TKV)
    if not route.exchanges:
        o_THV = _apply(_Local, call, q_THD, *keys, sink_H)
        take_turns()  # to the other half, whose messages have had time to travel
        return o_THV
    # In ping-pong, the other half computes while these messages travel.
    anchor = _apply(_Dispatch, call, q_THD, *keys)
    take_turns()
    anchor = _apply(_Serve, call, anchor)
    take_turns()
    detached = (None if one is None else one.detach() for one in keys)
    return _apply(_Return, call, anchor, q_THD.detach(), *detached, sink_H)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, q_THD: torch.Tensor, *keys: torch.Tensor | None) -> torch.Tensor:
        ctx.call, ctx.context = call, keys[0]
        if call.kept is None:
            k_TKD, v_TKV = _with_context(*keys)
            call.home = (q_THD, k_TKD, v_TKV)
            call.launch_dispatch(call.route.waves[0], [q_THD], [k_TKD, v_TKV])
        return q_THD.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _anchor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        dq_THD, dk_TKD, dv_TKV = call.land_backward(call.last, call.take_grads())
        return None, dq_THD, *_without_context(ctx.context, dk_TKD.to(dq_THD.dtype), dv_TKV.to(dq_THD.dtype))


class _Serve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, anchor: torch.Tensor) -> torch.Tensor:
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
        call: Call = ctx.call
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
        call: Call,
        _anchor: torch.Tensor,
        q_THD: torch.Tensor,
        *keys_and_sink: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.call = call
        *keys, sink_H = keys_and_sink
        if call.kept is None:
            o_THV, lse_TH = call.take_home()
            call.land(call.last, (o_THV, lse_TH))
            o_THV, lse_TH = _finish(call, (o_THV, lse_TH), sink_H)
        else:
            o_THV, lse_TH = (t.detach() for t in call.kept)
            call.kept = None
        ctx.save_for_backward(q_THD, o_THV, lse_TH, sink_H, *keys)
        return o_THV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_THV: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        q_THD, o_THV, lse_TH, sink_H, *keys = ctx.saved_tensors
        call.begin_backward()
        # Without it nobody would take what is launched: only the sinks are trained.
        if ctx.needs_input_grad[1]:
            call.home = (do_THV.contiguous(), q_THD, o_THV, lse_TH, *_with_context(*keys))
            call.launch_dispatch(call.route.waves[0], call.home[:4], call.home[4:])
        d_sink_H = _sink_gradient(do_THV, o_THV, lse_TH, sink_H)
        return None, do_THV.new_zeros(()), None, None, None, None, None, d_sink_H


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        q_THD: torch.Tensor,
        *keys_and_sink: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.call = call
        *keys, sink_H = keys_and_sink
        if call.kept is None:
            o_THV, lse_TH = _finish(call, call.server.forward(q_THD, *_with_context(*keys), call.route.local), sink_H)
        else:
            o_THV, lse_TH = (t.detach() for t in call.kept)
            call.kept = None
        ctx.save_for_backward(q_THD, o_THV, lse_TH, sink_H, *keys)
        return o_THV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_THV: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        q_THD, o_THV, lse_TH, sink_H, *keys = ctx.saved_tensors
        call.begin_backward()
        saved = (do_THV.contiguous(), q_THD, *_with_context(*keys), o_THV, lse_TH)
        dq_THD, dk_TKD, dv_TKV = call.server.backward(saved, call.route.local)
        d_sink_H = _sink_gradient(do_THV, o_THV, lse_TH, sink_H)
        return None, dq_THD, *_without_context(keys[0], dk_TKD.to(q_THD.dtype), dv_TKV.to(q_THD.dtype)), d_sink_H


def _with_context(*keys: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values with their context in front, from (k, v of the context, k, v)."""
    context_k, context_v, k_TKD, v_TKV = keys
    if k_TKD is None or v_TKV is None:
        raise TypeError("k and v are missing")
    if context_k is None or context_v is None:
        return k_TKD, v_TKV
    return torch.cat([context_k, k_TKD]), torch.cat([context_v, v_TKV])


def _without_context(
    context_k: torch.Tensor | None, dk_TKD: torch.Tensor, dv_TKV: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Gradients in the order of `_with_context`."""
    if context_k is None:
        return None, None, dk_TKD, dv_TKV
    tokens = len(context_k)
    return dk_TKD[:tokens], dv_TKV[:tokens], dk_TKD[tokens:], dv_TKV[tokens:]


def _apply(function: type[torch.autograd.Function], *inputs: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*inputs)  # type: ignore[no-untyped-call]
    return result


def _finish(
    call: Call, outputs: tuple[torch.Tensor, torch.Tensor], sink_H: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """o_THV and lse_TH with the sinks merged in, kept for a recompute."""
    o_THV, lse_TH = _with_sink(*outputs, sink_H)
    if call.outputs is not None:
        call.outputs.keep(o_THV, lse_TH)
    return o_THV, lse_TH


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
