"""Names of attention in transformers: distca under its own name, in place of others, by default."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from hf_distca.borrowed import get_changed_flash_attention, let_names_pass
from hf_distca.config import REPLACEABLE_ATTENTION, TREE_ATTENTION, check_replaceable
from hf_distca.errors import UnsupportedError
from hf_distca.integration.families import FAMILIES, PROVEN_GROUPS
from hf_distca.integration.processes import LOG, warn_once

_registered: dict[str, Callable[..., Any]] = {}


def register_attention(name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Register attention and mask function under a name."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    _registered[name] = attention


def describe_origin(function: Callable[..., Any]) -> str:
    """Return module and name of a function, or of another callable."""
    if isinstance(function, partial):
        return describe_origin(function.func)
    target = function if hasattr(function, "__qualname__") else type(function)
    return f"{target.__module__}.{target.__qualname__}"


def check_not_replaced(config: PreTrainedConfig | None) -> None:
    """Raise if another package replaced an attention that distca registered, or built on the
    attention that distca replaced.

    Raises:
        UnsupportedError: if another package changed the attention of the name since, as those do
            that cut sequences over ranks.
    """
    name = getattr(config, "_attn_implementation", None)
    if name not in _registered:
        return
    changed = ALL_ATTENTION_FUNCTIONS[name]
    if changed is _registered[name]:
        changed = get_changed_flash_attention() if "flash" in name else None
    if changed is not None:
        raise UnsupportedError(
            f'attn_implementation="{name}" is distca here, and {describe_origin(changed)} has been'
            " put in front of it since. Packages do so to cut sequences over ranks; distca would"
            " take each part for documents of its own. Switch that off (sequence, context or"
            " Ulysses parallelism of size 1): distca shares the attention of long documents between"
            " ranks."
        )


def replace_attention(name: str) -> None:
    """Let models that ask for the attention `name` have distca, for trainers that accept only names
    they know.

    Call it before the model is loaded. From then on transformers uses distca's functions under this
    name, in this process and for every model that asks for `name`, also for models that are not
    trained. The trainer's checks and packing stay those of `name`. transformers no longer looks for
    the package behind the name, such as flash-attn: distca does not need it. A trainer that looks
    for it itself still does. Calling it again has no effect.

    Attention that distca does not compute (not causal, with dropout, or other arguments) is an
    error when it is called, as under its own name. The replacement cannot be undone: load such
    models with another attention.

    Args:
        name: "flash_attention_2", "flash_attention_3", "flash_attention_4", "sdpa", or "tree_fa3"
            of TRL.

    Raises:
        UnsupportedError: if `name` is another, or a package has replaced its function, as packages
            do that cut sequences over ranks. If a package does so later, the next forward raises.
    """
    if name in tuple(_registered):  # which need no hash of whatever a user gives
        return
    check_replaceable(name)
    origin = "TRL's" if name == TREE_ATTENTION else _check_replaced(name)
    register_attention(name, _registered["distca"], ALL_MASK_ATTENTION_FUNCTIONS["distca"])
    # TRL registers its own attention under its name when it makes a trainer.
    let_names_pass({name: "distca" if name == TREE_ATTENTION else name})
    LOG.warning(
        'distca stands in for attn_implementation="%s": models that ask for it in this process get'
        " distca, not %s.",
        name,
        origin,
    )


def _check_replaced(name: str) -> str:
    """Return the origin of an attention that distca shall replace.

    Raises:
        UnsupportedError: if there is none, or a package has replaced it.
    """
    if name not in ALL_ATTENTION_FUNCTIONS:
        raise UnsupportedError(
            f"distca cannot stand in for {name!r}: this version of transformers does not have it."
        )
    replaced = ALL_ATTENTION_FUNCTIONS[name]
    for function in (replaced, get_changed_flash_attention() if "flash" in name else None):
        if function is not None and not describe_origin(function).startswith("transformers."):
            raise UnsupportedError(
                f"distca cannot stand in for {name!r}: {describe_origin(function)} has been put in"
                " its place. Packages do so to cut sequences over ranks, which distca would not"
                " know of: switch that off."
            )
    return describe_origin(replaced)


def make_distca_default() -> None:
    """Make distca the default of causal language models of proven families, and of their parts,
    that name no attention.
    """
    choose = PreTrainedModel.get_correct_attn_implementation

    @wraps(choose)
    def choose_attention(
        self: PreTrainedModel, requested_attention: str | None, *args: bool, **kwargs: bool
    ) -> str:
        if requested_attention is None and _is_suitable(self):
            requested_attention = "distca"
        elif requested_attention is not None and requested_attention not in _registered:
            _warn_of_name(self, requested_attention)
        return choose(self, requested_attention, *args, **kwargs)

    PreTrainedModel.get_correct_attn_implementation = choose_attention  # type: ignore[method-assign]


def _warn_of_name(model: PreTrainedModel, name: str) -> None:
    """Warn that a model is not balanced, because it names its attention."""
    if _is_suitable(model):
        remedy = (
            f"hf-distca run --instead-of {name} balances them"
            if name in REPLACEABLE_ATTENTION
            else "without that name they are balanced"
        )
        warn_once(
            'hf-distca leaves %s models as they are, because attn_implementation="%s" is given:'
            " %s.",
            model.config.model_type,
            name,
            remedy,
        )


def _is_suitable(model: PreTrainedModel) -> bool:
    """Return whether a model is causal and of a proven family.

    BERT and its like are not, unless they are decoders.
    """
    config = model.config
    encodes = getattr(config, "is_decoder", None) is False and not model.can_generate()
    if encodes or getattr(config, "is_encoder_decoder", False):
        return False
    if FAMILIES.get(config.model_type) in PROVEN_GROUPS:
        return True
    warn_once(
        "hf-distca leaves %s models with the attention of transformers: they are not proven.",
        config.model_type,
    )
    return False


def find_distca_configs(model: torch.nn.Module | None) -> list[PreTrainedConfig]:
    """Return the configurations of a model and its parts, such as a language tower, that ask for
    distca, under any name.
    """
    models = filter(is_distca_model, iterate_models(model))
    return list({id(part.config): part.config for part in models}.values())


def is_distca_model(model: PreTrainedModel) -> bool:
    """Return whether a model is to run distca's attention, under any name."""
    return getattr(model.config, "_attn_implementation", None) in _registered


def iterate_models(model: torch.nn.Module | None) -> Iterator[PreTrainedModel]:
    """Yield the models of transformers that a module is or holds, from the outside in."""
    for part in () if model is None else model.modules():
        if isinstance(part, PreTrainedModel):
            yield part
