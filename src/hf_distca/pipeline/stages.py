"""`split`: a causal language model of transformers becomes this rank's stage of a pipeline.

The model stays what it is: layers of other stages become modules that do nothing, so that every layer keeps its number, which
models read their config by, and every weight its name, which checkpoints know it by. What a model does to its embeddings before
the layers, and to hidden states after them, happens on every stage; its result is used on the first and on the last stage only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from hf_distca.errors import ConfigError, UnsupportedError
from hf_distca.integration.families import check_family, check_layerdrop
from hf_distca.integration.loading import distca_configs
from hf_distca.pipeline.borrowed_pipelining import without_peft

__all__ = [
    "SPLIT",
    "TIED",
    "ModelParts",
    "Stage",
    "StageModel",
    "check_mesh",
    "check_split",
    "head_of",
    "layers_of_stages",
    "split",
    "stage_layers",
    "stage_model",
]

# Two stages, one after the other, give the logits and gradients of the whole model.
_SPLIT = """
    afmoe apertus arcee aria_text axk1 beam biogpt bitnet cohere cohere2 cohere2_moe cohere_compass_text cwm dbrx
    deepseek_v2 deepseek_v3 diffllama dots1 emu3 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2
    gemma3_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss granite
    granite_swa granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax
    internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama llama4 llama4_text longcat_flash mellum mimo_v2_flash
    minicpm3 minimax_m2 ministral ministral3 mistral mixtral moshi nanochat nemotron olmo olmo2 olmo3 olmoe opt
    persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2
    vaultgemma youtu
