"""`split`: a causal language model of transformers becomes this rank's stage of a pipeline.

The model stays what it is: layers of other stages become modules that do nothing, so that every layer keeps its number, which
models read their config by, and every weight its name, which checkpoints know it by. What a model does to its embeddings before
the layers and to hidden states behind them happens on every stage; only on the first and on the last one is its result used.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_distca.errors import ConfigError, UnsupportedError
from hf_distca.pipeline.borrowed import without_peft
from hf_distca.pipeline.families import check_split
from hf_distca.pipeline.parts import Parts, embedding_of, head_of, layers_of_stages

__all__ = ["Stage", "StageModel", "from_pretrained", "split", "stage_model"]

# Arguments of transformers that say where a checkpoint is, and so its config.
_WHERE = {"cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token", "trust_remote_code"}


class Absent(torch.nn.Module):
    """In the place of a module that is on another stage."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.zero = isinstance(module, torch.nn.Embedding)
        for name, value in vars(module).items():  # models read what kind of attention a layer has
            if not name.startswith("_") and isinstance(value, (str, int, float, bool)) and not hasattr(self, name):
                setattr(self, name, value)

    def forward(self, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The inputs; of an embedding something that can be added and is not looked at."""
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
    """The layer behind the last one of a stage: keeps what goes to the next stage.

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
        parts = Parts.of(model)
        if sum(layers) != len(parts.layers) or min(layers) < 1:
            raise ConfigError(f"layers={list(layers)} must be at least 1 for each stage, {len(parts.layers)} in all.")
        self.stage, self.stages, self.tied = stage, len(layers), parts.tied if tied is None else tied
        self.facts = _facts(model, parts, layers, tied=self.tied)
        begin = sum(layers[:stage])
        _leave_layers(parts, range(begin, begin + layers[stage]))
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
        entrance, leave = self._ends
        given = {"input_ids" if self.is_first else "inputs_embeds": inputs, "use_cache": False, **kwargs}
        if entrance is not None:
            entrance.arrived = inputs
        try:
            if self.is_last:
                output: Any = self.model(**given)
                return _tensor(output.logits)
            self.model.base_model(**given)
            left = None if leave is None else leave.leaving
            if left is None:
                raise UnsupportedError(f"{type(self.model).__name__} ran past the layers of stage {self.stage}.")
            return _tensor(left)
        finally:
            for end, name in ((entrance, "arrived"), (leave, "leaving")):
                if end is not None:
                    setattr(end, name, None)

    def _only(self, kind: type[Any]) -> Any:
        return next((module for module in self.model.modules() if isinstance(module, kind)), None)


class Stage(PipelineStage):
    """This rank's stage, as torch's schedules take it.

    Attributes:
        mesh: the pipeline dimension of the device mesh, whose ranks have the stages.
        connected: for which micro-batches torch has been told what travels; several schedules may have one stage.
    """

    def __init__(self, model: StageModel, device: torch.device, mesh: DeviceMesh) -> None:
        super().__init__(model, model.stage, model.stages, device, group=mesh.get_group())
        self.mesh = mesh
        self.connected: tuple[Hashable, ...] | None = None

    def follow(self) -> torch.device:
        """Be on the device of the weights, which may have moved since the model was split."""
        weight = next(self.submod.parameters(), None)
        self.device = self.device if weight is None else weight.device
        return self.device

    def expect(self, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        """Say what shapes and dtypes travel, so that torch need not find out by a forward and backward of its own.

        Args:
            inputs: of one micro-batch, of the device "meta".
            outputs: likewise.
        """
        self.connected = None
        super().__init__(
            self.submod,
            self.stage_index,
            self.num_stages,
            self.follow(),
            input_args=inputs,
            output_args=outputs,
            group=self.group,
        )


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
    _check_mesh(mesh)
    given, model = model, without_peft(model)
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"split() got a {type(model).__name__}: give it the model of transformers itself, and wrap the module of the stage "
            "that it returns."
        )
    if any(isinstance(part, (FSDPModule, FullyShardedDataParallel, DistributedDataParallel)) for part in given.modules()):
        raise ConfigError(
            f"split() got a {type(model).__name__} that DDP or FSDP have wrapped, with the weights of other stages: split it "
            "first, then wrap stage.submod."
        )
    check_split(model)
    part = StageModel(model, mesh.get_local_rank(), _layers(model, mesh, layers))
    weight = next(part.parameters(), None)
    return Stage(part, torch.device(mesh.device_type) if weight is None else weight.device, mesh)


def from_pretrained(name: str, mesh: DeviceMesh, *, layers: Sequence[int] | None = None, **kwargs: Any) -> Stage:
    """Load this rank's stage of a checkpoint, and only that: no other weight takes memory.

    Args:
        name: a directory or a name on the hub, as for transformers.
        mesh: as for `split`.
        layers: as for `split`.
        kwargs: for ``from_pretrained`` of transformers, such as ``dtype``; ``attn_implementation`` is "distca" if not given.

    Raises:
        UnsupportedError, ConfigError: as `split`.
    """
    _check_mesh(mesh)
    implementation = kwargs.pop("attn_implementation", "distca")
    where = {key: value for key, value in kwargs.items() if key in _WHERE}
    config = kwargs.pop("config", None) or AutoConfig.from_pretrained(name, **where)
    with torch.device("meta"):
        auto: Any = AutoModelForCausalLM
        whole = auto.from_config(config, attn_implementation=implementation)
    check_split(whole)
    layers = _layers(whole, mesh, layers)
    stages, stage = len(layers), mesh.get_local_rank()
    base, tied = type(whole), Parts.of(whole).tied
    kept: list[StageModel] = []

    def __init__(self: Any, *args: Any, **more: Any) -> None:  # noqa: N807
        base.__init__(self, *args, **more)
        kept.append(StageModel(self, stage, layers, tied=tied))
        if stage < stages - 1:
            self.all_tied_weights_keys = {}  # there is nothing to tie: the head is on the last stage

    # Weights of other stages are in the checkpoint and not in the model: nothing to warn of.
    names = {"__init__": __init__, "__module__": base.__module__, "_keys_to_ignore_on_load_unexpected": [".*"]}
    loader: Any = type(base.__name__, (base,), names)
    model = loader.from_pretrained(name, config=config, attn_implementation=implementation, **kwargs)
    model.__class__ = base
    part = kept[-1]
    head = head_of(model) if tied and part.is_last and not part.is_first else None
    part.loaded()
    if head is not None and any(weight.is_meta for weight in head.parameters()):
        raise UnsupportedError(f"the tied head of {name} was not loaded: use `split` on the whole model.")
    return Stage(part, next(model.parameters()).device, mesh)


def _check_mesh(mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        raise ConfigError(f'split() got a mesh of {mesh.ndim} dimensions: give it the one of the stages, mesh["pp"].')


def _layers(model: PreTrainedModel, mesh: DeviceMesh, layers: Sequence[int] | None) -> Sequence[int]:
    """How many layers each stage gets."""
    stages = dist.get_world_size(mesh.get_group())
    if layers is None:
        layers = layers_of_stages(Parts.of(model).costs(model), stages)
    if len(layers) != stages:
        raise ConfigError(f"layers={list(layers)} are for {len(layers)} stages, and the mesh has {stages} ranks.")
    return layers


def _facts(model: PreTrainedModel, parts: Parts, layers: Sequence[int], *, tied: bool) -> dict[str, str]:
    """What the stages of all ranks must have in common: the model and how it is cut."""
    config = {f"config.{name}": repr(value) for name, value in model.config.to_dict().items() if not name.startswith("_")}
    names = [f"{name}.weight" for name, module in model.named_modules() if module in (parts.embedding, parts.head)]
    shared = {"tied weights": " and ".join(names)} if tied else {}
    return {"the model": type(model).__name__, "the number of layers of each stage": str(list(layers)), **shared, **config}


def _tensor(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise UnsupportedError(f"a layer put out a {type(value).__name__}, and stages hand on one tensor.")
    return value


def _leave(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Put something absent in the place of modules of other stages."""
    for name in names:
        holder, _, child = name.rpartition(".")
        setattr(model.get_submodule(holder), child, Absent(model.get_submodule(name)))


def _leave_layers(parts: Parts, own: range) -> None:
    """Put something absent in the place of layers of other stages."""
    for at, layer in enumerate(parts.layers):
        if at not in own:
            kind = Entrance if at == own.start - 1 else Exit if at == own.stop else Absent
            parts.layers[at] = kind(layer)
