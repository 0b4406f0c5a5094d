"""The attention function that transformers calls in every layer under the name "distca"."""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_distca.errors import UnsupportedError
from hf_distca.integration.documents import PackedDocuments, read_documents
from hf_distca.integration.handle import AttentionHandle, CachedMask, Work
from hf_distca.integration.session import Session, current_session

__all__ = ["distca_attention"]

# Keyword arguments that reach attention functions and do not change the maths of causal attention within documents.
_HARMLESS = frozenset(
    {
        "use_cache",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "seq_idx",
        "num_items_in_batch",
        "output_router_logits",
        "output_hidden_states",
        "return_dict",
        "logits_to_keep",
        "cache_position",
        "is_causal",
    }
)


def distca_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: AttentionHandle | CachedMask | torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    distca_documents: PackedDocuments | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within documents, balanced over the attention group while the module trains.

    Args:
        module: the attention module; ``module.training`` decides whether other ranks take part.
        query, key, value: (batch, heads, length, width), key and value with un-repeated heads for GQA.
        attention_mask: the handle made by the mask function.
        scaling: factor on QK^T, ``head_dim ** -0.5`` if None.
        sliding_window: refused unless no document is longer.
        position_ids, cu_seq_lens_q, distca_documents: where documents start; the last given decides.

    Returns:
        (batch, length, query heads, value width) in query's dtype, and None for the weights. Padding gets 0.

    Raises:
        UnsupportedError: names what distca would compute wrongly, and the way out.
    """
    if isinstance(attention_mask, CachedMask):
        passed = {"sliding_window": sliding_window, "position_ids": position_ids, **kwargs}
        mask = attention_mask.as_subclass(torch.Tensor)
        output, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, dropout=dropout, **passed)
        return output, None
    handle = _check_call(module, query, key, attention_mask, dropout, kwargs)
    session = current_session()
    if handle.work is None:
        local = read_documents(
            handle.batch_size,
            handle.length,
            packed=distca_documents,
            cu_seq_lens=cu_seq_lens_q,
            position_ids=position_ids,
            padding=handle.padding,
            span_ranks=session.config.documents_span_ranks,
        )
        handle.work = session.work_for(local, query, key, value, training=module.training)
    _check_window(sliding_window if sliding_window is not None else handle.local_size, handle.work)
    return _run(session, handle.work, query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling), None


def _run(session: Session, work: Work, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    batch, heads, length, _ = query.shape
    q_THD, k_TKD, v_TKV = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    if work.keep is not None:
        q_THD, k_TKD, v_TKV = (t.index_select(0, work.keep) for t in (q_THD, k_TKD, v_TKV))
    o_THV = session.attend(work, q_THD, k_TKD, v_TKV, scale)
    if work.keep is not None:
        o_THV = o_THV.new_zeros((batch * length, *o_THV.shape[1:])).index_copy(0, work.keep, o_THV)
    return o_THV.view(batch, length, heads, value.shape[-1])


def _check_call(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    handle: AttentionHandle | torch.Tensor | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> AttentionHandle:
    name = type(module).__name__
    if handle is None:
        raise UnsupportedError(
            f"{name} called distca without the handle of its mask function: the model does not build its mask with "
            'create_causal_mask, so documents and padding are unknown. Use attn_implementation="sdpa" for it.'
        )
    if isinstance(handle, torch.Tensor):
        raise UnsupportedError(
            f"{name} got a ready-made attention mask of shape {tuple(handle.shape)}; distca takes documents from position_ids "
            'and padding from a 2-D attention_mask. Leave the mask out, or use attn_implementation="sdpa".'
        )
    if dropout and module.training:
        raise UnsupportedError(f"{name} has attention dropout {dropout}: set attention_dropout=0.0 in the model's config.")
    if kwargs.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
        raise UnsupportedError(f'{name} is asked for output_attentions: attn_implementation="eager" has weights to return.')
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise UnsupportedError(f'{name} is not causal: use attn_implementation="sdpa" for bidirectional attention.')
    unknown = sorted(k for k, v in kwargs.items() if k not in _HARMLESS and v is not None and v is not False)
    if unknown:
        raise UnsupportedError(
            f"{name} passes {', '.join(unknown)} to attention, which distca does not compute. "
            'Use attn_implementation="eager" (or "sdpa", where it knows the argument).'
        )
    if query.shape[2] != key.shape[2]:
        raise UnsupportedError(f"{name} has {query.shape[2]} query and {key.shape[2]} key positions without a cache.")
    return handle


def _check_window(window: int | None, work: Work) -> None:
    if window is not None and work.longest > window:
        raise UnsupportedError(
            f"a layer with a local attention window of {window} tokens met a document of {work.longest}: distca computes full "
            f'causal attention so far. Keep documents to {window} tokens, or use attn_implementation="sdpa".'
        )
