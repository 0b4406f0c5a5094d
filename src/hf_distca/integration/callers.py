"""Facts read from the call stack that transformers gives in no other way, or not in every case.

Read against transformers 5.23.0. Each fact is listed with its public source, which is tried first:

- The model that asks for a mask, for its device mesh and its layers: `hf_distca.prepare`, which
  `DistCACallback` calls for the model of a Trainer. The stack serves users who change one argument
  and call nothing.
- The Trainer of a callback, to stand in front of its reporters, or of a forward, for its own loss:
  no public source. Callbacks and models are not given it.
- The position ids passed to a ``create_..._mask``, and the documents passed to its model: no public
  source. Mask functions get the config and no positions, and some models do not hand their keyword
  arguments on to attention.
- Whether a forward is one of `generate`: no public source. A model in training mode can generate,
  too.

Where a frame is not found, as under another version or compiled, the answer is None or False and
nothing fails here.

Before Python 3.13, reading the variables of a frame leaves a copy of them on it until its function
returns. So they are read only from frames that end soon: a loop whose variables were read would
keep the logits of its last step.
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

# Importing it brings in peft and, through that, what must not be there when a notebook starts
# processes.
if TYPE_CHECKING:
    from transformers import Trainer
    from transformers.trainer_callback import TrainerCallback

_TRAINER_STEPS = ("training_step", "prediction_step")


class MaskCall:
    """The call of a ``create_..._mask`` of transformers that this object is made in; keep it no
    longer than that call.

    The stack is walked once, for all facts. The caller's own frames are left out, to avoid a
    reference cycle.
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
        """Position ids that the mask was made with, (batch, length).

        Llama 4 and Persimmon pass none to attention.
        """
        positions = None if self._creator is None else self._creator.f_locals.get("position_ids")
        return positions if isinstance(positions, torch.Tensor) and positions.dim() == 2 else None

    @property
    def has_no_positions(self) -> bool:
        """True if the outermost model with an argument position_ids got none; modules inside may
        have made their own.
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
        """True if a thread of `torch.nn.DataParallel`, which runs a replica of the model, is among
        the callers.
        """
        return torch.nn.parallel.parallel_apply.__code__.co_filename in [
            frame.f_code.co_filename for frame in self._frames
        ]

    @property
    def trainer(self) -> Trainer | None:
        """Trainer whose training or evaluation step is among the callers."""
        steps = (
            frame.f_locals.get("self")
            for frame in self._frames
            if frame.f_code.co_name in _TRAINER_STEPS
        )
        return next((trainer for trainer in steps if hasattr(trainer, "callback_handler")), None)

    @property
    def outermost_model(self) -> PreTrainedModel:
        """The outermost model whose forward is among the callers; there must be one."""
        model: PreTrainedModel = self._models[-1].f_locals["self"]
        return model

    def iterate_models(self) -> Iterator[PreTrainedModel]:
        """Yield the models whose forwards are among the callers, from the inside out."""
        for frame in self._models:
            yield frame.f_locals["self"]

    def find_argument(self, name: str) -> Any:
        """Return a keyword argument of the innermost model that got it; else None.

        Not all models pass ``distca_documents`` on to attention (Nemotron, StableLM).
        """
        return _find_argument(name, self._models)

    def find_tensor(self, name: str) -> torch.Tensor | None:
        """Return a variable of the innermost model, if it is a tensor: the mask in its own numbers,
        which transformers makes bool; position ids of models that pass none to the mask (RoBERTa),
        or none with three axes.
        """
        value = self._models[0].f_locals.get(name) if self._models else None
        return value if isinstance(value, torch.Tensor) else None


def find_model_argument(name: str) -> Any:
    """Return an argument of the innermost model above the caller that got it; else None."""
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
    """Return whether compiled code is among the callers: code that it resumes after a
    break, as at every attention, has a special name.
    """
    return any(
        "torch_dynamo_resume" in frame.f_code.co_name
        for frame in _walk_callers(inspect.currentframe())
    )


def find_trainer(callback: TrainerCallback) -> Trainer | None:
    """Return the Trainer in which a callback is called."""
    for frame in islice(_walk_callers(inspect.currentframe()), 1, None):
        trainer = frame.f_locals.get("self")
        if callback in getattr(getattr(trainer, "callback_handler", None), "callbacks", ()):
            return cast("Trainer", trainer)
    return None


def _select_model_frames(frames: Iterable[FrameType]) -> Iterator[FrameType]:
    """Select the frames that are forwards of models.

    Code that torch.compile resumes is named after the compiled function.
    """
    forwards = (frame for frame in frames if "forward" in frame.f_code.co_name)
    return (frame for frame in forwards if isinstance(frame.f_locals.get("self"), PreTrainedModel))


def _walk_callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that called it, from the inside out."""
    while frame is not None:
        yield frame
        frame = frame.f_back
