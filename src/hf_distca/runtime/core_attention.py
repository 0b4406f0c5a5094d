"""Core attention of one layer across ranks, as three autograd functions.

::

    forward    Dispatch   launch q, k, v
               Serve      own, wait, arrived, launch o, lse
               Return     wait
    backward   Return     launch dO, q, o, lse, k, v
               Serve      own, wait, arrived, launch dq, dk, dv
               Dispatch   wait

In the table, "own" means to run own tasks, and "arrived" means to run arrived tasks (see `route`).

Each launch and its wait are in different functions, so other work can run between them, in forward
and in backward. The rank's own tasks always run between them.

If keys are relayed, there are two more exchanges. `_Serve` forwards the keys before it runs its own
tasks, and in backward `_Dispatch` sends the gradients of relayed keys home. Each of these exchanges
is launched and waited for in the same function.

Only `_Return` saves tensors for backward. It saves what plain flash attention saves: the rank's own
q, k, v, o and lse. Servers keep no received tensor after the call. Tensors that one function leaves
for the next one are freed even after an exception. An anchor, a scalar without meaning, links the
functions in the autograd graph.

An attention sink is a learned logit per head that takes weight and has no value, as in gpt-oss. The
home rank merges it after the outputs have returned: lse' = log(exp(lse) + exp(sink)), o' = o
exp(lse - lse'). Backward with o' and lse' is then exact for q, k and v, and d sink = -sum over rows
of exp(sink - lse') rowsum(dO o'). Sinks therefore work with every kernel, and servers do not handle
them.

Shape suffixes: T tokens, H query heads, K key/value heads, D head dim, V value head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hf_distca.errors import UnsupportedError
from hf_distca.kernels.base import BackwardInputs, Grads, Outputs
from hf_distca.runtime.call import Inputs, LayerExchange, merge_head_groups
from hf_distca.runtime.pingpong import yield_to_other_nano_batch

_Optional = torch.Tensor | None
_Backward = Callable[..., tuple[_Optional, ...]]


def _forbid_second_derivative(backward: _Backward) -> _Backward:
    """Apply torch's `once_differentiable` only if backward itself is recorded for autograd."""
    recorded: _Backward = once_differentiable(backward)

    @wraps(backward)
    def call(ctx: Any, *grads: Any) -> tuple[_Optional, ...]:
        return recorded(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return call


def compute_core_attention(inputs: Inputs, exchange: LayerExchange) -> torch.Tensor:
    """Compute causal attention within documents for this rank's tokens, on the route's servers.

    Every rank of the group must make the same calls in the same order, with routes of the same
    plan. If the route exchanges nothing, this is a plain call of the kernel.

    Returns:
        o_THV in q's dtype.

    Raises:
        UnsupportedError: if a CUDA graph is captured.
    """
    if inputs.q_THD.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "core attention cannot run while a CUDA graph is captured, because a replay would use"
            " the plan of this batch for every batch. Capture only code between attention layers."
        )
    counter = "calls" if exchange.recomputed_outputs is None else "recomputed_calls"
    exchange.server.meter.count(**{counter: 1})
    if not exchange.exchanges:
        o_THV = _apply(_Return, exchange, None, *inputs)
        # Let the other nano-batch continue, because its messages have had time to travel.
        yield_to_other_nano_batch()
        return o_THV
    # Messages are packed as runs of bytes, so the tensors must be contiguous.
    q_THD, k_TKD, v_TKV, sink_H, *context = inputs
    rows = q_THD.contiguous(), k_TKD.contiguous(), v_TKV.contiguous()
    # In ping-pong, the other nano-batch computes while the messages of this one travel.
    anchor = _apply(_Dispatch, exchange, *rows, None, *context)
    yield_to_other_nano_batch()
    anchor = _apply(_Serve, exchange, anchor)
    yield_to_other_nano_batch()
    # `_Return` saves q, k and v for backward, but their gradients come from `_Dispatch`.
    saved = [None if t is None else t.detach() for t in (*rows, *context)]
    return _apply(_Return, exchange, anchor, *saved[:3], sink_H, *saved[3:])


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: LayerExchange, *tensors: Any) -> torch.Tensor:
        inputs = Inputs(*tensors)
        ctx.exchange, ctx.context_tokens = exchange, inputs.context_tokens
        if exchange.recomputed_outputs is None:
            exchange.begin(inputs.operands)
        return inputs.q_THD.new_zeros(())

    @staticmethod
    @_forbid_second_derivative
    def backward(ctx: Any, _anchor: torch.Tensor) -> tuple[_Optional, ...]:
        exchange: LayerExchange = ctx.exchange
        grads = merge_head_groups(exchange.finish(Grads), exchange.route.groups)
        return None, *_split_gradients(grads, ctx.context_tokens)


