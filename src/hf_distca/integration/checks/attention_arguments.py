"""Checks of the arguments that models pass to attention. An argument that would make distca's
result wrong raises an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from hf_distca.agreement.documents import DOCUMENT_KEYS, PACKING_KEYS, TREE_KEYS, PackedDocuments
from hf_distca.errors import UnsupportedError
from hf_distca.integration.families import FAMILIES, PROVEN_GROUPS
from hf_distca.integration.handle import MODEL_ROWS, PLANNER, MaskStandIn
from hf_distca.integration.mask_objects import CachedMask, DenseMask

# Keyword arguments that reach attention functions and do not change the maths of causal attention
# within documents.
_HARMLESS_ARGUMENTS = {
    # Arguments from models.
    "use_cache",
    "return_dict",
    "output_hidden_states",
    "output_router_logits",
    "logits_to_keep",
    "cache_position",
    "is_causal",
    # Arguments from loaders. The arguments in `DOCUMENT_KEYS` tell where documents start.
    *DOCUMENT_KEYS,
    *PACKING_KEYS,
    *TREE_KEYS,
    "mm_token_type_ids",
    "labels",
    "shift_labels",
    MODEL_ROWS,
    PLANNER,
    # Arguments for losses, including losses of Liger and TRL.
    "num_items_in_batch",
    "ignore_index",
    "return_token_accuracy",
    "return_predicted_tokens",
    "use_token_scaling",
    "skip_logits",
    "fused_lm_head",
    "accum_dtype",
}


def check_arguments(
    module: torch.nn.Module, dropout: float, kwargs: dict[str, Any], mask: object
) -> None:
    """Check the arguments of one call. Layers with the same shapes and options may differ in these
    arguments, so every call is checked.

    Args:
        module: the attention module.
        dropout: probability of dropping weights.
        kwargs: arguments that are not parameters of distca's attention function.
        mask: the mask that the module got.

    Raises:
        UnsupportedError: names the argument and a remedy.
    """
    if dropout and module.training:
        raise UnsupportedError(
            f"{type(module).__name__} has attention dropout {dropout}: set"
            f" {_find_dropout_setting(getattr(module, 'config', None), dropout)}=0.0 in the model's"
            " config."
        )
    if kwargs.get("output_attentions"):
        _raise_for_weights(module)
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal) and not (
        # A handle with `ahead` tells distca which later tokens each token sees.
        isinstance(mask, MaskStandIn) and mask.batch.context.ahead is not None
    ):
        raise UnsupportedError(
            f"{type(module).__name__} is not causal, and its mask does not tell distca which"
            ' tokens each token sees: use attn_implementation="sdpa" for it.'
        )
    if unknown := kwargs.keys() - _HARMLESS_ARGUMENTS:
        _check_unknown_arguments(module, {name: kwargs[name] for name in unknown})


def _check_unknown_arguments(module: torch.nn.Module, arguments: dict[str, Any]) -> None:
    """Raise for arguments that may change the result of attention."""
    # A proven family was tested with the arguments that its models always pass. Any other bool, str
    # or dtype comes from the caller of the model, and is meant for the loss, for example. Numbers
    # and tensors may change the result of attention.
    proven = (
        FAMILIES.get(getattr(getattr(module, "config", None), "model_type", "")) in PROVEN_GROUPS
    )
    passing = (bool, str, torch.dtype) if proven else ()
    if unknown := [
        name
        for name, value in arguments.items()
        if value is not None and value is not False and not isinstance(value, passing)
    ]:
        raise UnsupportedError(
            f"{type(module).__name__} passes {', '.join(sorted(unknown))} to attention, and distca"
            " does not know whether this changes the result. If it is for the loss, do not pass it"
            ' to the model. Otherwise use attn_implementation="eager", or "sdpa" if sdpa supports'
            " the argument."
        )


def _find_dropout_setting(config: object, dropout: float) -> str:
    """Find the name of the attention dropout setting in a config, such as `attn_pdrop` in GPT-2 or
    `attention_probs_dropout_prob` in BERT.
    """
    names = [
        name
        for name, value in ({} if config is None else vars(config)).items()
        if "drop" in name and value == dropout
    ]
    return next((name for name in names if "att" in name), [*names, "attention_dropout"][0])


def check_window(module: torch.nn.Module, window: object) -> None:
    """Raise for a sliding window that is not a positive integer."""
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise UnsupportedError(
            f"{type(module).__name__} passes sliding_window={window!r}: it must be a whole number"
            " of keys >= 1."
        )


def check_layer(
    module: torch.nn.Module, states: Sequence[torch.Tensor], shape: tuple[int, int]
) -> None:
    """Check the shapes and the config. Layers that call attention in the same way need this check
    only once.

    Args:
        module: the attention module.
        states: query, key and value, (batch, heads, length, width) each.
        shape: rows and tokens of the batch, or of its nano-batch.

    Raises:
        UnsupportedError: if distca does not support these shapes, or if the config asks for
            attention weights.
    """
    name = type(module).__name__
    query, key, value = states
    if (
        not query.dim() == key.dim() == value.dim() == 4
        or query.shape[::2] != shape
        or (query.shape[0], query.shape[3]) != (key.shape[0], key.shape[3])
        or key.shape[:3] != value.shape[:3]
        or not 0 < key.shape[1] <= query.shape[1]
    ):
        raise UnsupportedError(
            f"{name} got query, key and value of shapes {tuple(query.shape)}, {tuple(key.shape)}"
            f" and {tuple(value.shape)}, and a mask for {shape} (rows, tokens): distca takes"
            " (batch, heads, length, width)."
        )
    if query.shape[2] != key.shape[2]:
        raise UnsupportedError(
            f"{name} has {query.shape[2]} query and {key.shape[2]} key positions without a cache:"
            " both numbers must be equal."
        )
    if getattr(getattr(module, "config", None), "output_attentions", False):
        _raise_for_weights(module)


def check_cached_mask(
    module: torch.nn.Module, mask: torch.Tensor | DenseMask | None, documents: object
) -> torch.Tensor:
    """Check a mask that is not a handle: distca's mask function must have made it. Return the mask
    as a plain tensor.

    Packed documents with a key/value cache are refused. In training, only prefix tuning gives a
    model a filled cache.
    """
    name = type(module).__name__
    if isinstance(mask, DenseMask):
        return mask.mask
    if mask is None:
        raise UnsupportedError(
            f"{name} called distca without the handle of its mask function: the model does not"
            " build its mask with create_causal_mask, so documents and padding are unknown. Use"
            ' attn_implementation="sdpa" for it.'
        )
    if not isinstance(mask, CachedMask):
        raise UnsupportedError(
            f"{name} got a ready-made attention mask of shape {tuple(mask.shape)}, but distca reads"
            " documents from position_ids and padding from a 2-D attention_mask. Leave the mask"
            ' out, or use attn_implementation="sdpa".'
        )
    if isinstance(documents, PackedDocuments) and (
        documents.starts is not None or len(documents.lengths) > 1
    ):
        raise UnsupportedError(
            f"{name} has {len(documents.lengths)} packed documents (distca_documents) and a"
            " key/value cache, in which each document would see the others. Give the model"
            " use_cache=False and no past_key_values; instead of prefix tuning, use another"
            " adapter, such as LoRA."
        )
    return mask.as_subclass(torch.Tensor)


def _raise_for_weights(module: torch.nn.Module) -> NoReturn:
    raise UnsupportedError(
        f"{type(module).__name__} is asked for output_attentions, but distca has no weights to"
        ' return. Use attn_implementation="eager".'
    )
