"""`Model`: the figures of a model that an estimate needs. This file also lists known models."""

from __future__ import annotations

from dataclasses import dataclass

from hf_distca.schedule.cost import AttentionShape

_BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Model:
    """A model in bfloat16.

    Attributes:
        name: name of the model, or the file that describes it.
        layers: for each kind of layer with core attention, its heads and widths, its sliding window
            (None if it has none), and the number of such layers; kinds without a window come first.
        met_weights: number of weights by which a token is multiplied, including the output layer.
    """

    name: str
    layers: tuple[tuple[AttentionShape, int | None, int], ...]
    met_weights: float


# Layers, query heads, key/value heads, width of a head, and billions of weights by which a token is
# multiplied. They come from the published config.json files, except those of Llama-34B, which come
# from table 2 of arXiv 2510.18121, with the feed-forward width and vocabulary of CodeLlama-34B.
_SIZES = {
    "llama-3.2-1b": (16, 32, 8, 64, 1.236),
    "llama-3.2-3b": (28, 24, 8, 128, 3.213),
    "llama-3-8b": (32, 32, 8, 128, 7.505),
    "llama-34b": (48, 64, 16, 128, 34.29),
    "llama-3-70b": (80, 64, 8, 128, 69.50),
    "mistral-7b": (32, 32, 8, 128, 7.114),
    "qwen3-8b": (36, 32, 8, 128, 7.568),
    "qwen3-32b": (64, 64, 8, 128, 31.98),
}
KNOWN_MODELS = {
    name: Model(
        name,
        ((AttentionShape(heads, key_heads, width, width, _BF16_BYTES), None, layers),),
        billions * 1e9,
    )
    for name, (layers, heads, key_heads, width, billions) in _SIZES.items()
}