class _Serve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: LayerExchange, anchor: torch.Tensor) -> torch.Tensor:
        ctx.exchange = exchange
        if exchange.recomputed_outputs is None:
            exchange.serve()
        return anchor.clone()

    @staticmethod
    @_forbid_second_derivative
    def backward(ctx: Any, anchor: torch.Tensor) -> tuple[_Optional, ...]:
        ctx.exchange.serve()
        return None, torch.zeros_like(anchor)


class _Return(torch.autograd.Function):
    """The last function, which returns the outputs.

    If the route exchanges nothing, it is the only function, and there is no anchor.
    """

    @staticmethod
    def forward(
        ctx: Any, exchange: LayerExchange, _anchor: _Optional, *tensors: Any
    ) -> torch.Tensor:
        inputs = Inputs(*tensors)
        outputs: tuple[torch.Tensor, ...]
        if exchange.recomputed_outputs is None:
            results = (
                exchange.finish(Outputs)
                if exchange.exchanges
                else exchange.run_local(inputs.operands)
            )
            outputs = merge_head_groups(results, exchange.route.groups)
            if inputs.sink_H is not None:
                outputs = _merge_sink(outputs, inputs.sink_H)
            if exchange.stored is not None:
                exchange.stored.store_outputs(*outputs)
        else:
            outputs = tuple(tensor.detach() for tensor in exchange.recomputed_outputs)
            exchange.recomputed_outputs = None
        ctx.exchange = exchange
        ctx.save_for_backward(*inputs, *outputs)
        return outputs[0]

    @staticmethod
    @_forbid_second_derivative
    def backward(ctx: Any, do_THV: torch.Tensor) -> tuple[_Optional, ...]:
        *tensors, o_THV, lse_TH = ctx.saved_tensors
        exchange, inputs = ctx.exchange, Inputs(*tensors)
        exchange.begin_backward()
        q_THD, k_TKD, v_TKV = inputs.operands
        # The saved o and lse include the sinks.
        saved = BackwardInputs(do_THV.contiguous(), q_THD, o_THV, lse_TH, k_TKD, v_TKV)
        if not exchange.exchanges:
            grads = merge_head_groups(exchange.run_local(saved), exchange.route.groups)
            d_sink_H = _compute_sink_gradient(saved, inputs.sink_H)
            return None, None, *_split_gradients(grads, inputs.context_tokens, d_sink_H)
        # If only sinks are trained, q, k and v need no gradient. Then `_Serve.backward` never runs,
        # and no code would wait for a dispatch.
        if ctx.needs_input_grad[1]:
            exchange.begin(saved)
        d_sink_H = _compute_sink_gradient(saved, inputs.sink_H)
        return None, do_THV.new_zeros(()), None, None, None, d_sink_H, None, None


def _split_gradients(
    grads: Sequence[torch.Tensor], context: int, d_sink_H: _Optional = None
) -> tuple[_Optional, ...]:
    """Return gradients in the order of `Inputs`. The first `context` keys belong to the context."""
    dq_THD, dk_TKD, dv_TKV = grads
    if dq_THD.dtype != dk_TKD.dtype or dq_THD.dtype != dv_TKV.dtype:  # summed in float32
        dk_TKD, dv_TKV = dk_TKD.to(dq_THD.dtype), dv_TKV.to(dq_THD.dtype)
    if not context:
        return dq_THD, dk_TKD, dv_TKV, d_sink_H, None, None
    return dq_THD, dk_TKD[context:], dv_TKV[context:], d_sink_H, dk_TKD[:context], dv_TKV[:context]


def _apply(function: type[torch.autograd.Function], *inputs: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*inputs)  # type: ignore[no-untyped-call]
    return result


def _merge_sink(outputs: tuple[torch.Tensor, ...], sink_H: torch.Tensor) -> Outputs:
    """Include the sinks in the softmax of the outputs and in the log-sum-exps."""
    o_THV, lse_TH = outputs
    merged_TH = torch.logaddexp(lse_TH, sink_H.to(lse_TH.dtype))
    return Outputs((o_THV * (lse_TH - merged_TH).exp().unsqueeze(-1)).to(o_THV.dtype), merged_TH)


def _compute_sink_gradient(saved: BackwardInputs, sink_H: _Optional) -> _Optional:
    if sink_H is None:
        return None
    weight_TH = (sink_H.to(saved.lse_TH.dtype) - saved.lse_TH).exp()
    delta_TH = (saved.do_THV.to(saved.lse_TH.dtype) * saved.o_THV).sum(-1)
    return -(weight_TH * delta_TH).sum(0).to(sink_H.dtype)
