"""`Stage`: this rank's stage of a model, cut out of the whole model or loaded alone; and the
checkpoint that all stages save.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_distca.errors import ConfigError, UnsupportedError
from hf_distca.pipeline.borrowed_pipelining import (
    find_whole_mesh,
    has_adapters,
    select_adapter_weights,
    unwrap_peft,
)
from hf_distca.pipeline.stage_models import ModelParts, StageModel, check_split, layers_of_stages

__all__ = ["Stage", "from_pretrained", "save_pretrained", "split"]

# Arguments of transformers that say where a checkpoint is, and so its config.
_LOCATION = {
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
    "trust_remote_code",
}
_WHOLE = "model.safetensors"
_INDEX = f"{_WHOLE}.index.json"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_ADAPTER = "adapter_model.safetensors"


class Stage(PipelineStage):
    """The stage of this rank, in the form that torch's schedules take.

    It runs micro-batches inside DDP and FSDP, too.

    Attributes:
        mesh: the pipeline dimension of the device mesh; each of its ranks has a stage.
    """

    def __init__(self, model: StageModel, mesh: DeviceMesh) -> None:
        super().__init__(
            model, model.stage, model.stages, torch.device(mesh.device_type), group=mesh.get_group()
        )
        self.mesh = mesh
        # Inputs and output of micro-batches.
        self._running: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._update_device()

    @property
    def unwrapped(self) -> StageModel:
        """The model of the stage without DDP around it; nothing else may be around it."""
        module = (
            self.submod.module if isinstance(self.submod, DistributedDataParallel) else self.submod
        )
        if not isinstance(module, StageModel):
            raise ConfigError(
                f"the stage runs a {type(module).__name__}: put DDP or fully_shard around what"
                " split() made, or parts of it."
            )
        return module

    def clear_runtime_states(self) -> None:
        """Begin a step: drop micro-batches of a failed step, follow the weights' device, and shard
        weights again.
        """
        super().clear_runtime_states()
        self._running.clear()
        self._update_device()
        self.reshard()

    def reshard(self) -> None:
        """Shard the weights that FSDP2 leaves whole after a forward without a backward, because
        gradients belong to sharded ones.
        """
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _update_device(self) -> None:
        """Set the device to that of the weights, which may have moved since the model was split."""
        weight = next(self.submod.parameters(), None)
        self.device = self.device if weight is None else weight.device

    def run_forward(
        self, number: int, inputs: torch.Tensor, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Run the forward of a micro-batch of this number, and keep the tensors for its backward.

        Args and results are those of `StageModel.forward`.
        """
        output: torch.Tensor = self.forward_maybe_with_nosync(inputs, **kwargs)  # type: ignore[no-untyped-call]
        if self.has_backward:
            self._running[number] = inputs, output
        return output

    def run_backward(
        self, number: int, gradient: torch.Tensor | None, loss: torch.Tensor | None, *, last: bool
    ) -> torch.Tensor:
        """Run the backward of a micro-batch of this number.

        Args:
            gradient: gradient of the output; None on the last stage, which has a `loss`.
            loss: loss of the micro-batch.
            last: whether no other backward of this step follows: then DDP sums gradients over
                copies.

        Returns:
            The gradient of the inputs, of their shape; zeros if nothing depends on them.
        """
        inputs, output = self._running.pop(number)
        values: dict[str, Any] = {
            "stage_output": (output,),
            "output_grads": (gradient,),
            "input_values": [inputs],
        }
        if loss is not None:
            values |= {"stage_output": loss, "output_grads": None}
        gradients, _ = self.backward_maybe_with_nosync("full", values, last_backward=last)
        return torch.zeros_like(inputs) if gradients[0] is None else gradients[0]


