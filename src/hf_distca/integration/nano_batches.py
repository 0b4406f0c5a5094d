"""Decoder layers that run their tokens as two nano-batches, half a phase apart.

The layers of a model get a subclass of their own class, under its name, whose `forward` runs the
original one twice, in turns. The cut stays inside one call of the layer: hooks of FSDP, DeepSpeed
or PEFT, checkpointing and collected hidden states see one layer call, and no line of the model
changes.

One row is cut among its tokens, between documents if a document starts near the middle. Several
rows are cut among the rows. A document that crosses the cut needs, in the second nano-batch, the
keys that the first one made: they are handed over inside the layer, with their gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial, wraps
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from transformers.cache_utils import Cache

from hf_distca.agreement.documents import Documents
from hf_distca.borrowed import in_backward
from hf_distca.errors import UnsupportedError
from hf_distca.integration.current_session import current_session
from hf_distca.integration.families import PING_PONG
from hf_distca.integration.handle import AttentionHandle
from hf_distca.integration.processes import warn_once
from hf_distca.integration.work_planner import WorkPlanner
from hf_distca.runtime.pingpong import find_checkpointed_parts, run_nano_batches

__all__ = ["Handover", "NanoBatches", "can_cut", "cut", "cut_layers"]

_log = logging.getLogger("hf_distca")

# A cut between documents is taken if the smaller nano-batch then has at least this part of the
# tokens.
_SMALLEST = 3 / 8


@dataclass(eq=False)
class Handover:
    """Keys and values of the first nano-batch that the second one also reads: those of its last
    `tokens` tokens.
    """

    tokens: int
    given: tuple[torch.Tensor, torch.Tensor] | None = None

    def context(
        self, nano: int, k_TKD: torch.Tensor, v_TKV: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Store the keys and values of the first nano-batch, or return them as context of the
        second one.
        """
        if not self.tokens:
            return None
        if nano == 1:
            self.given = k_TKD[-self.tokens :], v_TKV[-self.tokens :]
            return None
        if self.given is None:
            raise UnsupportedError(
                "the second nano-batch of a layer called attention before the first: set"
                " ping_pong=False."
            )
        given, self.given = self.given, None
        return given


@dataclass(eq=False)
class NanoBatches:
    """The cut of one batch, for one kind of layer. Nano-batches have the numbers 1 and 2.

    Attributes:
        batch_size, length: shape of the batch.
        axis: 0 if rows are cut, 1 if tokens are.
        border: index on that axis where the second nano-batch begins.
        sizes: sizes of both on that axis. A batch of one token is all in the second; the first
            computes that token as padding, and its output is dropped, so that it takes part in
            every exchange, as on the other ranks.
        handles: handle of each nano-batch in place of a mask.
        layers: ids of the layers that ran as nano-batches, for recomputes.
    """

    batch_size: int
    length: int
    axis: int
    border: int
    sizes: tuple[int, int]
    handles: tuple[AttentionHandle, AttentionHandle]
    layers: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, handle: AttentionHandle, documents: Documents, tile: int) -> NanoBatches:
        """Cut a batch whose documents each lie on one rank, or were dealt for ping-pong."""
        rows, length = handle.batch_size, handle.length
        axis, border, parts = cut(rows, length, documents, tile)
        sizes = max(border, 1), (length if axis else rows) - border
        handover = Handover(parts[1].context_tokens)
        first, second = (
            handle.of_nano_batch(nano, (rows, size) if axis else (size, length), part, handover)
            for nano, (size, part) in enumerate(zip(sizes, parts, strict=True), 1)
        )
        first.second = second
        return cls(rows, length, axis, border, sizes, (first, second))

    @property
    def pointless(self) -> bool:
        """True if both are planned and neither exchanges anything: there is nothing to hide."""
        work = [work for handle in self.handles for work in handle.work.values()]
        return len(work) > 1 and not any(kind.route.exchanges for kind in work)

    def part(self, nano: int, value: Any) -> Any:
        """Return a nano-batch's part of an argument of a layer, or of several in a tuple, list or
        dictionary.
        """
        if isinstance(value, torch.Tensor):
            dim = self._dim(value)
            if dim is None:
                return value
            return value.narrow(dim, 0 if nano == 1 else self.border, self.sizes[nano - 1])
        if isinstance(value, AttentionHandle):
            return self.handles[nano - 1]
        if isinstance(value, Cache):
            return None  # as under activation checkpointing: a cache would be filled twice
        if isinstance(value, dict):
            return {name: self.part(nano, item) for name, item in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self.part(nano, item) for item in value)
        return value

    def join(self, first: Any, second: Any) -> Any:
        """Join the outputs of a layer's nano-batches.

        Raises:
            UnsupportedError: if an output has other parts than tensors with the cut axis.
        """
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
            if (
                tuple(
                    part.shape[self.axis] if part.dim() > self.axis else 0
                    for part in (first, second)
                )
                == self.sizes
            ):
                return torch.cat([first.narrow(self.axis, 0, self.border), second], self.axis)
        elif first is None and second is None:
            return None
        elif (
            type(first) in (tuple, list)
            and type(second) is type(first)
            and len(first) == len(second)
        ):
            return type(first)(self.join(*pair) for pair in zip(first, second, strict=True))
        shown = (
            (
                f"a tensor of {tuple(part.shape)}"
                if isinstance(part, torch.Tensor)
                else type(part).__name__
            )
            for part in (first, second)
        )
        raise UnsupportedError(
            f"a decoder layer returned {' and '.join(shown)} for nano-batches of {self.sizes}"
            f" {'tokens' if self.axis else 'rows'}, which ping-pong cannot join: set"
            " DistCAConfig(ping_pong=False)."
        )

    def _dim(self, tensor: torch.Tensor) -> int | None:
        """Return the dimension of an argument that the cut goes through, None if it is the same for
        all tokens.
        """
        shape = tuple(tensor.shape)
        if self.axis == 0:
            return next(
                (
                    d
                    for d in range(len(shape) - 1)
                    if shape[d : d + 2] == (self.batch_size, self.length)
                ),
                None,
            )
        if len(shape) == 1 and tensor.is_floating_point():
            # A vector of the layer's width may be as long as the batch; what tokens have one by one
            # are integers.
            return None
        return next(
            (
                d
                for d in range(len(shape))
                if shape[d] == self.length and (d == 0 or shape[d - 1] == 1)
            ),
            None,
        )


