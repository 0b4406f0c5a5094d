"""Shapes of models: a few known ones by name, and others from their config.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_distca.errors import ConfigError
from hf_distca.input_files import read_file

__all__ = ["KNOWN_MODELS", "ModelShape", "find_model"]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder with gated feed-forward layers.

    Attributes:
        name: what it is called, and where its figures come from.
        hidden, layers, query_heads, key_value_heads, head_dim, feed_forward, vocabulary: its sizes.
        tied: whether the output layer shares the embedding's weights.
        window: keys that a position sees in layers with a sliding window, if there are any.
        windowed_layers: how many layers have it.
        head_norms: whether q and k go through norms.
    """

    name: str
    hidden: int
    layers: int
    query_heads: int
    key_value_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    tied: bool = False
    window: int | None = None
    windowed_layers: int = 0
    head_norms: bool = False

    def __post_init__(self) -> None:
        sizes = (self.hidden, self.layers, self.query_heads, self.key_value_heads, self.head_dim, self.feed_forward)
        for size in (*sizes, self.vocabulary):
            if type(size) is not int or not 1 <= size < 2**31:
                raise ConfigError(f"{self.name}: {size!r} in {self} must be a whole number between 1 and 2**31.")
        if self.query_heads % self.key_value_heads or not 0 <= self.windowed_layers <= self.layers:
            raise ConfigError(f"{self}: query heads must be a multiple of key/value heads, and no more layers have a window.")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"{self.name}: a sliding window of {self.window} keys hides everything: it must be at least 1.")

    @property
    def attention_width(self) -> int:
        """Elements of one token's q."""
        return self.query_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Elements of one token's k."""
        return self.key_value_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Weights of the matrices of a layer."""
        attention = self.hidden * (2 * self.attention_width + 2 * self.key_width)
        return attention + 3 * self.hidden * self.feed_forward

    @property
    def parameters(self) -> int:
        """Weights of all matrices, embedding and output layer included."""
        return self.layers * self.layer_parameters + (1 if self.tied else 2) * self.hidden * self.vocabulary

    @property
    def kinds(self) -> tuple[tuple[int | None, int], ...]:
        """Sliding window (None without) and number of the layers of each kind."""
        kinds = ((None, self.layers - self.windowed_layers), (self.window, self.windowed_layers))
        return tuple((window, count) for window, count in kinds if count)


# Sizes are those of the published config.json files. Llama-34B is table 2 of arXiv 2510.18121, which names no width of the
# feed-forward layers and no vocabulary: those are CodeLlama-34B's.
KNOWN_MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("llama-3.2-1b", 2048, 16, 32, 8, 64, 8192, 128256, tied=True),
        ModelShape("llama-3.2-3b", 3072, 28, 24, 8, 128, 8192, 128256, tied=True),
        ModelShape("llama-3-8b", 4096, 32, 32, 8, 128, 14336, 128256),
        ModelShape("llama-34b", 8192, 48, 64, 16, 128, 22016, 32000),
        ModelShape("llama-3-70b", 8192, 80, 64, 8, 128, 28672, 128256),
        ModelShape("mistral-7b", 4096, 32, 32, 8, 128, 14336, 32768),
        ModelShape("qwen3-8b", 4096, 36, 32, 8, 128, 12288, 151936, head_norms=True),
        ModelShape("qwen3-32b", 5120, 64, 64, 8, 128, 25600, 151936, head_norms=True),
    )
}


# Dense families of transformers whose attention has norms of q and k.
_HEAD_NORMS = {"apertus", "exaone4", "gemma3_text", "olmo2", "olmo3", "qwen3"}


def find_model(name: str, defaults: Callable[[Path, str], dict[str, Any] | None] | None = None) -> ModelShape:
    """A known shape by name, or that of a config.json, given as the file or the folder it is in.

    Args:
        name: the name, or the path.
        defaults: says by the path and the model_type what the text model has with the defaults of its family, which the file need
            not have; None where the family is not known. Without it only what the file says counts.

    Raises:
        ConfigError: if there is neither, or the file describes no dense decoder.
    """
    if name.lower() in KNOWN_MODELS:
        return KNOWN_MODELS[name.lower()]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"model {name!r} is neither a config.json nor one of {', '.join(KNOWN_MODELS)}.")
    try:
        data = json.loads(read_file(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold an object, as transformers saves it; it holds {type(data).__name__}.")
    text = data.get("text_config") or data
    if not isinstance(text, dict):
        raise ConfigError(f"{path} must have an object as 'text_config', it has {text!r}.")
    known = None
    if defaults is not None and isinstance(kind := data.get("model_type"), str):
        known = defaults(path, kind)
    return _from_config(str(path), known or text)


def _from_config(path: str, config: dict[str, Any]) -> ModelShape:
    if any(config.get(name) for name in ("num_local_experts", "num_experts", "n_routed_experts")):
        raise ConfigError(f"{path} describes a mixture of experts, whose layers are not modelled: name a dense model.")

    def number(*names: str, default: int | None = None) -> int:
        value = next((config[name] for name in names if config.get(name) is not None), default)
        if type(value) is not int:
            raise ConfigError(f"{path} must have {names[0]!r} as a whole number, it has {value!r}.")
        return value

    hidden, heads = number("hidden_size", "n_embd"), number("num_attention_heads", "n_head")
    layers = number("num_hidden_layers", "n_layer")
    if config.get("head_dim") is None and hidden % max(heads, 1):
        raise ConfigError(f"{path} has no 'head_dim', and a hidden size of {hidden} cannot be divided among {heads} heads.")
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if window is None or config.get("use_sliding_window") is False:
        windowed, window = 0, None
    elif isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds):
        windowed, window = kinds.count("sliding_attention"), number("sliding_window")
    else:
        raise ConfigError(
            f"{path} has a sliding window of {window} keys, and does not say in which layers: its 'layer_types' must be a list "
            f"with 'sliding_attention' or 'full_attention' for each of the {layers}, it is {kinds!r}."
        )
    return ModelShape(
        path,
        hidden,
        layers,
        heads,
        number("num_key_value_heads", default=heads),
        number("head_dim", default=hidden // max(heads, 1)),
        number("intermediate_size", default=4 * hidden),
        number("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        window=window,
        windowed_layers=windowed,
        head_norms=config.get("model_type") in _HEAD_NORMS,
    )
