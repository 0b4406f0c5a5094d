"""`Watch`: reads the documents of micro-batches from the arguments of models, and times calls of
attention.

Tensors are kept and read later, so that no step waits for a device. The backward of a call is timed
from the gradient of its output to the first gradient of its inputs.
"""

from __future__ import annotations

import inspect
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from typing import Any, ClassVar, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from hf_distca.agreement.documents import TokenBatch
from hf_distca.errors import DistCAError, LayoutError
from hf_distca.integration.callers import is_in_model
from hf_distca.runtime.meter import Mark, Meter, get_clock


class BatchFacts(NamedTuple):
    """Facts about a micro-batch on one rank, in types that `json` can write.

    Attributes:
        shape: fields of the `AttentionShape`.
        device: "cpu", or the name of the GPU.
        attention: name of the attention implementation.
        lengths: number of tokens of each document.
        layers: for each sliding window (None for layers without one), the window and the number of
            calls with it.
        seconds: seconds in attention, forward and backward.
        unread: reason why the documents are not known; empty if they are known.
    """

    shape: tuple[int, int, int, int, int]
    device: str
    attention: str
    lengths: Sequence[int] = ()
    layers: Sequence[tuple[int | None, int]] = ()
    seconds: float = 0.0
    unread: str = ""


@dataclass(eq=False)
class _WatchedBatch:
    """A micro-batch.

    Attributes:
        tokens: tokens of the micro-batch; None if they cannot be read.
        meter: meter of its attention.
        layers: number of attention calls, by window.
        facts: facts from its first attention call; None before this call.
        queries: number of queries in its first attention call; 0 before this call.
    """

    tokens: TokenBatch | None
    meter: Meter = field(default_factory=Meter)
    layers: Counter[int | None] = field(default_factory=Counter)
    facts: BatchFacts | None = None
    queries: int = 0

    def complete(self, facts: BatchFacts) -> BatchFacts:
        """Return the facts with documents and times. Both are copied from the device."""
        try:
            if self.tokens is None:
                raise LayoutError("the model got neither input_ids nor inputs_embeds")
            if self.tokens.batch_size * self.tokens.length != self.queries:
                raise LayoutError(
                    f"attention has {self.queries} queries for a batch of"
                    f" {self.tokens.batch_size} x {self.tokens.length} tokens"
                )
            documents = self.tokens.read_documents(training=True)
            if not documents.has_whole_documents:
                raise LayoutError("documents lie on several ranks")
        except DistCAError as error:
            return facts._replace(unread=str(error))
        lengths, layers = documents.runs[:, 2].tolist(), list(self.layers.items())
        return facts._replace(lengths=lengths, layers=layers, seconds=self.meter.seconds)


class Watch:
    """Watches the micro-batches of this process. A micro-batch begins with the outermost forward of
    a model in training.

    Attributes:
        current: the watch of this process; None if there is no watch.
        on_batch: function that is called when a micro-batch begins.
        unattended: number of forwards in which no call of attention was seen.
    """

    current: ClassVar[Watch | None] = None

    def __init__(self, on_batch: Callable[[], None]) -> None:
        self.on_batch, self.unattended = on_batch, 0
        self._batches: deque[_WatchedBatch] = deque()
        self._open: _WatchedBatch | None = None

    def start(self) -> None:
        """Watch all models of this process, instead of any earlier watch."""
        _follow_models()
        Watch.current = self

    def stop(self) -> None:
        """Stop watching, unless another watch has replaced this one."""
        if Watch.current is self:
            Watch.current = None

    def take(self, *, end: bool = False) -> list[BatchFacts]:
        """Return the facts of the micro-batches that the device has finished since the last call.

        Args:
            end: whether to wait for the device first.
        """
        if end and torch.cuda.is_available():
            torch.cuda.synchronize()
        taken = []
        while self._batches and self._batches[0].meter.is_finished:
            batch = self._batches.popleft()
            if batch.facts is None:
                self.unattended += 1
            else:
                taken.append(batch.complete(batch.facts))
        return taken

    def note_forward(self, model: PreTrainedModel, arguments: Mapping[str, Any]) -> None:
        """Begin a micro-batch, because a model begins a forward. Ignore models in evaluation."""
        self._open = None
        if model.training and torch.is_grad_enabled():
            self.on_batch()
            tokens = arguments.get("input_ids")
            if tokens is None and isinstance(arguments.get("inputs_embeds"), torch.Tensor):
                tokens = arguments["inputs_embeds"][..., 0]
            readable = isinstance(tokens, torch.Tensor) and tokens.dim() == 2
            batch = {**arguments, "input_ids": tokens}
            self._open = _WatchedBatch(TokenBatch.from_batch(batch) if readable else None)
            self._batches.append(self._open)

    def attend(
        self, name: str, function: Callable[..., Any], module: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Call an attention function of transformers, and time it if it is causal."""
        batch = self._open
        if batch is None or not getattr(module, "is_causal", True) or len(args) < 3:
            return function(module, *args, **kwargs)
        q, k, v = args[:3]
        if batch.facts is None:
            shape = q.shape[1], k.shape[1], q.shape[-1], v.shape[-1], q.element_size()
            device = torch.cuda.get_device_name() if q.is_cuda else q.device.type
            batch.facts, batch.queries = BatchFacts(shape, device, name), q.shape[0] * q.shape[2]
        batch.layers[kwargs.get("sliding_window")] += 1
        now = get_clock(q.device)
        begin = now()
        result = function(module, *args, **kwargs)
        batch.meter.span("server", begin, now())
        if result[0].requires_grad:
            _time_backward(batch.meter, now, result[0], (q, k, v))
        return result


def _time_backward(
    meter: Meter, now: Callable[[], Mark], output: torch.Tensor, inputs: tuple[torch.Tensor, ...]
) -> None:
    """Time the backward of a call when it runs."""
    begun: list[Mark] = []

    def end(_: torch.Tensor) -> None:
        if begun:
            meter.span("server", begun.pop(), now())

    output.register_hook(lambda _: begun.append(now()))  # type: ignore[no-untyped-call]
    for tensor in inputs:
        if tensor.requires_grad:
            tensor.register_hook(end)  # type: ignore[no-untyped-call]


@cache
def _follow_models() -> None:
    """Make models, and transformers' table of attention functions, report to the current watch."""
    call, find = PreTrainedModel.__call__, AttentionInterface.get_interface

    @wraps(call)
    def call_and_note(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        watch = None if torch.compiler.is_compiling() else Watch.current
        if watch is not None and not is_in_model():
            names = list(inspect.signature(type(self).forward).parameters)[1:]
            watch.note_forward(self, {**dict(zip(names, args, strict=False)), **kwargs})
        return call(self, *args, **kwargs)

    @wraps(find)
    def get_interface(self: AttentionInterface, name: str, default: Any) -> Any:
        watch = None if torch.compiler.is_compiling() else Watch.current
        function = find(self, name, default)
        return function if watch is None else partial(watch.attend, name, function)

    PreTrainedModel.__call__ = call_and_note  # type: ignore[method-assign]
    AttentionInterface.get_interface = get_interface  # type: ignore[method-assign, assignment]