def cut(
    batch_size: int, length: int, documents: Documents, tile: int
) -> tuple[int, int, tuple[Documents, Documents]]:
    """Choose the cut of a (batch_size, length) batch: axis and index as in `NanoBatches`, and the
    documents of both parts.
    """
    axis = 0 if batch_size > 1 else 1
    if documents.dealt_share is not None and documents.dealt_share.first_nano_tokens is not None:
        border = documents.dealt_share.first_nano_tokens
    else:
        border = batch_size // 2 if axis == 0 else _middle(length, documents, tile)
    first, second = documents.split_at(border if axis else border * length)
    if not border:
        first = replace(first, token_indices=np.zeros(0, dtype=np.int64))
    return axis, border, (first, second)


def _middle(length: int, documents: Documents, tile: int) -> int:
    """Choose the token to cut a row at."""
    starts = np.cumsum(documents.runs[:-1, 2])
    tokens = starts if documents.token_indices is None else documents.token_indices[starts]
    near = tokens[np.minimum(tokens, length - tokens) >= _SMALLEST * length]
    if len(near):
        return int(near[np.abs(near - length / 2).argmin()])
    half = length // 2
    return half // tile * tile if half >= 4 * tile else half


_seen: WeakSet[torch.nn.Module] = WeakSet()


def cut_layers(model: torch.nn.Module) -> None:
    """Let the decoder layers of a model run as two nano-batches if a micro-batch gains by it."""
    if model in _seen:
        return
    _seen.add(model)
    model_type = str(getattr(getattr(model, "config", None), "model_type", None))
    if model_type not in PING_PONG:
        text = (
            "ping-pong leaves the layers of %s models whole: it is not proven that attention is all"
            " that mixes tokens in them."
        )
        _log.warning(text, model_type)
        return
    # It imports what registers distca.
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[Any] = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    for module in layers:
        if not hasattr(type(module), "_distca_whole"):
            module.__class__ = _in_nano_batches(type(module))  # type: ignore[arg-type]  # a class is hashable


