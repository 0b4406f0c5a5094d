"""Decoder layers that run their tokens as two nano-batches, half a phase apart.

The layers of a model get a subclass of their own class, under its name, whose `forward` runs the original one twice, in turns.
The cut stays inside one call of the layer: hooks of FSDP, DeepSpeed or PEFT, checkpointing and collected hidden states see one
layer call, and no line of the model changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from typing import Any
from weakref import WeakSet

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from transformers.cache_utils import Cache

from hf_distca.borrowed import in_backward
from hf_distca.integration.families import PING_PONG
from hf_distca.integration.handle import AttentionHandle
from hf_distca.integration.nano_batches import NanoBatches
from hf_distca.integration.session import current_session
from hf_distca.runtime.pingpong import checkpointed_parts, run_nano_batches

__all__ = ["cut_layers"]

_log = logging.getLogger("hf_distca")
_seen: WeakSet[torch.nn.Module] = WeakSet()


def cut_layers(model: torch.nn.Module) -> None:
    """Let the decoder layers of a model run as two nano-batches where a micro-batch gains by it. Again has no effect."""
    if model in _seen:
        return
    _seen.add(model)
    model_type = str(getattr(getattr(model, "config", None), "model_type", None))
    if model_type not in PING_PONG:
        _log.warning(
            "ping-pong leaves the layers of %s models whole: it is not proven that attention is all that mixes tokens in them.",
            model_type,
        )
        return
    from transformers.modeling_layers import GradientCheckpointingLayer  # it imports what registers distca

    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in layers:
        if not hasattr(type(module), "_distca_whole"):
            module.__class__ = _in_nano_batches(type(module))  # type: ignore[arg-type]  # a class is hashable


@cache
def _in_nano_batches(base: Any) -> Any:
    """The class of layers like `base` that run as nano-batches."""

    @wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        whole = partial(base.forward, self)
        cut = _nano_batches_for(self, args, kwargs)
        return whole(*args, **kwargs) if cut is None else _run(whole, cut, args, kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:  # noqa: N807
        # Copies and pickles are of the class that has an address; their first forward makes them like this one again.
        _, arguments, *state = base.__reduce_ex__(self, protocol)
        return (_blank, (base, *arguments[1:]), *state)

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    made = type(base.__name__, (base,), {**names, "forward": forward, "__reduce_ex__": __reduce_ex__, "_distca_whole": base})
    return made


def _blank(kind: Any, *arguments: Any) -> Any:
    """A new object without a state. Needed because pickle lets `copyreg.__newobj__` make objects of their own class only."""
    return kind.__new__(kind, *arguments)


def _run(whole: Callable[..., Any], cut: NanoBatches, args: Any, kwargs: Any) -> Any:
    first, second = (partial(whole, *cut.part(nano, args), **cut.part(nano, kwargs)) for nano in (1, 2))
    device = next(one.device for one in _flat((args, kwargs)) if isinstance(one, torch.Tensor))
    trace = current_session().trace
    if trace is not None:
        trace.border(device)
    output = cut.join(*run_nano_batches(first, second, device.type))
    grown = next((one for one in _flat((output,)) if isinstance(one, torch.Tensor) and one.requires_grad), None)
    if trace is not None and grown is not None:
        grown.register_hook(lambda _: trace.border(device))  # type: ignore[no-untyped-call]
    return output


def _nano_batches_for(layer: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> NanoBatches | None:
    """How to cut this call of a layer; None to run it whole."""
    flat = list(_flat((args, kwargs)))
    handles = {id(one): one for one in flat if isinstance(one, AttentionHandle)}
    if len(handles) != 1:
        return None
    handle = next(iter(handles.values()))
    if in_backward():  # a recompute, which must do what the forward did
        found = handle.nano_batches
        return found if found is not None and id(layer) in found.layers else None
    # Nano-batches fill no cache. Who trains does not read it; who generates does, also with a model in training mode.
    if any(isinstance(one, Cache) for one in flat) and not (layer.training and torch.is_grad_enabled()):
        return None
    session = current_session()
    if handle.nano or not (session.config.ping_pong and session.shares(handle, layer.training)):
        return None
    if (why := _holds_attention(layer)) is not None:
        _warn_of_parts(why)
        return None
    if handle.nano_batches is None:
        documents = session.documents(handle, kwargs, layer.training)
        if documents.spans and (documents.dealt is None or documents.dealt.first_tokens is None):
            _warn_of_spans()
            return None
        handle.nano_batches = NanoBatches.of(handle, documents, session.config.tile)
    if handle.nano_batches.pointless:
        return None
    handle.nano_batches.layers.add(id(layer))
    return handle.nano_batches


def _attends(module: torch.nn.Module) -> bool:
    """Whether a module is one that calls attention, as transformers writes them."""
    return hasattr(module, "is_causal") or "attention" in type(module).__name__.lower()


def _holds_attention(layer: torch.nn.Module) -> str | None:
    """What is done with the attention of a layer by itself that nano-batches in turns would not survive; None if nothing."""
    sharded = [part for part in layer.modules() if part is not layer and isinstance(part, (FSDPModule, FullyShardedDataParallel))]
    for parts, why in ((checkpointed_parts(layer), "checkpointed"), (sharded, "sharded by FSDP")):
        if any(_attends(module) for part in parts for module in part.modules()):
            return why
    return None


@cache
def _warn_of_parts(why: str) -> None:
    _log.warning(
        "ping-pong leaves layers whole whose attention is %s by itself: do it with whole layers, which costs no second attention "
        "under distca, and which ping-pong can cut.",
        why,
    )


@cache
def _warn_of_spans() -> None:
    _log.warning(
        "ping-pong leaves layers whole while documents span ranks, unless they were dealt for it: give the same DistCAConfig to "
        "`document_shares`."
    )


def _flat(value: Any) -> Iterator[Any]:
    """What tuples, lists and dictionaries hold."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if type(value) in (tuple, list):
        for one in value:
            yield from _flat(one)
    else:
        yield value
