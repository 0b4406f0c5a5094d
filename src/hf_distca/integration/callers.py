"""Facts read from the call stack, because transformers does not give them to distca in every case.

If a fact has a public source, that source is tried first. The public sources were checked with
transformers 5.23.0:

- The model that asks for a mask, to find its device mesh and its layers. Public source:
  `hf_distca.prepare`, which `DistCACallback` calls for the model of a Trainer. The stack is read
  for users who change nothing but attn_implementation.
- The Trainer that calls a callback, to move the callback in front of the reporters, and the Trainer
  that runs a forward, to check the loss. No public source: callbacks and models do not get the
  Trainer.
- The position ids passed to a ``create_..._mask``, and the documents passed to the model that calls
  it. No public source: mask functions get no position ids, and some models do not pass their
  keyword arguments on to attention.
- Whether `generate` runs a forward. No public source: a model in training mode can generate, so
  the mode does not tell.

If a frame is not found (in another version of transformers or in compiled code, for example),
functions return None or False, and raise no error.

Before Python 3.13, reading the variables of a frame leaves a copy of them in the frame until its
function returns. So variables are read only from functions that return soon. The frame of a
training loop, for example, would keep the logits of the last step.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from itertools import islice
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask

# Importing Trainer also imports peft, and with it modules that must not be loaded before a notebook
# starts processes.
if TYPE_CHECKING:
    from transformers import Trainer
    from transformers.trainer_callback import TrainerCallback

_TRAINER_STEPS = ("training_step", "prediction_step")


class MaskCall:
    """Facts about a running call of a ``create_..._mask`` of transformers. Make the object during
    the call, and do not keep it after the call.

    The stack is walked once, for all facts. The frame of the function that makes the object is left
    out, to avoid a reference cycle.
    """

    def __init__(self) -> None:
        self._frames = list(islice(_walk_callers(inspect.currentframe()), 2, None))
        creators = (
            frame
            for frame in self._frames
            if frame.f_globals.get("__name__") == create_causal_mask.__module__
        )
        self._creator = next(creators, None)
        self._models = list(_select_model_frames(self._frames))

    @property
    def position_ids(self) -> torch.Tensor | None:
        """Position ids from which the mask was made, (batch, length).

        Llama 4 and Persimmon do not pass position ids to attention, so attention takes them from
        here.
        """
        positions = None if self._creator is None else self._creator.f_locals.get("position_ids")
        return positions if isinstance(positions, torch.Tensor) and positions.dim() == 2 else None

    @property
    def has_no_positions(self) -> bool:
        """True if the outermost model with an argument `position_ids` got None. Inner models may
        still get position ids that an outer model made.
        """
        variables = [frame.f_locals for frame in self._models if "position_ids" in frame.f_locals]
        return bool(variables) and variables[-1]["position_ids"] is None

    @property
    def is_generating(self) -> bool:
        """True if `generate` is among the callers."""
        return any(
            frame.f_globals.get("__name__") == "transformers.generation.utils"
            for frame in self._frames
            if frame.f_code.co_name == "generate"
        )

    @property
    def is_in_data_parallel(self) -> bool:
        """True if this thread runs a replica of the model for `torch.nn.DataParallel`."""
        return torch.nn.parallel.parallel_apply.__code__.co_filename in [
            frame.f_code.co_filename for frame in self._frames
        ]

    @property
    def trainer(self) -> Trainer | None:
        """Trainer whose training or prediction step is among the callers."""
        steps = (
            frame.f_locals.get("self")
            for frame in self._frames
            if frame.f_code.co_name in _TRAINER_STEPS
        )
        return next((trainer for trainer in steps if hasattr(trainer, "callback_handler")), None)

    @property
    def outermost_model(self) -> PreTrainedModel:
        """The outermost model whose forward is among the callers. There must be such a model."""
        model: PreTrainedModel = self._models[-1].f_locals["self"]
        return model

    def iterate_models(self) -> Iterator[PreTrainedModel]:
        """Yield the models whose forwards are among the callers, innermost first."""
        for frame in self._models:
            yield frame.f_locals["self"]

    def find_argument(self, name: str) -> Any:
        """Return a keyword argument of the innermost model that got this argument, or None.

        This is needed because some models, such as Nemotron and StableLM, do not pass
        ``distca_documents`` on to attention.
        """
        return _find_argument(name, self._models)

    def find_tensor(self, name: str) -> torch.Tensor | None:
        """Return a variable of the innermost model if it is a tensor, else None.

        This finds the mask as it was before transformers converted it to bool. It also finds
        position ids that a model does not pass to the mask function, such as RoBERTa's position
        ids, and position ids with three axes.
        """
        value = self._models[0].f_locals.get(name) if self._models else None
        return value if isinstance(value, torch.Tensor) else None


def find_model_argument(name: str) -> Any:
    """Return an argument of the innermost model on the stack that got this argument, or None."""
    return _find_argument(name, _select_model_frames(_walk_callers(inspect.currentframe())))


def _find_argument(name: str, models: Iterable[FrameType]) -> Any:
    for model in models:
        variables = model.f_locals
        for value in (*variables.values(), variables):
            if isinstance(value, dict) and value.get(name) is not None:
                return value[name]
    return None


def is_in_model() -> bool:
    """Return whether the forward of a model is among the callers."""
    return next(_select_model_frames(_walk_callers(inspect.currentframe())), None) is not None


def is_compiled() -> bool:
    """Return whether compiled code is among the callers.

    torch.compile gives a special name to code that it resumes after a graph break, and the graph
    breaks at every attention.
    """
    return any(
        "torch_dynamo_resume" in frame.f_code.co_name
        for frame in _walk_callers(inspect.currentframe())
    )


def find_trainer(callback: TrainerCallback) -> Trainer | None:
    """Find the Trainer that is calling a callback."""
    for frame in islice(_walk_callers(inspect.currentframe()), 1, None):
        trainer = frame.f_locals.get("self")
        if callback in getattr(getattr(trainer, "callback_handler", None), "callbacks", ()):
            return cast("Trainer", trainer)
    return None


def _select_model_frames(frames: Iterable[FrameType]) -> Iterator[FrameType]:
    """Select the frames that are forwards of models.

    The name of a frame need only contain "forward": torch.compile names the resumed code of a
    forward ``torch_dynamo_resume_in_forward_at_...``.
    """
    forwards = (frame for frame in frames if "forward" in frame.f_code.co_name)
    return (frame for frame in forwards if isinstance(frame.f_locals.get("self"), PreTrainedModel))


def _walk_callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back
