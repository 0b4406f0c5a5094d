"""The models of transformers that can be split into stages, the parts of a model, and the division
of its layers into stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_distca.errors import ConfigError, UnsupportedError
from hf_distca.integration.attention_names import find_distca_configs
from hf_distca.integration.families import check_family, check_layerdrop

# Tested families of models, for which two stages give the logits and gradients of the whole model.
_SPLIT = """
    afmoe apertus arcee aria_text axk1 beam biogpt bitnet cohere cohere2 cohere2_moe
    cohere_compass_text cwm dbrx deepseek_v2 deepseek_v3 diffllama dots1 emu3 ernie4_5 ernie4_5_moe
    exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text gemma4_unified_text glm glm4
    glm4_moe glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa granitemoe
    granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax
    internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama llama4 llama4_text longcat_flash mellum
    mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mistral mixtral moshi nanochat nemotron
    olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss
    smollm3 solar_open stablelm starcoder2 vaultgemma youtu
"""

SPLIT = frozenset(_SPLIT.split())
_AFTER = ("norm", "ln_f")  # parts of the names of modules that follow the layers
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE_EXPERTS = ("num_experts_per_tok", "moe_topk", "top_k_experts")


def check_split(model: PreTrainedModel) -> None:
    """Raise unless a model is known to give the same results when it is split into stages.

    Raises:
        ConfigError: if the model's attention is not distca's.
        UnsupportedError: if the model cannot be split. The error names the reason.
    """
    config = model.config
    check_family(config.model_type, encoder_decoder=config.is_encoder_decoder)
    if not find_distca_configs(model):
        name = getattr(config, "_attn_implementation", None)
        raise ConfigError(
            f'{type(model).__name__} has attn_implementation="{name}", which stages cannot share:'
            ' load the model with attn_implementation="distca".'
        )
    check_layerdrop(config)
    text_config = config.get_text_config(decoder=True)
    shared = getattr(text_config, "num_kv_shared_layers", 0)
    reasons = {
        "nobody has tested models of this family in stages, or they do not consist of layers"
        " between an embedding and a head": config.model_type not in SPLIT,
        f"{shared} of its layers read keys of other layers (num_kv_shared_layers={shared}), which"
        " may be on another stage": shared,
        "output_router_logits=True adds a loss of its routers, which stages do not pass on; set"
        " output_router_logits=False": getattr(text_config, "output_router_logits", False),
    }
    for why, applies in reasons.items():
        if applies:
            raise _split_error(model, why)


@dataclass(frozen=True, eq=False)
class ModelParts:
    """The parts of a model.

    Attributes:
        layers: the decoder layers. Each stage gets consecutive layers.
        before, after: names of modules that only the first stage needs, and of modules that only
            the last stage needs.
        embedding, head: the input embedding and the output projection.
    """

    layers: torch.nn.ModuleList
    before: tuple[str, ...]
    after: tuple[str, ...]
    embedding: Any
    head: Any

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> ModelParts:
        """Find the parts of a model that consists of layers between an embedding and a head."""
        # This import is not at the top of the file, because it triggers the registration of distca.
        from transformers.modeling_layers import GradientCheckpointingLayer

        embedding, head = find_ends(model)
        if embedding is None or head is None:
            raise _split_error(model, "it has no input embedding and output projection")
        lists = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.ModuleList)
            and len(module)
            and all(isinstance(layer, GradientCheckpointingLayer) for layer in module)
        }
        if len(lists) != 1:
            raise _split_error(model, f"it has {len(lists)} lists of layers, not one")
        ((layers_name, layers),) = lists.items()
        decoder = layers_name.rpartition(".")[0]
        known = set(layers.parameters())
        before, after = list[str](), list[str]()
        for name, module in model.named_modules():
            parent, _, child = name.rpartition(".")
            is_next = parent == decoder and any(True for _ in module.parameters())
            if is_next and isinstance(module, torch.nn.Embedding):
                before.append(name)
            elif module is head or (is_next and any(part in child for part in _AFTER)):
                after.append(name)
            else:
                continue
            known.update(module.parameters())
        for name, weight in model.named_parameters():
            if weight not in known:
                raise _split_error(
                    model,
                    f"{name.rpartition('.')[0] or name} is neither in its layers nor an embedding,"
                    " a norm or a head next to them",
                )
        return cls(layers, tuple(before), tuple(after), embedding, head)

    @property
    def tied(self) -> bool:
        """True if embedding and head have the same weight."""
        return self.embedding.weight is self.head.weight

    def estimate_layer_costs(self, model: PreTrainedModel) -> list[float]:
        """Estimate the multiplications per token in each layer. The last layer includes the head.

        Core attention is left out, because stages share it. The lookup in an embedding is left out,
        because it costs almost nothing.
        """
        config = model.config.get_text_config(decoder=True)
        active = min(
            1.0, _find_first_number(config, _ACTIVE_EXPERTS) / _find_first_number(config, _EXPERTS)
        )
        # A weight with three dimensions holds all experts, but a token meets only some of them.
        costs = [
            sum(
                weight.numel() * (active if weight.dim() == 3 else 1.0)
                for weight in layer.parameters()
            )
            for layer in self.layers
        ]
        costs[-1] += sum(
            weight.numel()
            for name in self.after
            for weight in model.get_submodule(name).parameters()
        )
        return costs


def find_ends(model: PreTrainedModel) -> tuple[Any, Any]:
    """Return the input embedding and the output projection of a model; None for a missing one."""
    return model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]


def _split_error(model: PreTrainedModel, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{type(model).__name__} ({model.config.model_type}) cannot be split into pipeline stages:"
        f" {why}. Train it with data parallelism (FSDP), whose ranks share attention too."
    )


def _find_first_number(config: object, names: Sequence[str]) -> int:
    """Return the first positive whole number among the settings with these names, or else 1."""
    return next(
        (
            value
            for name in names
            if isinstance(value := getattr(config, name, None), int) and value > 0
        ),
        1,
    )


def divide_layers(costs: Sequence[float], stages: int) -> list[int]:
    """Choose the number of layers of each stage, at least one, so that the most expensive stage is
    as cheap as possible.
    """
    if not 1 <= stages <= len(costs):
        raise ConfigError(
            f"a model of {len(costs)} layers cannot be split into {stages} stages: each stage needs"
            " a layer."
        )
    totals = [0.0, *itertools.accumulate(costs)]

    @cache
    def cut(layers: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """Divide the first `layers` layers into stages. Return the cost of the most expensive
        stage, and the number of layers of each stage.
        """
        if stages == 1:
            return totals[layers], (layers,)
        cuts = ((*cut(begin, stages - 1), begin) for begin in range(stages - 1, layers))
        choices = (
            (max(most, totals[layers] - totals[begin]), (*rest, layers - begin))
            for most, rest, begin in cuts
        )
        return min(choices, key=lambda choice: choice[0])

    return list(cut(len(costs), stages)[1])
