"""What is read from the call stack: questions to which transformers gives no other answer, or not in every case.

Read against transformers 5.23.0. Each question has its public way beside it, and that is tried first:

- Which model asks for a mask, for its device mesh and its layers: `hf_distca.prepare`, which `DistCACallback` calls for the model
  of a Trainer. The stack is for those who change one argument and call nothing.
- Which Trainer a callback belongs to, to stand in front of its reporters, or a forward is a step of, for its own loss:
  `DistCATrainerMixin`, which is one.
- Which position ids a ``create_..._mask`` was given, and which documents its model: no public way. Mask functions get the config
  and no positions, and some models do not hand their keyword arguments on to attention.
- Whether a forward is one of `generate`: no public way. A model in training mode can generate, too.

Where a frame is not found, as under another version or compiled, the answer is None or False and nothing fails here.

Before Python 3.13, reading the variables of a frame leaves a copy of them on it until its function returns. So they are read of
frames that end soon, and of none of those that look: a loop whose variables were read would keep the logits of its last step.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask

if TYPE_CHECKING:  # importing it brings in peft and, through that, what must not be there when a notebook starts processes
    from transformers import Trainer
    from transformers.trainer_callback import TrainerCallback

__all__ = ["MaskCall", "calling_trainer", "given_documents", "given_to_model", "is_compiled", "is_in_model"]

_STEPS = ("training_step", "prediction_step")


class MaskCall:
    """The call of a ``create_..._mask`` of transformers from inside which this is made; keep it no longer than that call.

    The stack is walked once, for all questions. The frames of who makes this are not among those it holds, which would hold them.
    """

    def __init__(self) -> None:
        masking = create_causal_mask.__module__
        frames = _callers(inspect.currentframe())
        self._creator = next((frame for frame in frames if frame.f_globals.get("__name__") == masking), None)
        above = islice(_callers(inspect.currentframe()), 2, None) if self._creator is None else _callers(self._creator)
        self._frames = list(above)
        self._models = list(_of_models(self._frames))

    @property
    def position_ids(self) -> torch.Tensor | None:
        """The (batch, length) position ids it was given. Llama 4 and Persimmon pass none to attention."""
        positions = None if self._creator is None else self._creator.f_locals.get("position_ids")
        return positions if isinstance(positions, torch.Tensor) and positions.dim() == 2 else None

    @property
    def given_positions(self) -> torch.Tensor | None:
        """The position ids of the innermost model: of some that hand none to the mask (RoBERTa), or hand none with three axes."""
        return self._tensor("position_ids")

    @property
    def attention_mask(self) -> torch.Tensor | None:
        """The mask of the innermost model in its own numbers, which transformers makes bool."""
        return self._tensor("attention_mask")

    @property
    def lacks_positions(self) -> bool:
        """Whether the outermost model that names position ids was given none; what is inside may have made its own."""
        names = [frame.f_locals for frame in self._models if "position_ids" in frame.f_locals]
        return bool(names) and names[-1]["position_ids"] is None

    @property
    def documents(self) -> Any:
        """What the model was given as ``distca_documents``. Not all hand it on to attention (Nemotron, StableLM)."""
        return _given("distca_documents", self._models)

    @property
    def generating(self) -> bool:
        """Whether `generate` led here."""
        return _generate() in [frame.f_code for frame in self._frames]

    @property
    def in_data_parallel(self) -> bool:
        """Whether a thread of `torch.nn.DataParallel` led here, which runs a replica of the model."""
        return torch.nn.parallel.parallel_apply.__code__.co_filename in [frame.f_code.co_filename for frame in self._frames]

    @property
    def trainer(self) -> Trainer | None:
        """The Trainer whose step led here, of training or of evaluation."""
        steps = (frame.f_locals.get("self") for frame in self._frames if frame.f_code.co_name in _STEPS)
        return cast("Trainer | None", next((trainer for trainer in steps if hasattr(trainer, "callback_handler")), None))

    def models(self) -> Iterator[PreTrainedModel]:
        """The models whose forwards led here, from the inside out."""
        for frame in self._models:
            yield frame.f_locals["self"]

    def _tensor(self, name: str) -> torch.Tensor | None:
        """A variable of the innermost model, if it is a tensor."""
        value = self._models[0].f_locals.get(name) if self._models else None
        return value if isinstance(value, torch.Tensor) else None


def given_documents(frame: FrameType | None = None) -> Any:
    """What the innermost model that has it, above a frame or the caller, was given as ``distca_documents``; None if none was."""
    return given_to_model("distca_documents", frame)


def given_to_model(name: str, frame: FrameType | None = None) -> Any:
    """What the innermost model that has it, above a frame or the caller, was given under a name; None if none was."""
    return _given(name, _of_models(_callers(frame or inspect.currentframe())))


def _given(name: str, models: Iterable[FrameType]) -> Any:
    """What the first of these forwards of models that has it was given under a name; None if none was."""
    for model in models:
        for value in model.f_locals.values():
            if isinstance(value, dict) and value.get(name) is not None:
                return value[name]
    return None


def is_in_model() -> bool:
    """Whether the forward of a model led here."""
    return next(_of_models(_callers(inspect.currentframe())), None) is not None


def is_compiled() -> bool:
    """Whether compiled code led here: what it resumes after a break, as at every attention, has a name of its own."""
    return any("torch_dynamo_resume" in frame.f_code.co_name for frame in _callers(inspect.currentframe()))


def calling_trainer(callback: TrainerCallback) -> Trainer | None:
    """The Trainer in which a callback is called."""
    here = inspect.currentframe()
    for frame in _callers(None if here is None else here.f_back):
        trainer = frame.f_locals.get("self")
        if callback in getattr(getattr(trainer, "callback_handler", None), "callbacks", ()):
            return cast("Trainer", trainer)
    return None


@cache
def _generate() -> CodeType:
    from transformers import GenerationMixin

    code: CodeType = inspect.unwrap(GenerationMixin.generate).__code__
    return code


def _of_models(frames: Iterable[FrameType]) -> Iterator[FrameType]:
    """Those that are forwards of models. What torch.compile resumes is named after what it compiled."""
    named = (frame for frame in frames if "forward" in frame.f_code.co_name)
    return (frame for frame in named if isinstance(frame.f_locals.get("self"), PreTrainedModel))


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that called it, from the inside out."""
    while frame is not None:
        yield frame
        frame = frame.f_back
