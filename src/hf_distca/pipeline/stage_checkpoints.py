"""The checkpoint that all stages of a model save together."""

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
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_distca.pipeline.borrowed_pipelining import (
    find_whole_mesh,
    has_adapters,
    select_adapter_weights,
)
from hf_distca.pipeline.stage_models import StageModel
from hf_distca.pipeline.stages import Stage

_WHOLE = "model.safetensors"
_INDEX = f"{_WHOLE}.index.json"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_ADAPTER = "adapter_model.safetensors"


def save_pretrained(stage: Stage, directory: str | Path, **kwargs: Any) -> None:
    """Save the model of all stages in the way transformers would save the whole model. The
    `from_pretrained` of transformers loads this checkpoint without hf_distca.

    All ranks must call this function, with a directory that all of them see. Each stage of the
    first copy of the model writes its own weights. An existing checkpoint is replaced. If the model
    has an adapter, only the adapter is saved, for `PeftModel.from_pretrained`.

    Args:
        stage: stage of this rank.
        directory: target; made if it does not exist.
        kwargs: arguments of transformers' ``save_pretrained``, such as ``max_shard_size``. The
            weights of an adapter are always saved in one file.

    Raises:
        UnsupportedError: if the model has several adapters.
    """
    folder = Path(directory)
    model = stage.unwrapped
    adapted = has_adapters(model.model)
    # All copies of the model take part, because weights may be sharded over them.
    weights = _collect_weights(model)
    if adapted:
        weights = select_adapter_weights(model.model, weights)
    parts = [folder / f".stage-{number}" for number in range(model.stages)]
    part = parts[model.stage]
    whole_mesh = find_whole_mesh(stage.mesh).mesh
    # True only on stages of the first copy of the model, which includes the mesh's first rank.
    writes = bool((stage.mesh.mesh == whole_mesh.flatten()[0]).any())
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        if part.exists():  # left by a save that was killed
            shutil.rmtree(part)
        if adapted:  # saved here, because the stage may have no layer with an adapter
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


def _collect_weights(model: StageModel) -> dict[str, torch.Tensor]:
    """Return the stage's weights on the host.

    For tied weights, the checkpoint stores the first stage's copy.
    """
    repeated = None if model.is_first else model.tied_weight
    left_out = {name for name, weight in model.model.named_parameters() if weight is repeated}
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()
        for name, value in model.model.state_dict().items()
        if name not in left_out
    }


def _save_stage(
    model: PreTrainedModel, part: Path, weights: dict[str, torch.Tensor], kwargs: dict[str, Any]
) -> None:
    """Save a stage like a separate model, on any rank.

    By default, transformers 5.23 saves only on rank 0.
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
    weight_map = dict[str, str]()
    total = 0
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with shard.open("rb") as opened:  # a file begins with the size of its header
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        header.pop("__metadata__", None)
        weight_map |= dict.fromkeys(header, name)
        total += max(entry["data_offsets"][1] for entry in header.values())
        shard.replace(folder / name)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    # Delete the weights of an earlier checkpoint. If they are a single file, transformers would
    # load this file instead of the files in the index.
    for file in list(folder.iterdir()):
        if file.name == _WHOLE or (
            _SHARD.fullmatch(file.name) and file.name not in weight_map.values()
        ):
            file.unlink()
