"""Private names of torch, transformers and peft that `hf_distca.pipeline` uses.

They may change. They were seen in torch 2.13.0 and transformers 5.23.0.

This file is separate from `hf_distca.borrowed` because importing torch.distributed.pipelining takes
a second.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from hf_distca.errors import UnsupportedError


class OneStageSchedule(PipelineScheduleSingle):
    """Adapts torch's base class of schedules for one stage per rank. A subclass implements only
    `run`.
    """

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of a step."""
        return self._n_microbatches

    @property
    def is_training(self) -> bool:
        """True if this step has a backward."""
        return bool(self._has_backward)

    @abstractmethod
    def run(
        self,
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
        targets: Sequence[Any] | None,
        **more: Any,
    ) -> None:
        """Run the micro-batches of a step. `more` holds ``return_outputs`` and ``loss_kwargs``, two
        arguments of torch's `step`.
        """

    def add_loss(
        self, output: torch.Tensor, target: Any, loss_kwargs: dict[str, Any] | None
    ) -> None:
        """Compute the loss of the next micro-batch, on the last stage."""
        if self._loss_fn is not None:
            self._internal_losses.append(self._compute_loss(output, target, loss_kwargs))  # type: ignore[no-untyped-call]

    def get_loss(self, number: int) -> torch.Tensor:
        """Return the loss of micro-batch `number`, for its backward.

        With `scale_grads`, this loss is divided by the number of micro-batches. torch's schedules
        instead divide gradients at the end of a step, including gradients of earlier steps.
        """
        return self._internal_losses[number] / (self.micro_batches if self.scale_grads else 1)

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        args, kwargs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        try:
            self.run(
                args, kwargs, target_mbs, return_outputs=return_outputs, loss_kwargs=loss_kwargs
            )
            self._update_losses(self._stage, losses)  # type: ignore[no-untyped-call]
        finally:
            self._internal_losses.clear()  # a failed step would leave losses behind


def has_adapters(model: Any) -> bool:
    """Return whether a transformers model has adapters. Such a model saves only its adapters."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def unwrap_peft(model: Any) -> Any:
    """Return the transformers model inside a model of peft, after setting the flag by which
    transformers recognizes adapters. Return any other model as it is.

    Raises:
        UnsupportedError: if the adapter is a prompt, which belongs to no layer.
    """
    if not callable(getattr(model, "get_base_model", None)):
        return model
    if model.active_peft_config.is_prompt_learning:
        raise UnsupportedError(
            f"{model.active_peft_config.peft_type.value} puts a prompt before the tokens. Pipeline"
            " stages do not support prompts. Use adapters of layers, such as LoRA."
        )
    base = model.get_base_model()
    base._hf_peft_config_loaded = True
    return base


def select_adapter_weights(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Select the weights of a model's adapter from all of its weights. Return them under the names
    that peft uses in files.

    Raises:
        UnsupportedError: if there are several adapters.
    """
    from peft import get_peft_model_state_dict

    if len(model.peft_config) > 1:
        raise UnsupportedError(
            "save_pretrained saves one adapter, but the stages have several:"
            f" {', '.join(model.peft_config)}. Delete all but one."
        )
    (name,) = model.peft_config
    adapter = get_peft_model_state_dict(
        model, weights, adapter_name=name, save_embedding_layers=False
    )
    return {f"base_model.model.{key}": value.contiguous() for key, value in adapter.items()}


def find_whole_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh from which this mesh was sliced, or the mesh itself if it is no slice."""
    return mesh._get_root_mesh()
