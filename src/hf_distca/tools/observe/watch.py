"""`Watch`: reads the documents of micro-batches from forwards of models, and times calls of
attention.

Tensors are kept and read later, so that no step waits for a device. Backward is timed from the
gradient of an attention's output to the first gradient of its inputs.
"""

from __future__ import annotations

import inspect
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from hf_distca.agreement.documents import TokenBatch
from hf_distca.errors import DistCAError
from hf_distca.runtime.meter import Mark, Meter, get_clock

# Parts of a batch that a kernel computes: each document; each row; each row, and what the mask
# hides.
DOCUMENTS, ROWS, MASKED_ROWS = range(3)


class BatchFacts(NamedTuple):
    """Facts about a micro-batch of one rank, as `json` writes them.

    Attributes:
        lengths: tokens of its documents.
        rows, row_length: number of rows, and of their tokens with padding.
        computed: `DOCUMENTS`, `ROWS` or `MASKED_ROWS`.
        layers: windows of layers, None for none, and the number of calls with each.
        seconds: in attention, forward and backward.
        elapsed: seconds until the next micro-batch began, or until now.
        shape: fields of the `AttentionShape`.
        device: "cpu", or the name of the GPU.
        attention: name of the attention implementation.
        unread: reason why documents are not known; "" where they are.
    """

    lengths: list[int]
    rows: int
    row_length: int
    computed: int
    layers: list[tuple[int | None, int]]
    seconds: float
    elapsed: float
    shape: tuple[int, int, int, int, int]
    device: str
    attention: str
    unread: str


@dataclass(eq=False)
class _WatchedBatch:
    """A micro-batch; `tokens` is None if its model got no tokens that can be read."""

    tokens: TokenBatch | None
    began: float
    ended: float | None = None
    meter: Meter = field(default_factory=Meter)  # of attention
    layers: Counter[int | None] = field(default_factory=Counter)
    computed: int = DOCUMENTS
    shape: tuple[int, int, int, int, int] = (1, 1, 1, 1, 1)
    call: tuple[str, str, int] = "", "", 0  # device, attention and number of queries

    def to_facts(self) -> BatchFacts:
        """Read documents and times, with a copy from the device."""
        lengths = list[int]()
        unread = ""
        tokens = self.tokens
        try:
            if tokens is None:
                unread = "the model got neither input_ids nor inputs_embeds"
            elif tokens.batch_size * tokens.length != self.call[2]:
                unread = (
                    f"attention has {self.call[2]} queries for a batch of {tokens.batch_size} x"
                    f" {tokens.length} tokens"
                )
            else:
                documents = tokens.read_documents(training=True)
                lengths = documents.runs[:, 2].tolist()
                if not documents.has_whole_documents:
                    unread = "documents lie on several ranks"
        except DistCAError as error:
            unread = str(error)
        return BatchFacts(
            lengths,
            0 if tokens is None else tokens.batch_size,
            0 if tokens is None else tokens.length,
            self.computed,
            list(self.layers.items()),
            self.meter.seconds,
            (self.ended or time.perf_counter()) - self.began,
            self.shape,
            torch.cuda.get_device_name() if self.call[0] == "cuda" else self.call[0],
            self.call[1],
            unread,
        )


