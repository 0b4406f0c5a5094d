"""The attention function that transformers calls in every layer under the name "distca"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any, NoReturn

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_distca.agreement.documents import PackedDocuments
from hf_distca.borrowed import (
    compiler_of_calls,
    dispatch_modes,
    has_dispatch_modes,
    is_policy_mode,
    leave_uncompiled,
    without_dispatch_modes,
)
from hf_distca.errors import UnsupportedError
from hf_distca.integration.current_session import current_session
from hf_distca.integration.families import FAMILIES, PROVEN_GROUPS
from hf_distca.integration.handle import AttentionHandle, CachedMask, ForeignMask, LayerSetup
from hf_distca.integration.recurrent_rows import RECURRENT_ROWS
from hf_distca.integration.work_planner import WorkPlanner
from hf_distca.kernels import Scores
from hf_distca.runtime.call import Inputs
from hf_distca.schedule.cost import AttentionShape

__all__ = ["distca_attention"]


def _hide_from_compilers(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Hide attention from compilers and checkpointing policies; without either this costs only two
    checks.

    Compiled, the exchanges would be traced with the shapes of one micro-batch: the graph breaks
    here instead.

    Selective checkpointing (a `context_fn` with a policy) numbers the operations of a layer in the
    first forward and finds what it saved by these numbers in the recompute. The recompute of distca
    runs no kernel, no exchange and no planning, so the numbers would shift, and later operations of
    the layer would get each other's results. Nothing is lost: distca keeps its outputs itself.
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


# Keyword arguments that reach attention functions and do not change the maths of causal attention
# within documents: of models, of loaders (the first say where documents start), and of losses
# (those of Liger and TRL among them).
_MODEL_ARGUMENTS = {
    "use_cache",
    "return_dict",
    "output_hidden_states",
    "output_router_logits",
    "logits_to_keep",
    "cache_position",
    "is_causal",
}
_LOADER_ARGUMENTS = {
    "position_ids",
    "cu_seq_lens_q",
    "distca_documents",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
    "mm_token_type_ids",
    "labels",
    "shift_labels",
    RECURRENT_ROWS,
}
_LOSS_ARGUMENTS = {
    "num_items_in_batch",
    "ignore_index",
    "return_token_accuracy",
    "return_predicted_tokens",
    "use_token_scaling",
    "skip_logits",
    "fused_lm_head",
    "accum_dtype",
}
_HARMLESS_ARGUMENTS = _MODEL_ARGUMENTS | _LOADER_ARGUMENTS | _LOSS_ARGUMENTS


@_hide_from_compilers
def distca_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: AttentionHandle | CachedMask | ForeignMask | torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within documents, balanced over the attention group while the module trains.

    Args:
        module: the attention module; ``module.training`` decides whether other ranks take part.
        query, key, value: (batch, heads, length, width); key and value have un-repeated heads for
            GQA.
        attention_mask: the handle made by the mask function.
        scaling: factor on QK^T, ``head_dim ** -0.5`` if None.
        sliding_window: keys that a token sees at most, its own included, unless the mask has a
            window.
        softcap: bound of the scores, as in Gemma 2.
        s_aux: (query heads,) logits of attention sinks, as in gpt-oss; may require a gradient.
        kwargs: ``position_ids``, ``cu_seq_lens_q`` and ``distca_documents`` say where documents
            start; the last given decides.

    Returns:
        (batch, length, query heads, value width) in value's dtype, and None for the weights.
        Padding gets 0.

    Raises:
        UnsupportedError: names the argument that distca would compute wrongly, and a remedy.
    """
    if isinstance(attention_mask, ForeignMask):
        attention_mask.raise_unsupported()
    _check_arguments(module, dropout, kwargs)
    sink_H = None if s_aux is None else _flatten_sink(module, s_aux, query.shape[1])
    if not isinstance(attention_mask, AttentionHandle):
        cached = _check_cached_mask(module, attention_mask, kwargs.get("distca_documents"))
        scores = _make_scores(query, scaling, None, softcap)  # the mask has the window already
        return _attend_to_cache(
            module, Inputs(query, key, value, sink_H=sink_H), cached, scores
        ), None
    handle = attention_mask
    if sliding_window is not None:
        _check_window(module, sliding_window)
    # All else that must be found out or checked is the same in layers that are called with the
    # same.
    autocast = torch.is_autocast_enabled(query.device.type) and torch.get_autocast_dtype(
        query.device.type
    )
    options = (type(module), scaling, sliding_window, softcap, query.device, autocast)
    call = (*options, query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype)
    setup = handle.layer_setups.get(call)
    if setup is None:
        setup = handle.layer_setups[call] = _prepare_layers(
            module, (query, key, value), handle, (scaling, sliding_window, softcap), kwargs
        )
    dtype, token_indices = setup.dtype, setup.work.token_indices
    q_THD = _flatten_tokens(query, dtype, token_indices)
    k_TKD = _flatten_tokens(key, dtype, token_indices)
    v_TKV = _flatten_tokens(value, dtype, token_indices)
    split = handle.split_context
    context = None if split is None else split.pass_keys(setup.work.nano, k_TKD, v_TKV)
    o_THV = setup.compute_attention(module, Inputs(q_THD, k_TKD, v_TKV, sink_H, *(context or ())))
    if o_THV.dtype != value.dtype:
        o_THV = o_THV.to(value.dtype)
    return _restore_batch(o_THV, query, token_indices), None


