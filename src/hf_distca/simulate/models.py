"""Shapes of a few known models, by name. Others are counted where transformers may be imported
(`doctor.counting`).
"""

from __future__ import annotations

from hf_distca.errors import ConfigError
from hf_distca.model_shape import ModelShape

__all__ = ["KNOWN_MODELS", "find_model"]

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
        ConfigError: if there is none.
    """
    if name.lower() not in KNOWN_MODELS:
        raise ConfigError(
            f"model {name!r} is neither a config.json nor one of {', '.join(KNOWN_MODELS)}."
        )
    return KNOWN_MODELS[name.lower()]
