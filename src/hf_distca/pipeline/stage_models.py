"""Causal language models of transformers that can be split into stages, and the rest of a model on
one stage.

The model stays what it is: layers of other stages become modules that do nothing, so that every
layer keeps its number, by which models read their config, and every weight its name, by which
checkpoints know it. What a model does to its embeddings before the layers, and to hidden states
after them, happens on every stage; its result is used on the first and on the last stage only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_distca.errors import ConfigError, UnsupportedError
from hf_distca.integration.attention_names import find_distca_configs
from hf_distca.integration.families import check_family, check_layerdrop

__all__ = ["SPLIT", "TIED", "ModelParts", "StageModel", "check_split", "layers_of_stages"]

# Two stages, one after the other, give the logits and gradients of the whole model.
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
TIED = "tied weights"  # the fact that names them
_AFTER = ("norm", "ln_f")  # in the names of modules that follow the layers
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE_EXPERTS = ("num_experts_per_tok", "moe_topk", "top_k_experts")


def check_split(model: PreTrainedModel) -> None:
    """Raise unless a model is known to be the same in stages.

    Raises:
        ConfigError: if its attention is not distca's.
        UnsupportedError: with the reason.
    """
    config = model.config
    check_family(config.model_type, encoder_decoder=config.is_encoder_decoder)
    if not find_distca_configs(model):
        name = getattr(config, "_attn_implementation", None)
        raise ConfigError(
            f'{type(model).__name__} has attn_implementation="{name}", whose attention stages'
            ' cannot share: load the model with attn_implementation="distca".'
        )
    check_layerdrop(config)
    why = None
    text_config = config.get_text_config(decoder=True)
    if config.model_type not in SPLIT:
        why = (
            "models of this family were never compared with their stages, or are not layers between"
            " an embedding and a head"
        )
    elif shared := getattr(text_config, "num_kv_shared_layers", 0):
        why = (
            f"{shared} of its layers read keys of other layers (num_kv_shared_layers={shared}),"
            " which may be on another stage"
        )
    elif getattr(text_config, "output_router_logits", False):
        why = (
            "it adds a loss of its routers (output_router_logits=True), which stages do not hand"
            " on; set it to False"
        )
    if why is not None:
        raise _split_error(model, why)


@dataclass(frozen=True, eq=False)
class ModelParts:
    """The parts of a model.

    Attributes:
        layers: the decoder layers, of which each stage has consecutive ones.
        before, after: names of modules that only the first stage needs, and of modules that only
            the last one needs.
        embedding, head: the input embedding and the output projection.
    """

    layers: torch.nn.ModuleList
    before: tuple[str, ...]
    after: tuple[str, ...]
    embedding: torch.nn.Module
    head: torch.nn.Module

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelParts:
        """Find the parts of a model, which must be layers between an embedding and a head."""
        # It imports what registers distca.
        from transformers.modeling_layers import GradientCheckpointingLayer

        embedding, head = _find_ends(model)
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
        seen, before, after = set(layers.modules()), list[str](), list[str]()
        for name, module in model.named_modules():
            parent, _, child = name.rpartition(".")
            if module in seen or not any(True for _ in module.parameters()):
                continue
            if parent == decoder and isinstance(module, torch.nn.Embedding):
                before.append(name)
            elif module is head or (parent == decoder and any(part in child for part in _AFTER)):
                after.append(name)
            elif any(True for _ in module.parameters(recurse=False)):
                raise _split_error(
                    model,
                    f"{name or 'a weight'} is neither in its layers nor an embedding, a norm or a"
                    " head beside them",
                )
            else:
                continue
            seen.update(module.modules())
        return cls(layers, tuple(before), tuple(after), embedding, head)

    @property
    def tied(self) -> bool:
        """True if embedding and head have the same weight."""
        weight = getattr(self.embedding, "weight", None)
        return weight is not None and weight is getattr(self.head, "weight", None)

    def costs(self, model: PreTrainedModel) -> list[float]:
        """Return the multiplications per token, by layer; the first layer includes
        the embedding's, the last one the head's.

        Core attention is left out: stages share it.
        """
        config = model.config.get_text_config(decoder=True)
        active = min(1.0, _first_number(config, _ACTIVE_EXPERTS) / _first_number(config, _EXPERTS))
        costs = [
            sum(_token_cost(weight, active) for weight in layer.parameters())
            for layer in self.layers
        ]
        costs[0] += sum(weight.shape[-1] for weight in _weights(model, self.before))
        costs[-1] += sum(_token_cost(weight, 1.0) for weight in _weights(model, self.after))
        return costs


def _find_ends(model: PreTrainedModel) -> tuple[torch.nn.Module | None, torch.nn.Module | None]:
    """Return the input embedding and the output projection of a model."""
    modules: tuple[Any, Any] = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embedding, head = (
        module if isinstance(module, torch.nn.Module) else None for module in modules
    )
    return embedding, head


def _split_error(model: PreTrainedModel, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{type(model).__name__} ({model.config.model_type}) cannot be split into pipeline stages:"
        f" {why}. Train it with data parallelism (FSDP), whose ranks share attention too."
    )


def _weights(model: PreTrainedModel, names: Iterable[str]) -> list[torch.nn.Parameter]:
    """Return the weights of modules of these names."""
    return [weight for name in names for weight in model.get_submodule(name).parameters()]


def _first_number(config: object, names: Sequence[str]) -> int:
    """Return the first of these settings that is a positive number; 1 if none is."""
    return next(
        (
            value
            for name in names
            if isinstance(value := getattr(config, name, None), int) and value > 0
        ),
        1,
    )


def _token_cost(weight: torch.nn.Parameter, active: float) -> float:
    """Return the multiplications per token with a weight; the weights of all experts are one tensor
    of three dimensions.
    """
    return weight.numel() * (active if weight.dim() == 3 else 1.0)


def layers_of_stages(costs: Sequence[float], stages: int) -> list[int]:
    """Return the number of layers of each stage, at least one, such that the most expensive stage
    is as cheap as possible.
    """
    if not 1 <= stages <= len(costs):
        raise ConfigError(
            f"a model of {len(costs)} layers cannot be split into {stages} stages: each needs a"
            " layer."
        )
    totals = [0.0, *itertools.accumulate(costs)]

    @cache
    def cut(layers: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """Cut the first layers into so many stages: the cost of the most expensive one, and the
        number of layers of each.
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