"""

SPLIT = frozenset(_SPLIT.split())
TIED = "tied weights"  # the fact that names them


class Absent(torch.nn.Module):
    """In the place of a module that is on another stage."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.zero = isinstance(module, torch.nn.Embedding)
        for name, value in vars(module).items():  # models read what kind of attention a layer has
            if not name.startswith("_") and isinstance(value, (str, int, float, bool)) and not hasattr(self, name):
                setattr(self, name, value)

    def forward(self, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The inputs; for an embedding a zero, which may be added to hidden states that are not used."""
        return torch.zeros((), device=inputs.device) if self.zero else inputs


class Entrance(Absent):
    """The layer before the first one of a stage: gives it what came from the stage before.

    Attributes:
        arrived: hidden states of the micro-batch at hand.
    """

    arrived: torch.Tensor | None = None

    def forward(self, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What arrived."""
        return inputs if self.arrived is None else self.arrived


class Exit(Absent):
    """The layer after the last one of a stage: keeps what goes to the next stage.

    Attributes:
        leaving: hidden states of the micro-batch at hand.
    """

    leaving: torch.Tensor | None = None

    def forward(self, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The inputs, which are kept."""
        self.leaving = inputs
        return inputs


class StageModel(torch.nn.Module):
    """A stage of a model: what `torch.distributed.pipelining` runs.

    Args:
        model: the whole model, or one that has only the stage's weights. It is changed: the other stages' modules leave it.
        stage: which stage.
        layers: how many layers each stage has.
        tied: whether embedding and head are to have the same weight; by default whether they have.

    Attributes:
        model: the model without other stages' modules. Its weights have the names that they have in checkpoints.
        stage, stages: which stage, and of how many.
        tied: whether embedding and head have the same weight, of which the first and the last stage have a copy each.
        facts: what the stages of all ranks must have in common, by name.
    """

    def __init__(self, model: PreTrainedModel, stage: int, layers: Sequence[int], *, tied: bool | None = None) -> None:
        super().__init__()
        parts = ModelParts.of(model)
        if sum(layers) != len(parts.layers) or min(layers) < 1:
            raise ConfigError(f"layers={list(layers)} must be at least 1 for each stage, {len(parts.layers)} in all.")
        self.stage, self.stages, self.tied = stage, len(layers), parts.tied if tied is None else tied
        self.facts = _facts(model, parts, layers, tied=self.tied)
        begin = sum(layers[:stage])
        _leave_layers(parts.layers, range(begin, begin + layers[stage]))
        self._before = () if self.is_first else parts.before
        _leave(model, (() if self.is_last else parts.after) + (() if tied else self._before))
        self.model = model
        ends = (self._only(Entrance), self._only(Exit))
        self._ends = ends  # a tuple: they are modules of the model already

    @property
    def is_first(self) -> bool:
        """Whether it is the first stage."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it is the last stage."""
        return self.stage == self.stages - 1

    def loaded(self) -> None:
        """A tied head got its weight from the embedding, if it was to be loaded: now that is not needed any more."""
        _leave(self.model, self._before)

    @property
    def tied_weight(self) -> torch.nn.Parameter | None:
        """The weight of which another stage has a copy: its gradients are to be summed."""
        if not self.tied or self.stages == 1 or not (self.is_first or self.is_last):
            return None
        module: Any = embedding_of(self.model) if self.is_first else head_of(self.model)
        weight: torch.nn.Parameter = module.weight
        return weight

    def forward(self, inputs: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Run the stage.

        Args:
            inputs: (batch, tokens) token ids on the first stage, (batch, tokens, width) hidden states on others.
            kwargs: of the model's forward, such as ``position_ids``.

        Returns:
            (batch, tokens, width) hidden states; of the last stage logits, (batch, tokens, vocabulary).
        """
        entrance, exit_ = self._ends
        arguments = {"input_ids" if self.is_first else "inputs_embeds": inputs, "use_cache": False, **kwargs}
        if entrance is not None:
            entrance.arrived = inputs
        try:
            if self.is_last:
                output: Any = self.model(**arguments).logits
            else:
                self.model.base_model(**arguments)
                output = None if exit_ is None else exit_.leaving
        finally:
            if entrance is not None:
                entrance.arrived = None
            if exit_ is not None:
                exit_.leaving = None
        if not isinstance(output, torch.Tensor):
            name = f"stage {self.stage} of {type(self.model).__name__}"
            raise UnsupportedError(f"{name} put out a {type(output).__name__}, and stages hand on one tensor.")
        return output

    def _only(self, kind: type[Any]) -> Any:
        return next((module for module in self.model.modules() if isinstance(module, kind)), None)


class Stage(PipelineStage):
    """This rank's stage, as torch's schedules take it. It runs micro-batches inside DDP and FSDP, too.

    Attributes:
        mesh: the pipeline dimension of the device mesh, whose ranks have the stages.
    """

    def __init__(self, model: StageModel, mesh: DeviceMesh) -> None:
        super().__init__(model, model.stage, model.stages, torch.device(mesh.device_type), group=mesh.get_group())
        self.mesh = mesh
        self._running: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # inputs and output of micro-batches
        self._follow()

    def clear_runtime_states(self) -> None:
        """Begin a step: without micro-batches of one that failed, on the device of the weights, with sharded weights sharded."""
        super().clear_runtime_states()
        self._running.clear()
        self._follow()
        self.reshard()

    def reshard(self) -> None:
        """Shard the weights that FSDP2 leaves whole after a forward without a backward: gradients are of sharded ones."""
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _follow(self) -> None:
        """Be on the device of the weights, which may have moved since the model was split."""
        weight = next(self.submod.parameters(), None)
        self.device = self.device if weight is None else weight.device

    def run_forward(self, number: int, inputs: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """Run the forward of a micro-batch of this number, and keep what its backward needs.

        Args and results are those of `StageModel.forward`.
        """
        output: torch.Tensor = self.forward_maybe_with_nosync(inputs, **kwargs)  # type: ignore[no-untyped-call]
        if self.has_backward:
            self._running[number] = inputs, output
        return output

    def run_backward(self, number: int, gradient: torch.Tensor | None, loss: torch.Tensor | None, *, last: bool) -> torch.Tensor:
        """Run the backward of a micro-batch.

        Args:
            number: of the micro-batch.
            gradient: of the output; None on the last stage.
            loss: on the last stage; None on others.
            last: whether no other backward of this step follows: then DDP sums gradients over copies.

        Returns:
            The gradient of the inputs, of their shape; zeros if nothing depends on them.
        """
        inputs, output = self._running.pop(number)
        values: dict[str, Any] = {"stage_output": (output,), "output_grads": (gradient,), "input_values": [inputs]}
        if loss is not None:
            values |= {"stage_output": loss, "output_grads": None}
        gradients, _ = self.backward_maybe_with_nosync("full", values, last_backward=last)
        return torch.zeros_like(inputs) if gradients[0] is None else gradients[0]


def stage_model(stage: Stage) -> StageModel:
    """The model of a stage, without DDP around it.

    Raises:
        ConfigError: if something else was put around it.
    """
    module = stage.submod.module if isinstance(stage.submod, DistributedDataParallel) else stage.submod
    if not isinstance(module, StageModel):
        raise ConfigError(
            f"the stage runs a {type(module).__name__}: put DDP or fully_shard around what split() made, or parts of it."
        )
    return module


def split(model: PreTrainedModel, mesh: DeviceMesh, *, layers: Sequence[int] | None = None) -> Stage:
    """Split a causal language model over the ranks of a mesh dimension.

    All ranks of the mesh must have the same model. It is changed: what is on other stages leaves it. For models that do not fit
    into the memory of one rank, see `from_pretrained`.

    Args:
        model: a causal language model of transformers, with ``attn_implementation="distca"``; or one of peft around such a model.
        mesh: the pipeline dimension of a device mesh, ``mesh["pp"]``.
        layers: how many layers each stage gets; by default as even as can be by what a token costs, head and embedding counted.

    Returns:
        The stage of this rank. ``stage.submod`` is to be wrapped by DDP or FSDP; ``stage.submod.model``, the model with the
        stage's weights alone, is not: stages but the last one run parts of it.

    Raises:
        UnsupportedError: if models of this kind cannot be split; says why.
        ConfigError: if the mesh has several dimensions, the attention is not distca's, the layers are not those of the model, or
            DDP or FSDP have wrapped it already.
    """
    check_mesh(mesh)
    outer, model = model, without_peft(model)
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"split() got a {type(model).__name__}: give it the model of transformers itself, and wrap the module of the stage "
            "that it returns."
        )
    if any(isinstance(part, (FSDPModule, FullyShardedDataParallel, DistributedDataParallel)) for part in outer.modules()):
        raise ConfigError(
            f"split() got a {type(model).__name__} that DDP or FSDP have wrapped, with the weights of other stages: split it "
            "first, then wrap stage.submod."
        )
    check_split(model)
    return Stage(StageModel(model, mesh.get_local_rank(), stage_layers(model, mesh, layers)), mesh)


def check_mesh(mesh: DeviceMesh) -> None:
    """Raises `ConfigError` if a mesh is not the one dimension of the stages."""
    if mesh.ndim != 1:
        raise ConfigError(f'split() got a mesh of {mesh.ndim} dimensions: give it the one of the stages, mesh["pp"].')


def stage_layers(model: PreTrainedModel, mesh: DeviceMesh, layers: Sequence[int] | None) -> Sequence[int]:
    """How many layers each stage gets.

    Raises:
        ConfigError: if `layers` are not of as many stages as the mesh has ranks.
    """
    stages = dist.get_world_size(mesh.get_group())
    if layers is None:
        layers = layers_of_stages(ModelParts.of(model).costs(model), stages)
    if len(layers) != stages:
        raise ConfigError(f"layers={list(layers)} are for {len(layers)} stages, and the mesh has {stages} ranks.")
    return layers


def _facts(model: PreTrainedModel, parts: ModelParts, layers: Sequence[int], *, tied: bool) -> dict[str, str]:
    """What the stages of all ranks must have in common: the model and how it is cut."""
    config = {f"config.{name}": repr(value) for name, value in model.config.to_dict().items() if not name.startswith("_")}
    names = [f"{name}.weight" for name, module in model.named_modules() if module in (parts.embedding, parts.head)]
    shared = {TIED: " and ".join(names)} if tied else {}
    own = {"hf-distca": version("hf-distca"), "the model": type(model).__name__, "layers of each stage": str(list(layers))}
    return {**own, **shared, **config}


def _leave(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Put something absent in the place of modules of other stages."""
    for name in names:
        holder, _, child = name.rpartition(".")
        setattr(model.get_submodule(holder), child, Absent(model.get_submodule(name)))


def _leave_layers(layers: torch.nn.ModuleList, stage: range) -> None:
    """Put something absent in the place of layers outside a stage, of which these are the numbers."""
    for number, layer in enumerate(layers):
        if number not in stage:
            kind = Entrance if number == stage.start - 1 else Exit if number == stage.stop else Absent
            layers[number] = kind(layer)


def check_split(model: PreTrainedModel) -> None:
    """Refuse a model that is not known to be the same in stages.

    Raises:
        ConfigError: if it has other attention than distca's, which knows nothing of stages.
        UnsupportedError: says why.
    """
    config = model.config
    check_family(config.model_type, encoder_decoder=config.is_encoder_decoder)
    if not distca_configs(model):
        name = getattr(config, "_attn_implementation", None)
        raise ConfigError(
            f'{type(model).__name__} has attn_implementation="{name}", whose attention stages cannot share: load the model with '
            'attn_implementation="distca".'
        )
    check_layerdrop(config)
    why = None
    text_config = config.get_text_config(decoder=True)
    if config.model_type not in SPLIT:
        why = "models of this family were never compared with their stages, or are not layers between an embedding and a head"
    elif shared := getattr(text_config, "num_kv_shared_layers", 0):
        why = f"{shared} of its layers read keys of other layers (num_kv_shared_layers={shared}), which may be on another stage"
    elif getattr(text_config, "output_router_logits", False):
        why = "it adds a loss of its routers (output_router_logits=True), which stages do not hand on; set it to False"
    if why is not None:
        raise UnsupportedError(
            f"hf_distca.pipeline does not split {config.model_type} models: {why}. Train it with data parallelism, whose ranks "
            "share attention too."
        )


_AFTER = ("norm", "ln_f")  # in the names of modules that follow the layers


@dataclass(frozen=True, eq=False)
class ModelParts:
    """Where the parts of a model are.

    Attributes:
        layers: the decoder layers, of which each stage has a run.
        before, after: names of modules that only the first stage needs, and of those that only the last one needs.
        embedding, head: the input embedding and the output projection.
    """

    layers: torch.nn.ModuleList
    before: tuple[str, ...]
    after: tuple[str, ...]
    embedding: torch.nn.Module
    head: torch.nn.Module

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelParts:
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
        after += [name for name, module in model.named_modules() if module is head]
        inside = {*layers.parameters(), *(p for name in before + after for p in model.get_submodule(name).parameters())}
        outside = [name for name, parameter in model.named_parameters() if parameter not in inside]
        if outside:
            raise _cannot(model, f"{', '.join(outside[:3])} {'are' if len(outside) > 1 else 'is'} outside its layers")
        return cls(layers, tuple(before), tuple(after), embedding, head)

    @property
    def tied(self) -> bool:
        """Whether embedding and head have the same weight."""
        weight = getattr(self.embedding, "weight", None)
        return weight is not None and weight is getattr(self.head, "weight", None)

    def costs(self, model: PreTrainedModel) -> list[float]:
        """Numbers that a token is multiplied with, by layer; the first has those of the embedding, the last those of the head.

        Core attention is not among them: stages share it.
        """
        experts = _active_experts(model)
        costs = [sum(_cost(parameter, experts) for parameter in layer.parameters()) for layer in self.layers]
        costs[0] += sum(weight.shape[-1] for name in self.before for weight in model.get_submodule(name).parameters())
        costs[-1] += sum(_cost(weight, 1.0) for name in self.after for weight in model.get_submodule(name).parameters())
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
    ends = [0.0, *itertools.accumulate(costs)]
    # Of the first n layers over a number of stages: the cost of the most expensive stage, and where the last stage begins.
    best = [(end, 0) for end in ends]
    tables = [best]
    for stage in range(1, stages):
        best = [
            min(((max(best[begin][0], ends[n] - ends[begin]), begin) for begin in range(stage, n)), default=(math.inf, 0))
            for n in range(len(costs) + 1)
        ]
        tables.append(best)
    layers, end = list[int](), len(costs)
    for table in reversed(tables):
        begin = table[end][1]
        layers.insert(0, end - begin)
        end = begin
    return layers


def embedding_of(model: PreTrainedModel) -> torch.nn.Module | None:
    """The input embedding of a model."""
    embedding: Any = model.get_input_embeddings()
    return embedding if isinstance(embedding, torch.nn.Module) else None


def head_of(model: PreTrainedModel) -> torch.nn.Module | None:
    """The output projection of a model."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return head if isinstance(head, torch.nn.Module) else None


def _decoder_layers(model: PreTrainedModel) -> tuple[str, torch.nn.ModuleList]:
    from transformers.modeling_layers import GradientCheckpointingLayer  # it imports what registers distca

    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        and len(module)
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in module)
    ]
    if len(lists) != 1:
        raise _cannot(model, f"it has {len(lists)} lists of layers, not one")
    return lists[0]


def _cannot(model: PreTrainedModel, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{type(model).__name__} ({model.config.model_type}) cannot be split into pipeline stages: {why}. Train it with data "
        "parallelism (FSDP), whose ranks share attention too."
    )


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
