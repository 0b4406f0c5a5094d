"""`count_model`: the weights and the attention of a model, counted where it is built without
memory, on torch's meta device. `count_tokens`: the tokens of texts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from hf_distca.errors import ConfigError, UnsupportedError
from hf_distca.integration.families import check_family
from hf_distca.integration.layer_kinds import list_layer_keys
from hf_distca.tools.doctor.model import read_config
from simulator.model_shape import ModelShape

_ACTIVE_EXPERTS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "moe_top_k",
    "top_k_experts",
)
_CALLS = {"diffllama": 2}  # of core attention in a layer, if not one
_WINDOWS = ("sliding_window", "attention_window_size")


def count_model(path: Path) -> ModelShape:
    """Count the weights and layers of the model of a config.json; of a composite model, those of
    the part that writes text.

    Raises:
        ConfigError: if there is no such file, distca does not support the model, or it has parts
            that cannot be counted.
    """
    config = read_config(str(path))
    try:
        check_family(config.model_type, encoder_decoder=config.is_encoder_decoder)
        return _count_model(str(path), config)
    except (ConfigError, UnsupportedError) as error:
        raise ConfigError(str(error) if str(path) in str(error) else f"{path}: {error}") from error


def count_tokens(texts: list[str], tokenizer: str) -> list[int]:
    """Count the tokens of each text.

    Args:
        texts: the texts.
        tokenizer: a name or folder, as `AutoTokenizer.from_pretrained` takes it.

    Raises:
        ConfigError: if there is no such tokenizer.
    """
    try:
        tokenize = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tokenizer {tokenizer}: {str(error).splitlines()[0]}") from error
    blocks = (texts[first : first + 1024] for first in range(0, len(texts), 1024))
    return [len(ids) for block in blocks for ids in tokenize(block, verbose=False)["input_ids"]]


def _count_model(name: str, config: PreTrainedConfig) -> ModelShape:
    text = config.get_text_config(decoder=True)
    model = _build_on_meta(config, text)
    layers, attention = _find_layers(model, text)
    windows = [_find_window(text, layer) for layer, _ in attention]
    if len(distinct := {window for window in windows if window is not None}) > 1:
        raise ConfigError(
            f"its layers have windows of {', '.join(map(str, sorted(distinct)))} keys: only one can"
            " be predicted."
        )
    shape = list_layer_keys(text, torch.bfloat16, "cpu")[0].shape
    active = sum(_count_met_weights(layer, text) for layer in layers)
    beside = active - sum(_count_met_weights(module, text) for _, module in attention)
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return ModelShape(
        *(name, text.hidden_size, len(layers)),
        *(shape.query_heads, shape.key_value_heads, (shape.head_dim + shape.value_head_dim) // 2),
        feed_forward=max(round(beside / (3 * text.hidden_size * len(layers))), 1),
        vocabulary=text.vocab_size,
        tied=output is None or output.weight is embedding.weight,
        window=min(distinct, default=None),
        windowed_layers=len(windows) - windows.count(None),
        head_norms=any(
            re.fullmatch("q(uery)?_(layer)?norm", child)
            for child, _ in attention[0][1].named_children()
        ),
        attention_layers=len(windows) * _CALLS.get(text.model_type, 1),
        weights=sum(weight.numel() for weight in model.parameters()),
        active=active,
    )


def _build_on_meta(config: PreTrainedConfig, text: PreTrainedConfig) -> PreTrainedModel:
    """Build the model that writes text, or the whole of it, on the meta device, where weights have
    sizes alone.
    """
    for part in (text, config):
        try:
            with torch.device("meta"):
                model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                    part, attn_implementation="eager"
                )
        except Exception as error:  # of models' own code, of any kind
            reason = " ".join(str(error).split())[:300]
        else:
            return model
    raise ConfigError(
        f"transformers builds no {config.model_type!r} model that writes text of it: {reason}"
    )


def _find_layers(
    model: PreTrainedModel, text: PreTrainedConfig
) -> tuple[list[nn.Module], list[tuple[int, nn.Module]]]:
    """Find the decoder's layers, and the modules of causal self-attention, each with the number of
    its layer.
    """
    attending = [
        (match[1], int(match[2]), module)
        for name, module in model.named_modules()
        if getattr(module, "is_causal", False)
        and "cross" not in name
        and "encoder_attn" not in name
        and (match := re.match(r"(.*?)\.(\d+)\.", name))
    ]
    stacks = sorted({stack for stack, *_ in attending})
    if len(stacks) != 1:
        raise ConfigError(
            f"{text.model_type!r} models have causal attention in"
            f" {', '.join(stacks) or 'no layer'}: it is counted in one stack of layers. Models that"
            " are encoders by default need is_decoder=True."
        )
    layers = list(model.get_submodule(stacks[0]).children())
    if text.num_hidden_layers not in (len(layers), len(attending)):
        raise ConfigError(
            f"{text.model_type!r} models run {text.num_hidden_layers} layers, and have"
            f" {len(layers)}: how often each of them runs is not known here."
        )
    return layers, [(number, module) for _, number, module in attending]


def _find_window(text: PreTrainedConfig, layer: int) -> int | None:
    """Return the number of keys that a position sees in a layer of attention, None for all before
    it.
    """
    kinds = getattr(text, "layer_types", None)
    kind = kinds[layer] if kinds else "sliding"
    if "chunked" in kind:
        raise ConfigError(f"{text.model_type!r} models attend in chunks, which are not predicted.")
    if "sliding" not in kind or not getattr(text, "use_sliding_window", True):
        return None
    config: Any = text.per_layer_config[layer] if getattr(text, "is_heterogeneous", False) else text
    return next(
        (value for name in _WINDOWS if isinstance(value := getattr(config, name, None), int)), None
    )


def _count_met_weights(module: nn.Module, text: PreTrainedConfig) -> int:
    """Count the weights of matrices that a token meets; weights shared by layers count in each of
    them.
    """
    met = 0.0
    for name, part in module.named_modules(remove_duplicate=False):
        weights = [weight for weight in part.parameters(recurse=False) if weight.dim() > 1]
        if "Expert" in type(part).__name__ and weights:
            used = next(
                (
                    value
                    for option in _ACTIVE_EXPERTS
                    if isinstance(value := getattr(text, option, None), int)
                ),
                None,
            )
            if used is None or max(weight.dim() for weight in weights) < 3:
                raise ConfigError(
                    f"{text.model_type!r} models do not say how many experts they have, and a token"
                    " meets."
                )
            met += sum(weight.numel() * min(used / len(weight), 1.0) for weight in weights)
        elif re.search(r"(?<!shared_)experts\.\d+$", name):
            raise ConfigError(
                f"{text.model_type!r} models have their experts in a list, which is not counted."
            )
        elif not isinstance(part, nn.Embedding):
            met += sum(weight.numel() for weight in weights)
    return round(met)
