"""Which layers of a config.json have a sliding window, as transformers reads it.

A config.json need not list its layers: most of those on the Hub leave that to the class of their family. Asking that class would
take seconds of importing, so what it does is written down here, and a test compares it with transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hf_distca.errors import ConfigError

__all__ = ["windows_of"]

_WINDOWED = "sliding_attention"


class Number(Protocol):
    """Read a whole number of the config.json, or raise."""

    def __call__(self, *names: str, default: int | None = None) -> int: ...


@dataclass(frozen=True, slots=True)
class _Family:
    """What the class of a family does.

    Attributes:
        windowed: the number of layers with a window, of all, where they are not listed.
        window: where the config.json has none.
        switched: whether there is no window without `use_sliding_window`.
    """

    windowed: Callable[[int, Mapping[str, Any], Number], int]
    window: int | None = 4096
    switched: bool = False


def _all(layers: int, config: Mapping[str, Any], number: Number) -> int:
    return layers


def _none(layers: int, config: Mapping[str, Any], number: Number) -> int:
    return 0


def _but_one_of(period: int, key: str | None = None, *, begun: bool = False) -> Callable[[int, Mapping[str, Any], Number], int]:
    """One layer of each period has no window; `begun`: also of one that is not whole. `key` is where a config.json has it."""

    def windowed(layers: int, config: Mapping[str, Any], number: Number) -> int:
        found = period if key is None else number(key, default=period)
        if found < 1:
            raise ConfigError(f"{key}={found} of {config.get('model_type')!r} layers must be at least 1.")
        return layers - (layers + found - 1 if begun else layers) // found

    return windowed


def _after(first: int) -> Callable[[int, Mapping[str, Any], Number], int]:
    """The layers after the first ones, which a config.json may give as `max_window_layers`."""

    def windowed(layers: int, config: Mapping[str, Any], number: Number) -> int:
        return layers - min(max(number("max_window_layers", default=first), 0), layers)

    return windowed


def _without_rotary(layers: int, config: Mapping[str, Any], number: Number) -> int:
    rotary = config.get("no_rope_layers")  # which, in spite of its name, has 0 where there is none
    if isinstance(rotary, list):
        return sum(not one for one in rotary[:layers])
    return layers - _but_one_of(4, "no_rope_layer_interval")(layers, config, number)


_FAMILIES = {
    **dict.fromkeys(("mistral", "ministral", "voxtral_realtime"), _Family(_all)),
    **dict.fromkeys(("phi3", "phi4_multimodal", "starcoder2", "ministral3"), _Family(_all, None)),
    **dict.fromkeys(("gemma2", "vaultgemma"), _Family(_but_one_of(2))),
    "gemma3": _Family(_but_one_of(6, "sliding_window_pattern")),
    "gemma3n": _Family(_but_one_of(5), 512),
    "gemma4": _Family(_but_one_of(6, begun=True), 512),
    "gemma4_unified": _Family(_but_one_of(6, begun=True), 1024),
    **dict.fromkeys(("cohere2", "exaone4"), _Family(_but_one_of(4, "sliding_window_pattern"))),
    "cohere_compass": _Family(_none),
    "olmo3": _Family(_but_one_of(4)),
    "cwm": _Family(_but_one_of(4, begun=True), 8192),
    "granite_swa": _Family(_but_one_of(4, begun=True), 128),
    "muse_glimmer": _Family(_but_one_of(4, begun=True), 2048),
    "modernbert-decoder": _Family(_but_one_of(3, "global_attn_every_n_layers", begun=True), 64),
    **dict.fromkeys(("qwen2", "qwen3"), _Family(_after(28), switched=True)),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _Family(_after(80), switched=True)),
    "qwen2_5_omni": _Family(_after(28), 32768, switched=True),
    "smollm3": _Family(_without_rotary, None, switched=True),
}


def windows_of(path: str, config: Mapping[str, Any], layers: int, number: Number) -> tuple[int | None, int]:
    """The sliding window, None without, and how many layers have it.

    Args:
        path: of the config.json, for errors.
        config: what it says of the layers, and the `model_type`.
        layers: their number.
        number: reads the config.

    Raises:
        ConfigError: if there is a window, and nothing says which layers have it.
    """
    kind = config.get("model_type")
    family = _FAMILIES.get(kind.removesuffix("_text")) if isinstance(kind, str) else None
    window = _window(config, family, number)
    if window is None:
        return None, 0
    listed = config.get("layer_types")
    if listed is not None:
        if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
            raise ConfigError(f"{path} must have a list of names as 'layer_types', it has {listed!r}.")
        return window, listed.count(_WINDOWED)
    if family is None:
        raise ConfigError(
            f"{path} has a sliding window of {window} keys, and its model_type {kind!r} does not say in which layers: add "
            f"'layer_types', a list with {_WINDOWED!r} or 'full_attention' for each of the {layers}."
        )
    return window, family.windowed(layers, config, number)


def _window(config: Mapping[str, Any], family: _Family | None, number: Number) -> int | None:
    if config.get("use_sliding_window", not (family and family.switched)) in (False, None):
        return None
    if "sliding_window" in config:
        return None if config["sliding_window"] is None else number("sliding_window")
    if config.get("model_type") == "modernbert-decoder":  # to either side, as in the encoder of that name
        return number("local_attention", default=128) // 2
    return None if family is None else family.window
