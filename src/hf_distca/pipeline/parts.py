"""The parts of a causal language model that can be on different stages, what they cost, and how many layers a stage gets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_distca.errors import ConfigError, UnsupportedError

__all__ = ["Parts", "embedding_of", "head_of", "layers_of_stages"]

_AFTER = ("norm", "ln_f")  # in the names of modules that follow the layers


@dataclass(frozen=True, eq=False)
class Parts:
    """Where the parts of a model are.

    Attributes:
        layers: the decoder layers, of which each stage has a run.
        before, after: names of modules that only the first stage needs, and of those that only the last one needs.
        embedding, head: the input embedding and the output projection.
        tied: whether both have the same weight.
    """

    layers: torch.nn.ModuleList
    before: tuple[str, ...]
    after: tuple[str, ...]
    embedding: torch.nn.Module
    head: torch.nn.Module
    tied: bool

    @classmethod
    def of(cls, model: PreTrainedModel) -> Parts:
        """Find the parts of a model.

        Raises:
            UnsupportedError: if it is not layers between an embedding and a head.
        """
        embedding, head = embedding_of(model), head_of(model)
        if embedding is None or head is None:
            raise _cannot(model, "it has no input embedding and output projection")
        name, layers = _decoder_layers(model)
        root = name.rpartition(".")[0]
        decoder = model.get_submodule(root)
        before, after = list[str](), list[str]()
        for child, module in decoder.named_children():
            full = f"{root}.{child}" if root else child
            if module is layers or not any(True for _ in module.parameters()):
                continue
            if isinstance(module, torch.nn.Embedding):
                before.append(full)
            elif any(part in child for part in _AFTER):
                after.append(full)
            else:
                raise _cannot(model, f"{full} is neither an embedding nor a norm")
        heads = [at for at, module in model.named_modules() if module is head]
        found = cls(layers, tuple(before), (*after, *heads), embedding, head, _same(embedding, head))
        outside = (
            _parameters(model) - _parameters(layers) - {p for at in found.ends for p in _parameters(model.get_submodule(at))}
        )
        if outside:
            names = [at for at, parameter in model.named_parameters() if id(parameter) in outside]
            raise _cannot(model, f"{', '.join(names[:3])} {'are' if len(names) > 1 else 'is'} outside its layers")
        return found

    @property
    def ends(self) -> tuple[str, ...]:
        """Names of the modules before and after the layers."""
        return self.before + self.after

    def costs(self, model: PreTrainedModel) -> list[float]:
        """Numbers that a token is multiplied with, by layer; the first has those of the embedding, the last those of the head.

        Core attention is not among them: stages share it.
        """
        experts = _active_experts(model)
        costs = [sum(_cost(parameter, experts) for parameter in layer.parameters()) for layer in self.layers]
        costs[0] += sum(parameter.shape[-1] for at in self.before for parameter in model.get_submodule(at).parameters())
        costs[-1] += sum(_cost(parameter, 1.0) for at in self.after for parameter in model.get_submodule(at).parameters())
        return costs


def layers_of_stages(costs: Sequence[float], stages: int) -> list[int]:
    """How many layers each stage gets, so that the most expensive stage is as cheap as can be.

    Args:
        costs: of each layer.
        stages: how many stages; each gets at least one layer.

    Raises:
        ConfigError: if there are fewer layers than stages.
    """
    if not 1 <= stages <= len(costs):
        raise ConfigError(f"a model of {len(costs)} layers cannot be split into {stages} stages: each needs a layer.")
    until = [0.0, *itertools.accumulate(costs)]
    # Of the first n layers over a number of stages: the cost of the most expensive stage, and where the last stage begins.
    best = [(until[n], 0) for n in range(len(costs) + 1)]
    cuts = [best]
    for stage in range(2, stages + 1):
        best = [
            min(((max(cuts[-1][at][0], until[n] - until[at]), at) for at in range(stage - 1, n)), default=(math.inf, 0))
            for n in range(len(costs) + 1)
        ]
        cuts.append(best)
    found, end = list[int](), len(costs)
    for each in reversed(cuts):
        begin = each[end][1]
        found.append(end - begin)
        end = begin
    return found[::-1]


def embedding_of(model: PreTrainedModel) -> torch.nn.Module | None:
    """The input embedding of a model."""
    found: Any = model.get_input_embeddings()
    return found if isinstance(found, torch.nn.Module) else None


def head_of(model: PreTrainedModel) -> torch.nn.Module | None:
    """The output projection of a model."""
    found: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return found if isinstance(found, torch.nn.Module) else None


def _decoder_layers(model: PreTrainedModel) -> tuple[str, torch.nn.ModuleList]:
    from transformers.modeling_layers import GradientCheckpointingLayer  # it imports what registers distca

    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        and len(module)
        and all(isinstance(one, GradientCheckpointingLayer) for one in module)
    ]
    if len(lists) != 1:
        raise _cannot(model, f"it has {len(lists)} lists of layers, not one")
    return lists[0]


def _cannot(model: PreTrainedModel, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{type(model).__name__} ({model.config.model_type}) cannot be split into pipeline stages: {why}. Train it with data "
        "parallelism (FSDP), whose ranks share attention too."
    )


def _same(embedding: torch.nn.Module, head: torch.nn.Module) -> bool:
    first, second = getattr(embedding, "weight", None), getattr(head, "weight", None)
    return first is not None and first is second


def _parameters(module: torch.nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


def _active_experts(model: PreTrainedModel) -> float:
    """The part of its experts that a token goes through."""
    config = model.config.get_text_config(decoder=True)
    of, all_ = (next(_numbers(config, names), 1) for names in (("num_experts_per_tok", "moe_topk", "top_k_experts"), _EXPERTS))
    return min(1.0, of / all_)


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def _numbers(config: object, names: Sequence[str]) -> Iterator[int]:
    return (value for name in names if isinstance(value := getattr(config, name, None), int) and value > 0)


def _cost(parameter: torch.nn.Parameter, experts: float) -> float:
    """Numbers of a weight that a token is multiplied with; weights of all experts are one tensor of three dimensions."""
    return parameter.numel() * (experts if parameter.dim() == 3 else 1.0)
