"""`StageModel`: a causal language model of transformers that is reduced to one stage.

The class of the model stays the same. Layers of other stages become modules that do nothing. So
every layer keeps its index, which models use to look up values in their config, and every weight
keeps its name in checkpoints. Every stage also runs the model's operations before and after the
layers, but their results are used only on the first and on the last stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_distca.errors import ConfigError
from hf_distca.pipeline.model_parts import ModelParts, find_ends

TIED = "tied weights"  # a key of `StageModel.facts`


class SkippedLayer(torch.nn.Module):
    """Placeholder of a module that is on another stage."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.zero = isinstance(module, torch.nn.Embedding)
        for name, value in vars(module).items():  # models read attributes of their layers
            if (
                not name.startswith("_")
                and isinstance(value, (str, int, float, bool))
                and not hasattr(self, name)
            ):
                setattr(self, name, value)

    def forward(self, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the inputs. A placeholder of an embedding returns a zero instead. The model may
        add this zero to hidden states, but their values are not used.
        """
        return torch.zeros((), device=inputs.device) if self.zero else inputs


class Gate(SkippedLayer):
    """Placeholder of the layer just before, or just after, the layers of a stage.

    Attributes:
        arrived: hidden states from the previous stage, to be returned instead of the inputs.
        left: inputs of the last forward, which are the hidden states for the next stage.
    """

    arrived: torch.Tensor | None = None
    left: torch.Tensor | None = None

    def forward(self, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Keep the inputs. Return the hidden states that arrived, or the inputs if none arrived."""
        self.left = inputs
        return inputs if self.arrived is None else self.arrived


class StageModel(torch.nn.Module):
    """A stage of a model: the module that `torch.distributed.pipelining` runs.

    `layers` is the number of layers of each stage. `tied` tells whether embedding and head share
    their weight. By default, the weights of `model` decide this.

    Attributes:
        model: the given model, without the modules of other stages. Its weights have the same names
            as in checkpoints.
        stage, stages: index of the stage, and number of stages.
        tied: whether embedding and head share their weight. If so, the first and the last stage
            have a copy each.
        facts: properties that must be equal on all ranks, by name.
    """

    def __init__(
        self, model: PreTrainedModel, stage: int, layers: Sequence[int], *, tied: bool | None = None
    ) -> None:
        super().__init__()
        parts = ModelParts.from_model(model)
        if sum(layers) != len(parts.layers) or min(layers) < 1:
            raise ConfigError(
                f"layers={list(layers)} must give each stage at least 1 layer, and add up to the"
                f" model's {len(parts.layers)} layers."
            )
        self.stage = stage
        self.stages = len(layers)
        self.tied = parts.tied if tied is None else tied
        self.facts = _collect_shared_facts(model, parts, layers, tied=self.tied)
        begin = sum(layers[:stage])
        end = sum(layers[: stage + 1])
        for number, layer in enumerate(parts.layers):
            if not begin <= number < end:
                kind = Gate if number in (begin - 1, end) else SkippedLayer
                parts.layers[number] = kind(layer)
        # A tuple keeps this module from registering the gates, which are modules of the model.
        self._gates: tuple[Any, Any] = (
            None if self.is_first else parts.layers[begin - 1],
            None if self.is_last else parts.layers[end],
        )
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
        return int(self.model.config.get_text_config(decoder=True).hidden_size)

    @property
    def tied_weight(self) -> torch.nn.Parameter | None:
        """This stage's copy of a tied weight; None without such a copy. Another stage has the other
        copy, and the gradients of both copies must be summed.
        """
        if not self.tied or self.is_first == self.is_last:
            return None
        weight: torch.nn.Parameter = find_ends(self.model)[self.is_last].weight
        return weight

    def drop_embedding(self) -> None:
        """Drop the embedding on all stages but the first. A tied head keeps the shared weight."""
        _replace_by_placeholders(self.model, self._before)

    def forward(self, inputs: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Run the stage.

        Args:
            inputs: (batch, tokens) token ids on the first stage, (batch, tokens, width) hidden
                states on other stages.
            kwargs: arguments of the model's forward, such as ``position_ids``.

        Returns:
            (batch, tokens, width) hidden states; on the last stage, (batch, tokens, vocabulary)
            logits.
        """
        entrance, exit_ = self._gates
        arguments = {
            "input_ids" if self.is_first else "inputs_embeds": inputs,
            "use_cache": False,
            **kwargs,
        }
        if entrance is not None:
            entrance.arrived = inputs
        try:
            if exit_ is None:
                output: torch.Tensor = self.model(**arguments).logits
            else:
                self.model.base_model(**arguments)
                output = exit_.left
        finally:
            for gate in filter(None, self._gates):
                gate.arrived = gate.left = None
        return output


def _collect_shared_facts(
    model: PreTrainedModel, parts: ModelParts, layers: Sequence[int], *, tied: bool
) -> dict[str, str]:
    """Return the properties of the model and its division into stages, by name. These properties
    must be equal on all ranks.
    """
    ends = [
        f"{name}.weight"
        for name, module in model.named_modules()
        if module in (parts.embedding, parts.head)
    ]
    return {
        "hf-distca": version("hf-distca"),
        "the model": type(model).__name__,
        "layers of each stage": str(list(layers)),
        **({TIED: " and ".join(ends)} if tied else {}),
        **{
            f"config.{name}": repr(value)
            for name, value in model.config.to_dict().items()
            if not name.startswith("_")
        },
    }


def _replace_by_placeholders(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Replace modules of other stages by placeholders."""
    for name in names:
        holder, _, child = name.rpartition(".")
        setattr(model.get_submodule(holder), child, SkippedLayer(model.get_submodule(name)))