def _prepare_layers(
    module: torch.nn.Module,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    handle: AttentionHandle,
    options: tuple[float | None, int | None, float | None],
    kwargs: dict[str, Any],
) -> LayerSetup:
    """Prepare the plan and the kernel for the first of several layers that are called alike.

    Args:
        module, handle, kwargs: see `distca_attention`.
        states: query, key and value in transformers' layout.
        options: scaling, sliding window and softcap.
    """
    query, key, value = states
    scaling, window, softcap = options
    _check_states(module, states, handle)
    if getattr(getattr(module, "config", None), "output_attentions", False):
        _raise_for_weights(module)
    session = current_session()
    dtype = _choose_dtype(query, key, value)
    shape = AttentionShape(
        query.shape[1], key.shape[1], query.shape[-1], value.shape[-1], dtype.itemsize
    )
    plan_key = handle.make_key(shape, query.device.type, window)
    work = handle.layer_work.get(plan_key)
    if work is None:
        work = (session.work_provider or WorkPlanner(session)).plan_work(
            handle, kwargs, query.to(dtype), plan_key, training=module.training
        )
    scores = _make_scores(query, scaling, work.window, softcap)
    if (attend := work.stage_attention) is not None:
        return LayerSetup(work, dtype, lambda module, inputs: attend(module, inputs, scores))
    server = session.make_server(work, query.to(dtype), shape, scores)
    return LayerSetup(work, dtype, partial(session.compute_attention, work, server))


def _check_window(module: torch.nn.Module, window: object) -> None:
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise UnsupportedError(
            f"{type(module).__name__} passes sliding_window={window!r}: it must be a whole number"
            " of keys >= 1."
        )


def _make_scores(
    query: torch.Tensor, scaling: float | None, window: int | None, softcap: float | None
) -> Scores:
    return Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, window, softcap)


def _flatten_sink(module: torch.nn.Module, s_aux: torch.Tensor, heads: int) -> torch.Tensor:
    if s_aux.numel() != heads:
        raise UnsupportedError(
            f"{type(module).__name__} passes s_aux of shape {tuple(s_aux.shape)} for {heads} query"
            ' heads: distca has one sink a head. Use attn_implementation="eager".'
        )
    return s_aux.reshape(heads)


def _flatten_tokens(
    states_BHLD: torch.Tensor, dtype: torch.dtype, token_indices: torch.Tensor | None
) -> torch.Tensor:
    """Convert (batch, heads, length, width) to rows of tokens without padding: (tokens, heads,
    width).
    """
    if states_BHLD.dtype != dtype:
        states_BHLD = states_BHLD.to(dtype)
    rows_THD = states_BHLD.transpose(1, 2).flatten(0, 1)
    return rows_THD if token_indices is None else rows_THD.index_select(0, token_indices)


def _restore_batch(
    o_THV: torch.Tensor, query_BHLD: torch.Tensor, token_indices: torch.Tensor | None
) -> torch.Tensor:
    """Convert rows of tokens to (batch, length, heads, width), with 0 for padding."""
    batch, heads, length, _ = query_BHLD.shape
    if token_indices is not None:
        padded_THV = o_THV.new_zeros((batch * length, *o_THV.shape[1:]))
        o_THV = padded_THV.index_copy(0, token_indices, o_THV)
    return o_THV.view(batch, length, heads, -1)


def _choose_dtype(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.dtype:
    """Return the dtype to compute in: that of autocast, else the widest, for models that rotate in
    float32.
    """
    if torch.is_autocast_enabled(query.device.type) and value.dtype != torch.float64:
        return torch.get_autocast_dtype(query.device.type)
    return torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)


def _attend_to_cache(
    module: torch.nn.Module, inputs: Inputs, mask: CachedMask, scores: Scores
) -> torch.Tensor:
    """Attend to cached keys with a dense mask: by sdpa, or by plain operations if scores are capped
    or there is a sink.

    The inputs are in transformers' layout: (batch, heads, length, width).
    """
    dense, (query, key, value, sink_H, *_) = mask.as_subclass(torch.Tensor), inputs
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


