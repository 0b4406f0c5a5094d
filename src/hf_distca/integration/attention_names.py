"""Make distca available in transformers: under its own name, under the name of another attention,
and as the default.
"""

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
    """Register an attention function and a mask function with transformers under a name."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    _registered[name] = attention


def describe_origin(function: Callable[..., Any]) -> str:
    """Return the module and the name of a callable."""
    if isinstance(function, partial):
        return describe_origin(function.func)
    target = function if hasattr(function, "__qualname__") else type(function)
    return f"{target.__module__}.{target.__qualname__}"


def check_not_replaced(config: PreTrainedConfig | None) -> None:
    """Check that no other package has replaced the attention function that distca registered under
    the model's attention name. If the name is a flash attention, also check the function through
    which transformers calls flash attention.

    Raises:
        UnsupportedError: if a package has replaced one of these functions, for example to cut
            sequences over ranks.
    """
    name = getattr(config, "_attn_implementation", None)
    if name not in _registered:
        return
    changed = ALL_ATTENTION_FUNCTIONS[name]
    if changed is _registered[name]:
        changed = get_changed_flash_attention() if "flash" in name else None
    if changed is not None:
        raise UnsupportedError(
            f'attn_implementation="{name}" is distca here, but a package has put'
            f" {describe_origin(changed)} in front of it. Packages do this to cut sequences over"
            " ranks, and distca would take each part for whole documents. Switch this off (set the"
            " size of sequence, context or Ulysses parallelism to 1). distca itself shares the"
            " attention of long documents between ranks."
        )


def replace_attention(name: str) -> None:
    """Give distca to models that ask for the attention `name`. Use this function for trainers that
    accept only certain names.

    Call it before the model is loaded. From then on, all models of this process that ask for `name`
    get distca, even if they are not trained. A trainer still checks its settings and packs rows as
    for the original attention. transformers no longer looks for the package behind the name, such
    as flash-attn, because distca does not need it. A trainer may still look for the package.
    Calling this function again has no effect.

    Under any name, distca raises an error when it is called for attention that it does not compute:
    attention that is not causal, has dropout, or gets unsupported arguments. Load models with such
    attention under another name, because the replacement cannot be undone.

    Args:
        name: "flash_attention_2", "flash_attention_3", "flash_attention_4", "sdpa", or "tree_fa3"
            of TRL.

    Raises:
        UnsupportedError: if `name` is none of these, or a package has replaced its function
            (packages that cut sequences over ranks do this). If a package replaces the function
            later, the next forward raises.
    """
    if name in tuple(_registered):  # a tuple, because a user's value may not be hashable
        return
    check_replaceable(name)
    origin = "TRL's" if name == TREE_ATTENTION else _check_replaced(name)
    register_attention(name, _registered["distca"], ALL_MASK_ATTENTION_FUNCTIONS["distca"])
    # TRL registers its own "tree_fa3" later, when it makes a trainer. So models that ask for this
    # name are switched to "distca".
    let_names_pass({name: "distca" if name == TREE_ATTENTION else name})
    LOG.warning(
        'distca stands in for attn_implementation="%s": models that ask for it in this process get'
        " distca, not %s.",
        name,
        origin,
    )


def _check_replaced(name: str) -> str:
    """Check that distca can replace an attention function, and return the origin of this function.

    Raises:
        UnsupportedError: if transformers has no such attention, or a package has replaced it.
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
                " its place. Packages do so to cut sequences over ranks, and distca would take each"
                " part for whole documents. Switch this off."
            )
    return describe_origin(replaced)


def make_distca_default() -> None:
    """Make distca the default attention of causal models whose family is proven to work with
    distca. Models that are loaded with attn_implementation get the attention of that name.
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
    """If a model is suitable for distca, but was loaded with the name of another attention, warn
    that the model is not balanced.
    """
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

    BERT and similar models are causal only as decoders.
    """
    config = model.config
    encodes = getattr(config, "is_decoder", None) is False and not model.can_generate()
    if encodes or getattr(config, "is_encoder_decoder", False):
        return False
    if FAMILIES.get(config.model_type) in PROVEN_GROUPS:
        return True
    warn_once(
        "hf-distca does not change the attention of %s models, because distca is not proven to work"
        " with them.",
        config.model_type,
    )
    return False


def find_distca_configs(model: torch.nn.Module | None) -> list[PreTrainedConfig]:
    """Find the configs of a model and its parts (a language tower, for example), and return the
    configs whose attention is distca, under any name.
    """
    models = filter(is_distca_model, iterate_models(model))
    return list({id(part.config): part.config for part in models}.values())


def is_distca_model(model: PreTrainedModel) -> bool:
    """Return whether a model asks for distca's attention, under any name."""
    return getattr(model.config, "_attn_implementation", None) in _registered


def iterate_models(model: torch.nn.Module | None) -> Iterator[PreTrainedModel]:
    """Yield the models of transformers in a module, the module itself included, outermost first."""
    for part in () if model is None else model.modules():
        if isinstance(part, PreTrainedModel):
            yield part
