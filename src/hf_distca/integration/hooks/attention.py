"""The attention function that transformers calls in every layer under the name "distca"."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_distca.borrowed import (
    compiler_of_calls,
    dispatch_modes,
    has_dispatch_modes,
    is_policy_mode,
    leave_uncompiled,
    without_dispatch_modes,
)
from hf_distca.errors import UnsupportedError
from hf_distca.integration.checks.attention_arguments import (
    check_arguments,
    check_cached_mask,
    check_layer,
    check_window,
)
from hf_distca.integration.handle import LayerPlan, MaskStandIn
from hf_distca.integration.mask_objects import DenseMask, ForeignMask
from hf_distca.kernels import ScoreOptions
from hf_distca.runtime.call import AttentionServer, Inputs
from hf_distca.schedule.cost import AttentionShape


def _hide_from_compilers(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Hide attention from compilers and checkpointing policies. If no compiler or policy is active,
    this costs only two checks.

    A compiler would trace the exchanges with the shapes of one micro-batch. So the graph breaks
    here.

    Selective checkpointing (a `context_fn` with a policy) numbers the operations of a layer in the
    first forward, and finds saved results by these numbers in the recompute. distca runs no kernel,
    no exchange and no planning in the recompute. So the numbers would shift, and later operations
    of the layer would get wrong results. Hiding attention loses nothing, because distca keeps its
    outputs itself.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend_hidden(*args: Any, **kwargs: Any) -> Any:
        with (
            without_dispatch_modes()
            if any(map(is_policy_mode, dispatch_modes()))
            else nullcontext()
        ):
            return attend(*args, **kwargs)

    @leave_uncompiled
    @wraps(attend)
    def attend_or_hide(*args: Any, **kwargs: Any) -> Any:
        is_seen = compiler_of_calls() is not None or has_dispatch_modes()
        return (attend_hidden if is_seen else attend)(*args, **kwargs)

    return attend_or_hide


@_hide_from_compilers
def distca_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: MaskStandIn | DenseMask | ForeignMask | torch.Tensor | None,
    *,
    scaling: float | torch.Tensor | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within documents, balanced over the attention group in training.

    Args:
        module: the attention module.
        query, key, value: (batch, heads, length, width). With GQA, key and value have fewer heads.
        attention_mask: the handle made by the mask function.
        scaling: factor on QK^T, ``head_dim ** -0.5`` if None. A tensor may have one factor for all
            heads or one for each head, and may require a gradient.
        dropout: probability of dropping weights, which must be 0 in training.
        sliding_window: maximum number of keys that a token sees, its own included. A window of the
            mask takes precedence.
        softcap: bound of the scores, as in Gemma 2.
        s_aux: (query heads,) logits of attention sinks, as in gpt-oss. They may require a gradient.
        kwargs: ``distca_documents``, ``cu_seq_lens_q`` and ``position_ids`` say where documents
            begin. The first of them that is given decides.

    Returns:
        (batch, length, query heads, value width) in value's dtype, and None for the weights.
        The output of padding is 0.

    Raises:
        UnsupportedError: names the argument that distca would compute wrongly, and a remedy.
    """
    if isinstance(attention_mask, ForeignMask):
        raise UnsupportedError(
            f"this model's attention mask uses {attention_mask.features}; distca computes causal"
            " attention, windows, chunks, blocks and whole documents. Other masks, such as block"
            ' diffusion, need a mask inside the kernel. Use attn_implementation="sdpa".'
        )
    check_arguments(module, dropout, kwargs, attention_mask)
    sink_H = None if s_aux is None else _flatten_sink(module, s_aux, query.shape[1])
    if isinstance(scaling, torch.Tensor):
        query, scaling = _scale_queries(module, query, scaling), 1.0
    if not isinstance(attention_mask, MaskStandIn):
        dense = check_cached_mask(module, attention_mask, kwargs.get("distca_documents"))
        inputs = Inputs(query, key, value, sink_H=sink_H)
        # A dense mask already contains the window, so the scores need no window.
        scores = _make_scores(module, query, scaling, None, softcap)
        return _attend_by_mask(module, inputs, dense, scores), None
    batch, nano = attention_mask.batch, attention_mask.nano
    if sliding_window is not None:
        check_window(module, sliding_window)
    # All layers that call attention in the same way share the other checks and the plan.
    autocast = torch.is_autocast_enabled(query.device.type) and torch.get_autocast_dtype(
        query.device.type
    )
    call = (
        *(nano, type(module), scaling, sliding_window, softcap, query.device, autocast),
        *(query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype),
    )
    plan = batch.call_plans.get(call)
    if plan is None:
        plan = batch.call_plans[call] = _prepare_layers(
            module, (query, key, value), attention_mask, (scaling, sliding_window, softcap), kwargs
        )
    dtype, token_indices = plan.dtype, plan.token_indices
    q_THD = _flatten_tokens(query, dtype, token_indices)
    k_TKD = _flatten_tokens(key, dtype, token_indices)
    v_TKV = _flatten_tokens(value, dtype, token_indices)
    cut = batch.nano_batches if nano else None
    context = () if cut is None else cut.pass_keys(nano, k_TKD, v_TKV)
    o_THV = plan.compute_attention(module, Inputs(q_THD, k_TKD, v_TKV, sink_H, *context))
    if o_THV.dtype != value.dtype:
        o_THV = o_THV.to(value.dtype)
    return _restore_batch(o_THV, query, token_indices), None


