"""`count_model`: counts the attention layers and weights of a model that is built on torch's meta
device, where it takes no memory. `count_tokens`: counts the tokens of texts.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from hf_distca.errors import ConfigError
from hf_distca.integration.families import check_family
from hf_distca.integration.layer_kinds import count_layers
from hf_distca.tools.advise.known_models import Model
from hf_distca.tools.doctor.model import read_config

_EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")


def count_model(path: Path) -> Model:
    """Count the attention layers and the weights of the model that a config.json describes. If the
    model has several parts, count only the part that writes text.

    Raises:
        ConfigError: if there is no such file, or if the model has layers that cannot be counted.
        UnsupportedError: if distca does not support the model.
    """
    config = read_config(str(path))
    check_family(config.model_type, encoder_decoder=config.is_encoder_decoder)
    text = config.get_text_config(decoder=True)
    kinds = count_layers(text, torch.bfloat16, "cpu")
    if any(key.chunk is not None for key in kinds):
        raise ConfigError(
            f"{text.model_type!r} models attend in chunks: there is no estimate for such models."
        )
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(text, attn_implementation="eager")  # type: ignore[no-untyped-call]
    except Exception as error:  # the model's own code may raise anything
        raise ConfigError(
            f"transformers cannot build a causal language model of type {text.model_type!r} from"
            f" {path}: {error}"
        ) from error
    modules = dict(model.named_modules(remove_duplicate=False))
    attending = sum(
        bool(getattr(module, "is_causal", False)) and "cross" not in place
        for place, module in modules.items()
    )
    if not attending:
        raise ConfigError(f"{text.model_type!r} models have no layer with causal attention.")
    if len(kinds) == 1:  # the config does not tell which layers attend
        kinds = dict.fromkeys(kinds, attending)
    return Model(
        str(path),
        tuple((key.shape, key.window, count) for key, count in kinds.items()),
        sum(_count_met_weights(module, text) for module in modules.values()),
    )


def count_tokens(texts: list[str], tokenizer: str) -> list[int]:
    """Count the tokens of each text.

    Args:
        texts: the texts.
        tokenizer: name or folder of a tokenizer, for `AutoTokenizer.from_pretrained`.

    Raises:
        ConfigError: if there is no such tokenizer.
    """
    try:
        tokenize = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tokenizer {tokenizer}: {str(error).splitlines()[0]}") from error
    blocks = (texts[first : first + 1024] for first in range(0, len(texts), 1024))
    return [len(ids) for block in blocks for ids in tokenize(block, verbose=False)["input_ids"]]


def _count_met_weights(module: nn.Module, text: PreTrainedConfig) -> float:
    """Count the weights by which a module, without its submodules, multiplies a token. If the
    module consists of experts, count only as many experts as a token uses.
    """
    sizes = [weight.shape for weight in module.parameters(recurse=False) if weight.dim() > 1]
    count = 0.0 if isinstance(module, nn.Embedding) else float(sum(map(torch.Size.numel, sizes)))
    if not sizes or "Expert" not in type(module).__name__:
        return count
    used = (getattr(text, option, None) for option in _EXPERTS_OF_A_TOKEN)
    experts = next((value for value in used if isinstance(value, int)), None)
    if experts is None or max(map(len, sizes)) < 3:
        raise ConfigError(
            f"the config of {text.model_type!r} models does not tell how many experts a token uses."
        )
    return count * min(experts / sizes[0][0], 1.0)
