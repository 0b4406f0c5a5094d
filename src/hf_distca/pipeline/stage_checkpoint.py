"""Checkpoints of stages: each loads its own weights, and together they save one ordinary checkpoint."""

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
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_distca.errors import UnsupportedError
from hf_distca.pipeline.borrowed_pipelining import adapter_weights, has_adapters, whole_mesh
from hf_distca.pipeline.stages import (
    ModelParts,
    Stage,
    StageModel,
    check_mesh,
    check_split,
    head_of,
    stage_layers,
    stage_model,
)

__all__ = ["from_pretrained", "save_pretrained"]

# Arguments of transformers that say where a checkpoint is, and so its config.
_LOCATION = {"cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token", "trust_remote_code"}
_WHOLE = "model.safetensors"
_INDEX = f"{_WHOLE}.index.json"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_ADAPTER = "adapter_model.safetensors"


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
    check_mesh(mesh)
    implementation = kwargs.pop("attn_implementation", "distca")
    location = {key: value for key, value in kwargs.items() if key in _LOCATION}
    config = kwargs.pop("config", None) or AutoConfig.from_pretrained(name, **location)
    with torch.device("meta"):
        auto: Any = AutoModelForCausalLM
        whole = auto.from_config(config, attn_implementation=implementation)
    check_split(whole)
    layers = stage_layers(whole, mesh, layers)
    stages, stage = len(layers), mesh.get_local_rank()
    base, tied = type(whole), ModelParts.of(whole).tied
    stage_models: list[StageModel] = []

    def __init__(self: Any, *args: Any, **more: Any) -> None:  # noqa: N807
        base.__init__(self, *args, **more)
        stage_models.append(StageModel(self, stage, layers, tied=tied))
        if stage < stages - 1:
            self.all_tied_weights_keys = {}  # there is nothing to tie: the head is on the last stage

    # Weights of other stages are in the checkpoint and not in the model: nothing to warn of.
    names = {"__init__": __init__, "__module__": base.__module__, "_keys_to_ignore_on_load_unexpected": [".*"]}
    loader: Any = type(base.__name__, (base,), names)
    model = loader.from_pretrained(name, config=config, attn_implementation=implementation, **kwargs)
    model.__class__ = base
    part = stage_models[-1]
    head = head_of(model) if tied and part.is_last and not part.is_first else None
    part.loaded()
    if head is not None and any(weight.is_meta for weight in head.parameters()):
        raise UnsupportedError(f"the tied head of {name} was not loaded: use `split` on the whole model.")
    return Stage(part, mesh)


def save_pretrained(stage: Stage, directory: str | Path, **kwargs: Any) -> None:
    """Save the model of all stages as transformers would save the whole one: `from_pretrained` loads it without hf_distca.

    All ranks must call it, with a directory that all of them see. The first copy of the model writes, each stage its own weights.
    A checkpoint that is there is replaced.

    Args:
        stage: of this rank.
        directory: where to; made if it is not there.
        kwargs: for ``save_pretrained`` of transformers, such as ``max_shard_size``; those of adapters are always one file.

    Of a model with an adapter only that is saved, as peft and transformers do, for `PeftModel.from_pretrained`.

    Raises:
        UnsupportedError: if the model has several adapters.
    """
    into, model = Path(directory), stage_model(stage)
    adapted = has_adapters(model.model)
    weights = _weights(model)  # of sharded ones, all copies together
    if adapted:
        weights = adapter_weights(model.model, weights)
    part = into / f".stage-{model.stage}"
    if _writes(stage):
        into.mkdir(parents=True, exist_ok=True)
        if part.exists():  # of a save that was killed
            shutil.rmtree(part)
        (_write_adapter if adapted else _write)(model.model, part, weights, kwargs)
    dist.barrier()
    if _writes(stage) and model.is_first:
        (_merge_adapters if adapted else _merge)(into, [into / f".stage-{number}" for number in range(model.stages)])
    dist.barrier()


def _write(model: PreTrainedModel, part: Path, weights: dict[str, torch.Tensor], kwargs: dict[str, Any]) -> None:
    """Save a stage like a model of its own; transformers 5.23 writes on rank 0 alone unless the model says otherwise."""
    writer: Any = model
    writer.should_save_on_this_rank = lambda *_, **__: True
    try:
        model.save_pretrained(part, state_dict=weights, **kwargs)
    finally:
        del writer.should_save_on_this_rank


def _write_adapter(model: Any, part: Path, weights: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
    """Save the adapter of a stage, which may have no layer that is adapted."""
    part.mkdir()
    save_file(weights, part / _ADAPTER)
    next(iter(model.peft_config.values())).save_pretrained(part)


def _merge_adapters(into: Path, parts: list[Path]) -> None:
    """Make one adapter of those of all stages."""
    save_file({name: weight for part in parts for name, weight in load_file(part / _ADAPTER).items()}, into / _ADAPTER)
    for file in parts[0].iterdir():
        if file.name != _ADAPTER:
            file.replace(into / file.name)
    for part in parts:
        shutil.rmtree(part)


def _writes(stage: Stage) -> bool:
    """Whether this rank is of the first copy of the model."""
    whole = whole_mesh(stage.mesh)
    coordinates = zip(whole.mesh_dim_names or (), whole.get_coordinate() or (), strict=True)
    return not any(coordinate for name, coordinate in coordinates if name not in (stage.mesh.mesh_dim_names or ()))


def _weights(model: StageModel) -> dict[str, torch.Tensor]:
    """The stage's weights on the host. Of one that is tied, the first stage has the copy that a checkpoint holds."""
    weights = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()
        for name, value in model.model.state_dict().items()
    }
    if model.tied and model.is_last and not model.is_first:
        head = head_of(model.model)
        for name, module in model.model.named_modules():
            if module is head:
                weights.pop(f"{name}.weight", None)
    return weights


def _merge(into: Path, parts: list[Path]) -> None:
    """Make one checkpoint of the files of all stages."""
    shards = [shard for part in parts for shard in sorted(part.glob("*.safetensors"))]
    weight_map, total = dict[str, str](), 0
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weights = _sizes(shard)
        weight_map |= dict.fromkeys(weights, name)
        total += sum(weights.values())
        shard.replace(into / name)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (into / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for file in list(into.iterdir()):  # weights of an earlier checkpoint: transformers prefers one file to an index
        if file.name == _WHOLE or (_SHARD.fullmatch(file.name) and file.name not in weight_map.values()):
            file.unlink()
    for file in parts[0].iterdir():
        if file.suffix != ".safetensors" and file.name != _INDEX:
            file.replace(into / file.name)
    for part in parts:
        shutil.rmtree(part)


def _sizes(shard: Path) -> dict[str, int]:
    """The weights in a file, and their bytes: read from its header."""
    with shard.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    bounds = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: end - begin for name, (begin, end) in bounds.items()}