def split(
    model: PreTrainedModel, mesh: DeviceMesh, *, layers: Sequence[int] | None = None
) -> Stage:
    """Split a causal language model over the ranks of a mesh dimension.

    All ranks of the mesh must have the same model. It is changed: what is on other stages leaves
    it. For models that do not fit into the memory of one rank, see `from_pretrained`.

    Args:
        model: a causal language model of transformers, with ``attn_implementation="distca"``; or
            one of peft around such a model.
        mesh: the pipeline dimension of a device mesh, ``mesh["pp"]``.
        layers: number of layers of each stage; by default as even as possible by the cost of a
            token, head and embedding included.

    Returns:
        The stage of this rank. ``stage.submod`` is to be wrapped by DDP or FSDP;
        ``stage.submod.model``, the model with the stage's weights alone, is not: stages but the
        last one run parts of it.

    Raises:
        UnsupportedError: if models of this kind cannot be split; with the reason.
        ConfigError: if the mesh has several dimensions, the attention is not distca's, the layers
            are not those of the model, or DDP or FSDP have wrapped it already.
    """
    outer, model = model, unwrap_peft(model)
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"split() got a {type(model).__name__}: give it the model of transformers itself, and"
            " wrap the module of the stage that it returns."
        )
    if any(
        isinstance(part, (FSDPModule, FullyShardedDataParallel, DistributedDataParallel))
        for part in outer.modules()
    ):
        raise ConfigError(
            f"split() got a {type(model).__name__} that DDP or FSDP have wrapped, with the weights"
            " of other stages: split it first, then wrap stage.submod."
        )
    layers = _layers_by_stage(model, mesh, layers)
    return Stage(StageModel(model, mesh.get_local_rank(), layers), mesh)


def _layers_by_stage(
    model: PreTrainedModel, mesh: DeviceMesh, layers: Sequence[int] | None
) -> Sequence[int]:
    """Return the number of layers of each stage, after a check that the model can be split over the
    mesh.
    """
    if mesh.ndim != 1:
        raise ConfigError(
            f"split() got a mesh of {mesh.ndim} dimensions: give it the one of the stages,"
            ' mesh["pp"].'
        )
    check_split(model)
    stages = dist.get_world_size(mesh.get_group())
    if layers is None:
        layers = layers_of_stages(ModelParts.of(model).costs(model), stages)
    if len(layers) != stages:
        raise ConfigError(
            f"layers={list(layers)} are for {len(layers)} stages, and the mesh has {stages} ranks."
        )
    return layers


def from_pretrained(
    name: str, mesh: DeviceMesh, *, layers: Sequence[int] | None = None, **kwargs: Any
) -> Stage:
    """Load this rank's stage of a checkpoint, and only that: other weights take no memory.

    Args:
        name: a directory or a name on the hub, as for transformers.
        mesh: see `split`.
        layers: see `split`.
        kwargs: for ``from_pretrained`` of transformers, such as ``dtype``; ``attn_implementation``
            is "distca" if not given.

    Raises:
        UnsupportedError, ConfigError: see `split`.
    """
    implementation = kwargs.pop("attn_implementation", "distca")
    location = {key: value for key, value in kwargs.items() if key in _LOCATION}
    config = kwargs.pop("config", None) or AutoConfig.from_pretrained(name, **location)
    with torch.device("meta"):
        auto: Any = AutoModelForCausalLM
        whole = auto.from_config(config, attn_implementation=implementation)
    layers = _layers_by_stage(whole, mesh, layers)
    base, tied, stage = type(whole), ModelParts.of(whole).tied, mesh.get_local_rank()
    stage_models: list[StageModel] = []

    def __init__(self: Any, *args: Any, **more: Any) -> None:  # noqa: N807
        base.__init__(self, *args, **more)
        stage_models.append(StageModel(self, stage, layers, tied=tied))
        if not stage_models[-1].is_last:
            # There is nothing to tie: the head is on the last stage.
            self.all_tied_weights_keys = {}

    # Weights of other stages are in the checkpoint and not in the model: nothing to warn of.
    names = {
        "__init__": __init__,
        "__module__": base.__module__,
        "_keys_to_ignore_on_load_unexpected": [".*"],
    }
    loader: Any = type(base.__name__, (base,), names)
    loaded = loader.from_pretrained(
        name, config=config, attn_implementation=implementation, **kwargs
    )
    loaded.__class__ = base
    model = stage_models[-1]
    model.drop_embedding()
    if (
        tied
        and model.is_last
        and model.head is not None
        and any(weight.is_meta for weight in model.head.parameters())
    ):
        raise UnsupportedError(
            f"the tied head of {name} was not loaded: use `split` on the whole model."
        )
    return Stage(model, mesh)