def _prepare_layers(
    module: torch.nn.Module,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: MaskStandIn,
    options: tuple[float | None, int | None, float | None],
    kwargs: dict[str, Any],
) -> LayerPlan:
    """Check the layer. Prepare the plan and the kernel for all layers that call attention in the
    same way.

    Args:
        module, mask, kwargs: see `distca_attention`.
        states: query, key and value in transformers' layout.
        options: scaling, sliding window and softcap.
    """
    query, key, value = states
    scaling, window, softcap = options
    check_layer(module, states, mask.batch_shape)
    batch = mask.batch
    dtype = _choose_dtype(query, key, value)
    shape = AttentionShape(
        query.shape[1], key.shape[1], query.shape[-1], value.shape[-1], dtype.itemsize
    )
    plan_key = batch.make_key(shape, query.device.type, window, mask.nano)
    query = query.to(dtype)
    plan = batch.plans.get(plan_key)
    if plan is None:
        plan = batch.planner.plan_layers(
            batch, kwargs, query, plan_key, training=batch.is_training(module)
        )
    if plan.stage_attention is not None and batch.context.ahead is not None:
        raise UnsupportedError(
            "tokens of this batch see later tokens (images, a prefix, or is_causal=False), but"
            " pipeline stages compute only causal attention. Train the model without a pipeline."
        )
    scores = _make_scores(module, query, scaling, plan.window, softcap)
    with plan.group.report_errors(f"choosing a kernel for {plan.name}"):
        kernel = batch.planner.session.choose_kernel(query, shape, scores)
    return replace(plan, dtype=dtype, server=AttentionServer(kernel, scores, plan.meter))


def _make_scores(
    module: torch.nn.Module,
    query: torch.Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | torch.Tensor | None,
) -> ScoreOptions:
    if softcap is not None and isinstance(softcap, torch.Tensor):
        raise UnsupportedError(
            f"{type(module).__name__} passes a tensor as softcap, which would get no gradient: give"
            ' a number, or use attn_implementation="eager".'
        )
    return ScoreOptions(query.shape[-1] ** -0.5 if scaling is None else scaling, window, softcap)


def _scale_queries(
    module: torch.nn.Module, query_BHLD: torch.Tensor, scaling: torch.Tensor
) -> torch.Tensor:
    """Scale queries instead of scores, so that a learned scale gets its gradient."""
    heads = query_BHLD.shape[1]
    if scaling.numel() > 1 and scaling.shape not in ((heads, 1, 1), (1, heads, 1, 1)):
        raise UnsupportedError(
            f"{type(module).__name__} passes scaling of shape {tuple(scaling.shape)} for {heads}"
            " query heads: distca takes one number, or one for each head, of shape (heads, 1, 1)."
            ' Use attn_implementation="eager".'
        )
    return (query_BHLD * scaling.reshape(-1, 1, 1)).to(query_BHLD.dtype)


def _flatten_sink(module: torch.nn.Module, s_aux: torch.Tensor, heads: int) -> torch.Tensor:
    if s_aux.numel() != heads:
        raise UnsupportedError(
            f"{type(module).__name__} passes s_aux of shape {tuple(s_aux.shape)} for {heads} query"
            ' heads: distca takes one sink for each head. Use attn_implementation="eager".'
        )
    return s_aux.reshape(heads)


def _flatten_tokens(
    states_BHLD: torch.Tensor, dtype: torch.dtype | None, token_indices: torch.Tensor | None
) -> torch.Tensor:
    """Convert (batch, heads, length, width) to tokens without padding: (tokens, heads, width)."""
    if states_BHLD.dtype != dtype:
        states_BHLD = states_BHLD.to(dtype)
    rows_THD = states_BHLD.transpose(1, 2).flatten(0, 1)
    return rows_THD if token_indices is None else rows_THD.index_select(0, token_indices)


def _restore_batch(
    o_THV: torch.Tensor, query_BHLD: torch.Tensor, token_indices: torch.Tensor | None
) -> torch.Tensor:
    """Convert tokens without padding, (tokens, heads, width), to (batch, length, heads, width). The
    output of padding is 0.
    """
    batch, heads, length, _ = query_BHLD.shape
    if token_indices is not None:
        padded_THV = o_THV.new_zeros((batch * length, *o_THV.shape[1:]))
        o_THV = padded_THV.index_copy(0, token_indices, o_THV)
    return o_THV.view(batch, length, heads, -1)


def _choose_dtype(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.dtype:
    """Return the dtype to compute in: the dtype of autocast, or without autocast the widest dtype
    of query, key and value. These dtypes differ in models that rotate queries and keys in float32.
    """
    if torch.is_autocast_enabled(query.device.type) and value.dtype != torch.float64:
        return torch.get_autocast_dtype(query.device.type)
    return torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)


def _attend_by_mask(
    module: torch.nn.Module, inputs: Inputs, dense: torch.Tensor, scores: ScoreOptions
) -> torch.Tensor:
    """Compute attention with a dense mask, which is used if keys are cached, for example. Plain
    operations compute attention with capped scores or sinks. sdpa computes all other attention.

    The inputs are in transformers' layout: (batch, heads, length, width).
    """
    query, key, value, sink_H, *_ = inputs
    if scores.softcap is None and sink_H is None:
        return sdpa_attention_forward(module, query, key, value, dense, scaling=scores.scale)[0]
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    logits = query @ key.mT * scores.scale
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    logits = logits.masked_fill(~dense, torch.finfo(logits.dtype).min)
    if sink_H is not None:
        logits = torch.cat(
            [logits, sink_H.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], dim=-1
        )
    weights = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))[
        ..., : key.shape[2]
    ]
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous()
