"""`ModelShape`: sizes, weights and attention of a model as predictions need them, and the shapes of
several known models.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hf_distca.errors import ConfigError
from hf_distca.tools.advise.counting import count_model
from hf_distca.tools.doctor.model import read_config


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder: dense with gated feed-forward layers, unless its weights were counted.

    Attributes:
        name: name of the model, or the file that describes it.
        hidden, layers, vocabulary: sizes of the model.
        query_heads, key_value_heads, head_dim: heads of the layers without a window, if layers
            differ; `head_dim` is the mean of the widths of keys and values.
        feed_forward: width of a gated feed-forward layer with as many weights as a token uses
            outside attention in the mean layer.
        tied: whether the output layer shares the embedding's weights.
        window: keys that a position sees in layers with a sliding window; None without such layers.
        windowed_layers: number of layers with the window.
        head_norms: whether q and k go through norms.
        attention_layers: number of computations of core attention; None for one in each layer.
            Layers without it are counted as larger feed-forward layers.
        weights: number of weights; None for those of dense layers with the sizes above.
        active: number of weights of the layers' matrices that a token uses, if different.
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
    attention_layers: int | None = None
    weights: int | None = None
    active: int | None = None

    def __post_init__(self) -> None:
        for size in (
            self.hidden,
            self.layers,
            self.query_heads,
            self.key_value_heads,
            self.head_dim,
            self.feed_forward,
            self.vocabulary,
        ):
            if type(size) is not int or not 1 <= size < 2**31:
                raise ConfigError(
                    f"{self.name}: {size!r} in {self} must be a whole number between 1 and 2**31."
                )
        if (
            self.query_heads % self.key_value_heads
            or not 0 <= self.windowed_layers <= self.attending
        ):
            raise ConfigError(
                f"{self}: query heads must be a multiple of key/value heads, and at most all"
                " layers may have a window."
            )
        if self.window is not None and self.window < 1:
            raise ConfigError(
                f"{self.name}: a sliding window of {self.window} keys hides everything: it must be"
                " at least 1."
            )

    @property
    def attention_width(self) -> int:
        """Number of elements of q for one token."""
        return self.query_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Number of elements of k for one token."""
        return self.key_value_heads * self.head_dim

    @property
    def attending(self) -> int:
        """Number of computations of core attention."""
        return self.layers if self.attention_layers is None else self.attention_layers

    @property
    def attention_share(self) -> float:
        """Mean number of computations of core attention per layer."""
        return self.attending / self.layers

    @property
    def dense_parameters(self) -> int:
        """Number of weights of the matrices of a dense layer with the sizes of this model."""
        attention = self.hidden * (2 * self.attention_width + 2 * self.key_width)
        return attention + 3 * self.hidden * self.feed_forward

    @property
    def active_share(self) -> float:
        """Weights of the layers that a token uses, relative to dense layers of these sizes."""
        return 1.0 if self.active is None else self.active / (self.layers * self.dense_parameters)

    @property
    def layer_parameters(self) -> float:
        """Number of weights of the mean layer."""
        if self.weights is None:
            return self.dense_parameters
        return max(self.weights - self._outside_layers, 0) / self.layers

    @property
    def parameters(self) -> int:
        """Number of weights of all matrices, embedding and output layer included."""
        return (
            self.layers * self.dense_parameters + self._outside_layers
            if self.weights is None
            else self.weights
        )

    @property
    def _outside_layers(self) -> int:
        return (1 if self.tied else 2) * self.hidden * self.vocabulary

    @property
    def kinds(self) -> tuple[tuple[int | None, int], ...]:
        """Window (None without) and number of layers of each kind that computes core attention."""
        kinds = ((None, self.attending - self.windowed_layers), (self.window, self.windowed_layers))
        return tuple((window, count) for window, count in kinds if count)


# Sizes are those of the published config.json files. Llama-34B is table 2 of arXiv 2510.18121,
# which names no width of the feed-forward layers and no vocabulary: those are CodeLlama-34B's.
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


def find_model(name: str) -> ModelShape:
    """Find a known shape by name.

    Raises:
        ConfigError: if no known shape has this name.
    """
    if name.lower() not in KNOWN_MODELS:
        raise ConfigError(
            f"model {name!r} is neither a config.json nor one of {', '.join(KNOWN_MODELS)}."
        )
    return KNOWN_MODELS[name.lower()]


def count_shape(path: Path) -> ModelShape:
    """Count the shape of the model in a config.json; for a composite model, of the part that writes
    text.

    Raises:
        ConfigError: if the file does not exist, some parts cannot be counted, or layers have
            several windows.
        UnsupportedError: if distca does not support the model.
    """
    model, config = count_model(path), read_config(str(path)).get_text_config(decoder=True)
    with torch.device("meta"):
        built: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")  # type: ignore[no-untyped-call]
    windows = {window for _, window, _ in model.layers if window is not None}
    if len(windows) > 1:
        raise ConfigError(
            f"{path}: its layers have windows of {', '.join(map(str, sorted(windows)))} keys: only"
            " one can be predicted."
        )
    heads = model.layers[0][0]
    width = (heads.head_dim + heads.value_head_dim) // 2
    embedding, output = built.get_input_embeddings(), built.get_output_embeddings()
    active = round(model.met_weights) - (0 if output is None else output.weight.numel())
    attending = sum(count for *_, count in model.layers)
    own = sum(
        weight.numel()
        for module in built.modules()
        if getattr(module, "is_causal", False)
        for weight in module.parameters()
        if weight.dim() > 1
    )
    wide = (active - own) / (3 * config.hidden_size * config.num_hidden_layers)
    return ModelShape(
        *(model.name, config.hidden_size, config.num_hidden_layers),
        *(heads.query_heads, heads.key_value_heads, width),
        feed_forward=max(round(wide), 1),
        vocabulary=config.vocab_size,
        tied=output is None or output.weight is embedding.weight,
        window=min(windows, default=None),
        windowed_layers=sum(count for _, window, count in model.layers if window is not None),
        head_norms=any(
            name.endswith(("q_norm", "query_norm")) for name, _ in built.named_modules()
        ),
        attention_layers=attending,
        weights=sum(weight.numel() for weight in built.parameters()),
        active=active,
    )
