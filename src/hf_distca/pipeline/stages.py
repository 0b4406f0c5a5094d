"""`Stage`: this rank's stage of a model, which is cut out of the whole model or loaded alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_distca.errors import ConfigError
from hf_distca.pipeline.borrowed_pipelining import unwrap_peft
from hf_distca.pipeline.model_parts import ModelParts, check_split, divide_layers
from hf_distca.pipeline.stage_models import StageModel

# Arguments of transformers that tell where to find a checkpoint and its config.
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


class Stage(PipelineStage):
    """The stage of this rank, in the form that torch's schedules take. Its module may be wrapped
    with DDP or FSDP.

    Attributes:
        mesh: the pipeline dimension of the device mesh; each of its ranks has a stage.
    """

    def __init__(self, model: StageModel, mesh: DeviceMesh) -> None:
        device = next(model.parameters()).device
        super().__init__(model, model.stage, model.stages, device, group=mesh.get_group())
        self.mesh = mesh

    @property
    def unwrapped(self) -> StageModel:
        """The model of the stage, without the DDP that may wrap it."""
        module = (
            self.submod.module if isinstance(self.submod, DistributedDataParallel) else self.submod
        )
        if not isinstance(module, StageModel):
            raise ConfigError(
                f"the stage runs a {type(module).__name__}: use DDP or fully_shard on the module"
                " that split() made, or on parts of it."
            )
        return module

    def clear_runtime_states(self) -> None:
        """Prepare for a step: drop micro-batches of a failed step, find the device of the weights
        (which may have moved), and shard the weights again under FSDP2.

        FSDP2 leaves weights gathered after a forward without a backward, but gradients belong to
        sharded weights.
        """
        super().clear_runtime_states()
        self.device = next(self.submod.parameters()).device
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def run_forward(
        self, number: int, inputs: torch.Tensor, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Run the forward of micro-batch `number`, and keep the tensors for its backward.

        Arguments and result are those of `StageModel.forward`.
        """
        output: torch.Tensor = self.forward_maybe_with_nosync(inputs, **kwargs)  # type: ignore[no-untyped-call]
        if self.has_backward:
            self.fwd_cache[number] = (output,), [inputs]
        return output

    def run_backward(
        self, number: int, gradient: torch.Tensor | None, loss: torch.Tensor | None, *, last: bool
    ) -> torch.Tensor:
        """Run the backward of micro-batch `number`.

        Args:
            gradient: gradient of the output; None on the last stage, which has a `loss`.
            loss: loss of the micro-batch.
            last: whether this is the last backward of the step, in which DDP sums gradients over
                copies of the model.

        Returns:
            The gradient of the inputs; zeros if nothing depends on the inputs.
        """
        outputs, inputs = self.fwd_cache.pop(number)
        values = {
            "stage_output": outputs if loss is None else loss,
            "output_grads": (gradient,) if loss is None else None,
            "input_values": inputs,
        }
        ((inputs_gradient,), _) = self.backward_maybe_with_nosync(
            "full", values, last_backward=last
        )
        return torch.zeros_like(inputs[0]) if inputs_gradient is None else inputs_gradient


def split(
    model: PreTrainedModel, mesh: DeviceMesh, *, layers: Sequence[int] | None = None
) -> Stage:
    """Split a causal language model over the ranks of a mesh dimension.

    All ranks of the mesh must have the same model. `split` removes the modules of other stages from
    it. For models that do not fit into the memory of one rank, see `from_pretrained`.

    Args:
        model: a causal language model of transformers with ``attn_implementation="distca"``, or a
            model of peft around such a model.
        mesh: the pipeline dimension of a device mesh, ``mesh["pp"]``.
        layers: number of layers of each stage. By default, stages have about the same cost per
            token, where the cost of the last stage includes the head.

    Returns:
        The stage of this rank. Wrap ``stage.submod`` with DDP or FSDP. Do not wrap
        ``stage.submod.model``, the model with the weights of the stage: every stage except the last
        one runs only part of it.

    Raises:
        UnsupportedError: if models of this kind cannot be split. The error names the reason.
        ConfigError: if the mesh has several dimensions, if the attention is not distca's, if
            `layers` does not fit the model, or if DDP or FSDP has already wrapped the model.
    """
    outer = model
    model = unwrap_peft(model)
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"split() got a {type(model).__name__}: give it the transformers model itself, and"
            " wrap stage.submod of the returned stage instead."
        )
    if any(
        isinstance(part, (FSDPModule, FullyShardedDataParallel, DistributedDataParallel))
        for part in outer.modules()
    ):
        raise ConfigError(
            f"split() got a {type(model).__name__} that is already wrapped with DDP or FSDP: split"
            " the model first, then wrap stage.submod."
        )
    layers = _choose_layer_counts(model, mesh, layers)
    return Stage(StageModel(model, mesh.get_local_rank(), layers), mesh)


def _choose_layer_counts(
    model: PreTrainedModel, mesh: DeviceMesh, layers: Sequence[int] | None
) -> Sequence[int]:
    """Check that the model can be split over the mesh. Return how many layers each stage gets."""
    if mesh.ndim != 1:
        raise ConfigError(
            f"split() got a mesh of {mesh.ndim} dimensions: give it the mesh dimension of the"
            ' stages, mesh["pp"].'
        )
    check_split(model)
    stages = dist.get_world_size(mesh.get_group())
    if layers is None:
        layers = divide_layers(ModelParts.from_model(model).estimate_layer_costs(model), stages)
    if len(layers) != stages:
        raise ConfigError(
            f"layers={list(layers)} are for {len(layers)} stages, but the mesh has {stages} ranks."
        )
    return layers


def from_pretrained(
    name: str, mesh: DeviceMesh, *, layers: Sequence[int] | None = None, **kwargs: Any
) -> Stage:
    """Load only this rank's stage of a checkpoint. Other weights take no memory.

    Args:
        name: a directory or a name on the hub, as for transformers.
        mesh: see `split`.
        layers: see `split`.
        kwargs: arguments of transformers' ``from_pretrained``, such as ``dtype``. The default of
            ``attn_implementation`` is "distca".

    Raises:
        UnsupportedError, ConfigError: see `split`.
    """
    implementation = kwargs.pop("attn_implementation", "distca")
    location = {key: value for key, value in kwargs.items() if key in _LOCATION}
    config = kwargs.pop("config", None) or AutoConfig.from_pretrained(name, **location)
    with torch.device("meta"):
        auto: Any = AutoModelForCausalLM
        whole = auto.from_config(config, attn_implementation=implementation)
    layers = _choose_layer_counts(whole, mesh, layers)
    base = type(whole)
    tied = ModelParts.from_model(whole).tied
    stage = mesh.get_local_rank()
    stage_models: list[StageModel] = []

    def __init__(self: Any, *args: Any, **more: Any) -> None:  # noqa: N807
        base.__init__(self, *args, **more)
        stage_models.append(StageModel(self, stage, layers, tied=tied))
        if not stage_models[-1].is_last:
            # This stage has nothing to tie, because the head is on the last stage.
            self.all_tied_weights_keys = {}

    # Do not warn about weights of other stages, which this model lacks.
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
    return Stage(model, mesh)