class SkippedLayer(torch.nn.Module):
    """Placeholder of a module that is on another stage."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.zero = isinstance(module, torch.nn.Embedding)
        for name, value in vars(module).items():  # models read what kind of attention a layer has
            if (
                not name.startswith("_")
                and isinstance(value, (str, int, float, bool))
                and not hasattr(self, name)
            ):
                setattr(self, name, value)

    def forward(self, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the inputs; for an embedding a zero, which may be added to hidden states that are
        not used.
        """
        return torch.zeros((), device=inputs.device) if self.zero else inputs


class FirstStageGate(SkippedLayer):
    """The layer before the first one of a stage: feeds it the hidden states from the previous
    stage.
    """

    hidden_states: torch.Tensor | None = None

    def forward(self, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the hidden states that arrived."""
        return inputs if self.hidden_states is None else self.hidden_states


class LastStageGate(SkippedLayer):
    """The layer after the last one of a stage: keeps the hidden states that go to the next
    stage.
    """

    hidden_states: torch.Tensor | None = None

    def forward(self, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the inputs, and keep them."""
        self.hidden_states = inputs
        return inputs


class StageModel(torch.nn.Module):
    """A stage of a model: the module that `torch.distributed.pipelining` runs.

    `layers` is the number of layers of each stage. `tied` says whether embedding and head share
    their weight; by default they do if they do in the model.

    Attributes:
        model: the model that was given, whole or with the stage's weights alone; other stages'
            modules have left it. Its weights have the names that they have in checkpoints.
        stage, stages: number of the stage, and of all stages.
        tied: whether embedding and head have the same weight, of which the first and the last stage
            have a copy each.
        facts: properties that must be equal on the stages of all ranks, by name.
    """

    def __init__(
        self, model: PreTrainedModel, stage: int, layers: Sequence[int], *, tied: bool | None = None
    ) -> None:
        super().__init__()
        parts = ModelParts.of(model)
        if sum(layers) != len(parts.layers) or min(layers) < 1:
            raise ConfigError(
                f"layers={list(layers)} must be at least 1 for each stage, {len(parts.layers)} in"
                " all."
            )
        self.stage, self.stages, self.tied = (
            stage,
            len(layers),
            parts.tied if tied is None else tied,
        )
        self.facts = _shared_facts(model, parts, layers, tied=self.tied)
        begin = sum(layers[:stage])
        edges: list[FirstStageGate | LastStageGate | None] = [None, None]
        for number, layer in enumerate(parts.layers):
            if number == begin - 1:
                edges[0] = parts.layers[number] = FirstStageGate(layer)
            elif number == begin + layers[stage]:
                edges[1] = parts.layers[number] = LastStageGate(layer)
            elif not begin <= number < begin + layers[stage]:
                parts.layers[number] = SkippedLayer(layer)
        # A tuple, which registers no modules: they are the model's already.
        self._edges = tuple(edges)
        self._before = () if self.is_first else parts.before
        _replace_by_placeholders(
            model, (() if self.is_last else parts.after) + (() if tied else self._before)
        )
        self.model = model

    @property
    def is_first(self) -> bool:
        """True if this is the first stage."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """True if this is the last stage."""
        return self.stage == self.stages - 1

    @property
    def width(self) -> int:
        """Width of hidden states."""
        width: int = self.model.config.get_text_config(decoder=True).hidden_size
        return width

    @property
    def head(self) -> torch.nn.Module | None:
        """The output projection; on other stages than the last one its placeholder."""
        return _find_ends(self.model)[1]

    @property
    def tied_weight(self) -> torch.nn.Parameter | None:
        """The weight of which another stage has a copy, so that gradients of both must be
        summed.
        """
        if not self.tied or self.stages == 1 or not (self.is_first or self.is_last):
            return None
        module: Any = _find_ends(self.model)[0 if self.is_first else 1]
        weight: torch.nn.Parameter = module.weight
        return weight

    def drop_embedding(self) -> None:
        """Drop the embedding of the last stage, from which a tied head got its weight."""
        _replace_by_placeholders(self.model, self._before)

    def forward(self, inputs: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Run the stage.

        Args:
            inputs: (batch, tokens) token ids on the first stage, (batch, tokens, width) hidden
                states on others.
            kwargs: of the model's forward, such as ``position_ids``.

        Returns:
            (batch, tokens, width) hidden states; of the last stage logits, (batch, tokens,
            vocabulary).
        """
        entrance, exit_ = self._edges
        arguments = {
            "input_ids" if self.is_first else "inputs_embeds": inputs,
            "use_cache": False,
            **kwargs,
        }
        if entrance is not None:
            entrance.hidden_states = inputs
        try:
            if exit_ is None:
                output: Any = self.model(**arguments).logits
            else:
                self.model.base_model(**arguments)
                output = exit_.hidden_states
        finally:
            for edge in (entrance, exit_):
                if edge is not None:
                    edge.hidden_states = None
        if not isinstance(output, torch.Tensor):
            name = f"stage {self.stage} of {type(self.model).__name__}"
            raise UnsupportedError(
                f"{name} put out a {type(output).__name__}, and stages hand on one tensor."
            )
        return output


def _shared_facts(
    model: PreTrainedModel, parts: ModelParts, layers: Sequence[int], *, tied: bool
) -> dict[str, str]:
    """Return the properties that must be equal on the stages of all ranks: the model and its
    division.
    """
    config = {
        f"config.{name}": repr(value)
        for name, value in model.config.to_dict().items()
        if not name.startswith("_")
    }
    names = [
        f"{name}.weight"
        for name, module in model.named_modules()
        if module in (parts.embedding, parts.head)
    ]
    shared = {TIED: " and ".join(names)} if tied else {}
    made_of = {
        "hf-distca": version("hf-distca"),
        "the model": type(model).__name__,
        "layers of each stage": str(list(layers)),
    }
    return {**made_of, **shared, **config}


def _replace_by_placeholders(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Replace modules of other stages by placeholders."""
    for name in names:
        holder, _, child = name.rpartition(".")
        setattr(model.get_submodule(holder), child, SkippedLayer(model.get_submodule(name)))