def save_pretrained(stage: Stage, directory: str | Path, **kwargs: Any) -> None:
    """Save the model of all stages as transformers would save the whole one: `from_pretrained`
    loads it without hf_distca.

    All ranks must call it, with a directory that all of them see. The first copy of the model
    writes, each stage its own weights. An existing checkpoint is replaced. If the model has an
    adapter, only the adapter is saved, for `PeftModel.from_pretrained`.

    Args:
        stage: stage of this rank.
        directory: target; made if it does not exist.
        kwargs: for ``save_pretrained`` of transformers, such as ``max_shard_size``; those of
            adapters are always one file.

    Raises:
        UnsupportedError: if the model has several adapters.
    """
    folder, model = Path(directory), stage.unwrapped
    # Of sharded ones, all copies together.
    adapted, weights = has_adapters(model.model), _collect_weights(model)
    if adapted:
        weights = select_adapter_weights(model.model, weights)
    parts = [folder / f".stage-{number}" for number in range(model.stages)]
    part, writes = parts[model.stage], _is_writer(stage)
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        if part.exists():  # of a save that was killed
            shutil.rmtree(part)
        if adapted:  # there may be no layer with an adapter on this stage
            part.mkdir()
            save_file(weights, part / _ADAPTER)
            next(iter(model.model.peft_config.values())).save_pretrained(part)
        else:
            _save_stage(model.model, part, weights, kwargs)
    dist.barrier()
    if writes and model.is_first:
        (_merge_adapters if adapted else _merge_shards)(folder, parts)
        for file in parts[0].iterdir():
            if file.suffix != ".safetensors" and file.name != _INDEX:
                file.replace(folder / file.name)
        for part in parts:
            shutil.rmtree(part)
    dist.barrier()


def _is_writer(stage: Stage) -> bool:
    """Return whether this rank belongs to the first copy of the model."""
    whole = find_whole_mesh(stage.mesh)
    coordinates = zip(whole.mesh_dim_names or (), whole.get_coordinate() or (), strict=True)
    return not any(
        coordinate
        for name, coordinate in coordinates
        if name not in (stage.mesh.mesh_dim_names or ())
    )


def _collect_weights(model: StageModel) -> dict[str, torch.Tensor]:
    """Return the stage's weights on the host.

    For tied weights, the checkpoint stores the first stage's copy.
    """
    weights = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()
        for name, value in model.model.state_dict().items()
    }
    if model.tied and model.is_last and not model.is_first:
        for name, module in model.model.named_modules():
            if module is model.head:
                weights.pop(f"{name}.weight", None)
    return weights


def _save_stage(
    model: PreTrainedModel, part: Path, weights: dict[str, torch.Tensor], kwargs: dict[str, Any]
) -> None:
    """Save a stage like a model of its own; transformers 5.23 writes only on rank 0 unless the
    model says otherwise.
    """
    writer: Any = model
    writer.should_save_on_this_rank = lambda *_, **__: True
    try:
        model.save_pretrained(part, state_dict=weights, **kwargs)
    finally:
        del writer.should_save_on_this_rank


def _merge_adapters(folder: Path, parts: Sequence[Path]) -> None:
    """Merge the adapters of all stages into one file."""
    save_file(
        {name: weight for part in parts for name, weight in load_file(part / _ADAPTER).items()},
        folder / _ADAPTER,
    )


def _merge_shards(folder: Path, parts: Sequence[Path]) -> None:
    """Merge the files of all stages into one checkpoint."""
    shards = [shard for part in parts for shard in sorted(part.glob("*.safetensors"))]
    weight_map, total = dict[str, str](), 0
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        sizes = _read_sizes(shard)
        weight_map |= dict.fromkeys(sizes, name)
        total += sum(sizes.values())
        shard.replace(folder / name)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    # Weights of an earlier checkpoint: transformers prefers one file to an index.
    for file in list(folder.iterdir()):
        if file.name == _WHOLE or (
            _SHARD.fullmatch(file.name) and file.name not in weight_map.values()
        ):
            file.unlink()


def _read_sizes(shard: Path) -> dict[str, int]:
    """Read the weights of a file and their sizes in bytes from its header."""
    with shard.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    bounds = {
        name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"
    }
    return {name: end - begin for name, (begin, end) in bounds.items()}