def _check_cached_mask(
    module: torch.nn.Module, mask: torch.Tensor | None, documents: object
) -> CachedMask:
    """Check that a mask other than a handle belongs to a batch that is read with a cache, and
    return it.

    Packed documents are refused in such a batch: its cache is full before training, as in prefix
    tuning.
    """
    name = type(module).__name__
    if mask is None:
        raise UnsupportedError(
            f"{name} called distca without the handle of its mask function: the model does not"
            " build its mask with create_causal_mask, so documents and padding are unknown. Use"
            ' attn_implementation="sdpa" for it.'
        )
    if not isinstance(mask, CachedMask):
        raise UnsupportedError(
            f"{name} got a ready-made attention mask of shape {tuple(mask.shape)}; distca takes"
            " documents from position_ids and padding from a 2-D attention_mask. Leave the mask"
            ' out, or use attn_implementation="sdpa".'
        )
    if isinstance(documents, PackedDocuments) and (
        documents.starts is not None or len(documents.lengths) > 1
    ):
        raise UnsupportedError(
            f"{name} has {len(documents.lengths)} packed documents (distca_documents) and a"
            " key/value cache, in which each would see the others. Give the model use_cache=False"
            " and no past_key_values; in place of prefix tuning use another adapter, such as LoRA."
        )
    return mask


def _check_states(
    module: torch.nn.Module, states: Sequence[torch.Tensor], handle: AttentionHandle
) -> None:
    name, (query, key, value) = type(module).__name__, states
    if (
        any(tensor.dim() != 4 for tensor in states)
        or query.shape[::2] != (handle.batch_size, handle.length)
        or (query.shape[0], query.shape[3]) != (key.shape[0], key.shape[3])
        or key.shape[:3] != value.shape[:3]
        or not 0 < key.shape[1] <= query.shape[1]
    ):
        raise UnsupportedError(
            f"{name} got query, key and value of shapes {tuple(query.shape)}, {tuple(key.shape)}"
            f" and {tuple(value.shape)} with the mask of a ({handle.batch_size}, {handle.length})"
            " batch: distca takes (batch, heads, length, width)."
        )
    if query.shape[2] != key.shape[2]:
        raise UnsupportedError(
            f"{name} has {query.shape[2]} query and {key.shape[2]} key positions without a cache."
        )


def _check_arguments(module: torch.nn.Module, dropout: float, kwargs: dict[str, Any]) -> None:
    """Check arguments that may differ between layers that are called alike."""
    if dropout and module.training:
        setting = _find_dropout_setting(getattr(module, "config", None), dropout)
        raise UnsupportedError(
            f"{type(module).__name__} has attention dropout {dropout}: set {setting}=0.0 in the"
            " model's config."
        )
    if kwargs.get("output_attentions"):
        _raise_for_weights(module)
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise UnsupportedError(
            f'{type(module).__name__} is not causal: use attn_implementation="sdpa" for'
            " bidirectional attention."
        )
    if unknown := kwargs.keys() - _HARMLESS_ARGUMENTS:
        _check_unknown_arguments(module, {name: kwargs[name] for name in unknown})


def _raise_for_weights(module: torch.nn.Module) -> NoReturn:
    raise UnsupportedError(
        f"{type(module).__name__} is asked for output_attentions:"
        ' attn_implementation="eager" has weights to return.'
    )


def _check_unknown_arguments(module: torch.nn.Module, arguments: dict[str, Any]) -> None:
    """Raise for arguments that are not known to leave attention unchanged."""
    # What the attention of a proven family passes by itself was seen when it was compared. A switch
    # beside that came with the call of the model, and is for somebody else, such as the loss.
    # Numbers and tensors may change what attention computes.
    proven = (
        FAMILIES.get(getattr(getattr(module, "config", None), "model_type", "")) in PROVEN_GROUPS
    )
    passing = (bool, str, torch.dtype) if proven else ()
    unknown = [
        name
        for name, value in arguments.items()
        if value is not None and value is not False and not isinstance(value, passing)
    ]
    if unknown:
        raise UnsupportedError(
            f"{type(module).__name__} passes {', '.join(sorted(unknown))} to attention, and distca"
            " does not know what that does there. If it is for the loss, keep it out of the call"
            ' of the model. Else use attn_implementation="eager" (or "sdpa", where it knows'
            " the argument)."
        )


def _find_dropout_setting(config: object, dropout: float) -> str:
    """Find the name of attention dropout in a config: `attn_pdrop` in GPT-2,
    `attention_probs_dropout_prob` in BERT.
    """
    values = {} if config is None else vars(config)
    names = [name for name, value in values.items() if "drop" in name and value == dropout]
    return next((name for name in names if "att" in name), [*names, "attention_dropout"][0])