class Watch:
    """Micro-batches of this process: outermost forwards of models that train, with attention.

    Attributes:
        on_batch: called when one begins.
        unattended: number of forwards that were taken without any call of attention.
    """

    def __init__(self, on_batch: Callable[[], None]) -> None:
        self.on_batch, self.unattended = on_batch, 0
        self._batches: deque[_WatchedBatch] = deque()
        self._open: _WatchedBatch | None = None

    def __len__(self) -> int:
        """Return the number of micro-batches that were not taken."""
        return len(self._batches)

    def take(self, *, end: bool = False) -> list[BatchFacts]:
        """Take the facts of micro-batches that a device has finished.

        Args:
            end: wait for the device.
        """
        taken = []
        if end and torch.cuda.is_available():
            torch.cuda.synchronize()
        while self._batches and self._batches[0].meter.is_finished:
            batch = self._batches.popleft()
            if batch.layers:
                taken.append(batch.to_facts())
            self.unattended += not batch.layers
            if batch is self._open:
                self._open = None
        return taken

    def note_forward(self, model: PreTrainedModel, arguments: Mapping[str, Any]) -> None:
        """Begin a micro-batch with the forward of a model, unless it trains nothing."""
        now = time.perf_counter()
        if self._batches:
            self._batches[-1].ended = self._batches[-1].ended or now
        self._open = None
        if not (model.training and torch.is_grad_enabled()):
            return
        self.on_batch()
        tokens = arguments.get("input_ids")
        if tokens is None and isinstance(arguments.get("inputs_embeds"), torch.Tensor):
            tokens = arguments["inputs_embeds"][..., 0]
        readable = isinstance(tokens, torch.Tensor) and tokens.dim() == 2
        self._open = _WatchedBatch(
            TokenBatch.from_batch({**arguments, "input_ids": tokens}) if readable else None, now
        )
        self._batches.append(self._open)

    def attend(
        self, name: str, function: Callable[..., Any], module: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Call an attention function of transformers, and time it if it is causal."""
        batch = self._open
        tensors = args[:3]
        if batch is None or not getattr(module, "is_causal", True) or len(tensors) < 3:
            return function(module, *args, **kwargs)
        query, key, value = tensors
        if not batch.layers:
            batch.shape = (
                query.shape[1],
                key.shape[1],
                query.shape[-1],
                value.shape[-1],
                query.element_size(),
            )
            batch.call = query.device.type, name, query.shape[0] * query.shape[2]
        batch.layers[kwargs.get("sliding_window")] += 1
        mask = args[3] if len(args) > 3 else kwargs.get("attention_mask")
        if name in ("sdpa", "eager"):
            batch.computed = ROWS if mask is None else MASKED_ROWS
        begin = get_clock(query.device)()
        result = function(module, *args, **kwargs)
        batch.meter.span("server", begin, get_clock(query.device)())
        if result[0].requires_grad:
            _time_backward(batch.meter, result[0], tensors)
        return result


def _time_backward(meter: Meter, output: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> None:
    """Time the backward of a call, once it runs."""
    begun: list[Mark] = []

    def begin(gradient: torch.Tensor) -> None:
        begun.append(get_clock(gradient.device)())

    def end(gradient: torch.Tensor) -> None:
        if begun:
            meter.span("server", begun.pop(), get_clock(gradient.device)())

    output.register_hook(begin)  # type: ignore[no-untyped-call]
    for tensor in inputs:
        if tensor.requires_grad:
            tensor.register_hook(end)  # type: ignore[no-untyped-call]


_watch: Watch | None = None
_depth = 0  # models whose forwards are running


def start_watch(on_batch: Callable[[], None]) -> Watch:
    """Watch all models of this process, instead of any earlier watch."""
    global _watch
    _follow_models()
    _watch = Watch(on_batch)
    return _watch


def stop_watch(watch: Watch) -> None:
    """End a watch, unless another one has begun."""
    global _watch
    if _watch is watch:
        _watch = None


@cache
def _follow_models() -> None:
    """Let models and transformers' table of attention functions tell the watch, if there is one."""
    call, find = PreTrainedModel.__call__, AttentionInterface.get_interface

    @wraps(call)
    def call_and_note(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        global _depth
        if _watch is None or torch.compiler.is_compiling():
            return call(self, *args, **kwargs)
        if not _depth:
            names = _list_parameters(type(self).forward)
            _watch.note_forward(self, {**dict(zip(names, args, strict=False)), **kwargs})
        _depth += 1
        try:
            return call(self, *args, **kwargs)
        finally:
            _depth -= 1

    @wraps(find)
    def get_interface(self: AttentionInterface, name: str, default: Any) -> Any:
        function = find(self, name, default)
        if _watch is None or torch.compiler.is_compiling():
            return function
        return partial(_watch.attend, name, function)

    PreTrainedModel.__call__ = call_and_note  # type: ignore[method-assign]
    AttentionInterface.get_interface = get_interface  # type: ignore[method-assign, assignment]


@cache
def _list_parameters(forward: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(forward).parameters)[1:]