@cache
def _in_nano_batches(base: Any) -> Any:
    """Make the class of layers like `base` that run as nano-batches."""

    @wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        whole = partial(base.forward, self)
        cut = _nano_batches_for(self, args, kwargs)
        return whole(*args, **kwargs) if cut is None else _run(whole, cut, args, kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:  # noqa: N807
        # Copies and pickles are of the class that has an address; their first forward makes them
        # like this one again.
        _, arguments, *state = base.__reduce_ex__(self, protocol)
        return (_blank, (base, *arguments[1:]), *state)

    names = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    return type(
        base.__name__,
        (base,),
        {**names, "forward": forward, "__reduce_ex__": __reduce_ex__, "_distca_whole": base},
    )


def _blank(kind: Any, *arguments: Any) -> Any:
    """Make a new object without a state.

    Needed because pickle lets `copyreg.__newobj__` make objects of their own class only.
    """
    return kind.__new__(kind, *arguments)


def _run(whole: Callable[..., Any], cut: NanoBatches, args: Any, kwargs: Any) -> Any:
    first, second = (
        partial(whole, *cut.part(nano, args), **cut.part(nano, kwargs)) for nano in (1, 2)
    )
    device = next(
        tensor.device for tensor in _flat((args, kwargs)) if isinstance(tensor, torch.Tensor)
    )
    trace = current_session().trace
    if trace is not None:
        trace.mark_border(device)
    output = cut.join(*run_nano_batches(first, second, device.type))
    grown = next(
        (
            tensor
            for tensor in _flat((output,))
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad
        ),
        None,
    )
    if trace is not None and grown is not None:
        grown.register_hook(lambda _: trace.mark_border(device))  # type: ignore[no-untyped-call]
    return output


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it looks at arguments and groups, and computes nothing
def _nano_batches_for(
    layer: torch.nn.Module, args: Any, kwargs: dict[str, Any]
) -> NanoBatches | None:
    """Choose the cut of this call of a layer; None to run it whole."""
    flat = list(_flat((args, kwargs)))
    handles = {id(argument): argument for argument in flat if isinstance(argument, AttentionHandle)}
    if len(handles) != 1:
        return None
    handle = next(iter(handles.values()))
    if in_backward():  # a recompute, which must do what the forward did
        nano_batches = handle.nano_batches
        return (
            nano_batches if nano_batches is not None and id(layer) in nano_batches.layers else None
        )
    # Nano-batches fill no cache. Who trains does not read it; who generates does, also with a model
    # in training mode.
    if any(isinstance(argument, Cache) for argument in flat) and not (
        layer.training and torch.is_grad_enabled()
    ):
        return None
    session = current_session()
    if handle.nano or not (session.elsewhere or WorkPlanner(session)).uses_nano_batches(
        handle, layer.training
    ):
        return None
    if (why := _holds_attention(layer)) is not None:
        warn_once(
            "ping-pong leaves layers whole whose attention is %s by itself: do it with whole"
            " layers, which costs no second attention under distca, and which ping-pong can cut.",
            why,
        )
        return None
    if handle.nano_batches is None:
        documents = WorkPlanner(session).read_documents(handle, kwargs, layer.training)
        if documents.span_ranks and (
            documents.dealt_share is None or documents.dealt_share.first_nano_tokens is None
        ):
            warn_once(
                "ping-pong leaves layers whole while documents span ranks, unless they were dealt"
                " for it: give the same DistCAConfig to `document_shares`."
            )
            return None
        handle.nano_batches = NanoBatches.of(handle, documents, session.config.tile)
    if handle.nano_batches.pointless:
        return None
    handle.nano_batches.layers.add(id(layer))
    return handle.nano_batches


def can_cut(model: torch.nn.Module) -> bool:
    """Return whether all decoder layers of a model that ran once can run as two nano-batches."""
    layers = [module for module in model.modules() if hasattr(type(module), "_distca_whole")]
    return bool(layers) and all(_holds_attention(layer) is None for layer in layers)


def _holds_attention(layer: torch.nn.Module) -> str | None:
    """Return why this layer cannot interleave nano-batches: its attention is checkpointed or
    sharded on its own; else None.

    A module counts as attention by transformers' conventions for such modules.
    """
    sharded = [
        part
        for part in layer.modules()
        if part is not layer and isinstance(part, (FSDPModule, FullyShardedDataParallel))
    ]
    for parts, why in (
        (find_checkpointed_parts(layer), "checkpointed"),
        (sharded, "sharded by FSDP"),
    ):
        modules = [module for part in parts for module in part.modules()]
        if any(
            hasattr(module, "is_causal") or "attention" in type(module).__name__.lower()
            for module in modules
        ):
            return why
    return None


def _flat(value: Any) -> Iterator[Any]:
    """Yield the contents of nested tuples, lists and dictionaries."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if type(value) in (tuple, list):
        for item in value:
            yield from _flat(item)
    else:
        yield value
