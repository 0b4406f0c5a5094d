"""The names under which transformers knows distca: its own, and those that it stands in for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import PreTrainedConfig
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from hf_distca.borrowed import changed_flash_attention
from hf_distca.errors import UnsupportedError

__all__ = ["asks_for_distca", "check_untouched", "origin", "register", "registered"]

_attention: dict[str, Callable[..., Any]] = {}


def register(name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Make attention and mask function those of a name."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    _attention[name] = attention


def registered() -> frozenset[str]:
    """The names under which distca is registered."""
    return frozenset(_attention)


def asks_for_distca(config: PreTrainedConfig) -> bool:
    """Whether a model with this configuration computes its attention with distca."""
    return getattr(config, "_attn_implementation", None) in _attention


def origin(function: Callable[..., Any]) -> str:
    """Module and name of a function, or of what it is instead."""
    if isinstance(function, partial):
        return origin(function.func)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def check_untouched(config: PreTrainedConfig | None) -> None:
    """Check that what distca was registered as is still distca, and that nothing was built on what it replaced.

    Raises:
        UnsupportedError: if another package changed the attention of the name since, as those do that cut sequences over ranks.
    """
    name = getattr(config, "_attn_implementation", None)
    ours = _attention.get(name) if isinstance(name, str) else None
    if ours is None:
        return
    found = ALL_ATTENTION_FUNCTIONS[name]
    changed = None if found is ours else found
    if changed is None and "flash" in str(name):
        changed = changed_flash_attention()
    if changed is not None:
        raise UnsupportedError(
            f'attn_implementation="{name}" is distca here, and {origin(changed)} has been put in front of it since. '
            "Packages do so to cut sequences over ranks; distca would take each part for documents of its own. Switch that off "
            "(sequence, context or Ulysses parallelism of size 1): distca shares the attention of long documents between ranks."
        )
