"""Ping-pong: decoder layers run their tokens as two nano-batches. While the messages of one
nano-batch travel, the other nano-batch computes.

The class of each layer is replaced by a subclass with the same name. The `forward` of the subclass
runs the original `forward` twice, and switches between the two runs. The cut stays inside one call
of the layer. So checkpointing, collected hidden states, and hooks of FSDP, DeepSpeed or PEFT see
one call of the layer, and no line of the model changes.

A subclass is needed for checkpointing. transformers wraps the `forward` of every layer class when
the class is defined, and a layer is checkpointed only by the wrapper in its own class. Replacing
`forward` in the existing class would hide that wrapper, and switch checkpointing off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial, wraps
from typing import Any
from weakref import WeakSet

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from transformers.cache_utils import Cache

from hf_distca.borrowed import is_in_backward
from hf_distca.integration.families import PING_PONG_FAMILIES
from hf_distca.integration.handle import MaskStandIn
from hf_distca.integration.nano_batches import NanoBatches
from hf_distca.integration.processes import LOG, warn_once
from hf_distca.runtime.pingpong import find_checkpointed_parts, run_nano_batches

_cut_models: WeakSet[torch.nn.Module] = WeakSet()


def cut_layers(model: torch.nn.Module) -> None:
    """Enable the decoder layers of a model to run as two nano-batches."""
    if model in _cut_models:
        return
    _cut_models.add(model)
    model_type = str(getattr(getattr(model, "config", None), "model_type", None))
    if model_type not in PING_PONG_FAMILIES:
        LOG.warning(
            "ping-pong leaves the layers of %s models whole: it is not proven that only attention"
            " mixes their tokens.",
            model_type,
        )
        return
    # Not imported at the top, because this import registers distca.
    from transformers.modeling_layers import GradientCheckpointingLayer

    for module in model.modules():
        is_layer = isinstance(module, GradientCheckpointingLayer)
        if is_layer and not hasattr(type(module), "_distca_whole"):
            module.__class__ = _make_layer_class(type(module))  # type: ignore[arg-type]  # a class is hashable


@cache
def _make_layer_class(base: Any) -> Any:
    """Make the subclass of `base` whose layers can run as nano-batches."""

    @wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        run_whole = partial(base.forward, self)
        cut = _choose_nano_batches(self, args, kwargs)
        return (
            run_whole(*args, **kwargs)
            if cut is None
            else _run_cut_layer(run_whole, cut, args, kwargs)
        )

    def __reduce_ex__(self: Any, protocol: Any) -> Any:  # noqa: N807
        # Copies and pickled layers have the class `base`, because pickle can import `base` by its
        # name. The first forward of their model gives them this subclass again.
        _, arguments, *state = base.__reduce_ex__(self, protocol)
        return (_make_blank, (base, *arguments[1:]), *state)

    return type(
        base.__name__,
        (base,),
        {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "forward": forward,
            "__reduce_ex__": __reduce_ex__,
            "_distca_whole": base,
        },
    )


def _make_blank(kind: Any, *arguments: Any) -> Any:
    """Make a new object of a class, without a state.

    This is needed because pickle accepts `copyreg.__newobj__` only for the object's own class.
    """
    return kind.__new__(kind, *arguments)


def _run_cut_layer(forward: Callable[..., Any], cut: NanoBatches, args: Any, kwargs: Any) -> Any:
    parts = [
        partial(forward, *cut.select_part(nano, args), **cut.select_part(nano, kwargs))
        for nano in (1, 2)
    ]
    device = next(
        tensor.device
        for tensor in _flatten_values((args, kwargs))
        if isinstance(tensor, torch.Tensor)
    )
    return cut.merge_outputs(*run_nano_batches(*parts, device.type))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it looks at arguments and groups, and computes nothing
def _choose_nano_batches(
    layer: torch.nn.Module, args: Any, kwargs: dict[str, Any]
) -> NanoBatches | None:
    """Choose how this call of a layer is cut into nano-batches; None if the layer runs whole."""
    arguments = list(_flatten_values((args, kwargs)))
    # A decoder layer of a model like Bart's also gets the mask of cross attention, after its own.
    mask = next((argument for argument in arguments if isinstance(argument, MaskStandIn)), None)
    if mask is None:
        return None
    batch, planner = mask.batch, mask.batch.planner
    if is_in_backward():  # a recompute must run whole or cut, like its forward
        cut = batch.nano_batches
        return cut if cut is not None and id(layer) in cut.layer_ids else None
    # Nano-batches cannot read a cache. A cache is never read in training, but may be read in
    # generation, even with a model in training mode.
    if any(isinstance(argument, Cache) for argument in arguments) and not (
        layer.training and torch.is_grad_enabled()
    ):
        return None
    if mask.nano or not planner.uses_nano_batches(batch, batch.is_training(layer)):
        return None
    if (reason := _separate_attention_reason(layer)) is not None:
        warn_once(
            "ping-pong leaves layers whole if their attention is %s separately. Checkpoint or shard"
            " whole layers instead: ping-pong can cut such layers, and under distca a checkpointed"
            " layer does not compute attention a second time.",
            reason,
        )
        return None
    if batch.nano_batches is None:
        documents = planner.read_documents(batch, kwargs, batch.is_training(layer))
        if documents.span_ranks and (
            documents.dealt_share is None or documents.dealt_share.first_nano_tokens is None
        ):
            warn_once(
                "ping-pong leaves layers whole, because documents span ranks and were not dealt for"
                " ping-pong: give the same DistCAConfig to `document_shares`."
            )
            return None
        batch.nano_batches = NanoBatches.cut_batch(
            batch.tokens.shape,
            documents,
            planner.session.config.tile,
            cuts_documents=batch.context.ahead is None,
        )
    if batch.cannot_overlap:
        return None
    batch.nano_batches.layer_ids.add(id(layer))
    return batch.nano_batches


def can_cut_layers(model: torch.nn.Module) -> bool:
    """Return whether all decoder layers of a model can run as two nano-batches. Call it after the
    first forward.
    """
    layers = [module for module in model.modules() if hasattr(type(module), "_distca_whole")]
    return bool(layers) and all(_separate_attention_reason(layer) is None for layer in layers)


def _separate_attention_reason(layer: torch.nn.Module) -> str | None:
    """Return why this layer cannot interleave nano-batches, or None if it can. It cannot if its
    attention is checkpointed or sharded separately from the layer.

    Attention modules are found by transformers' conventions: their name, or an attribute
    `is_causal`.
    """
    sharded = [
        part
        for part in layer.modules()
        if part is not layer and isinstance(part, (FSDPModule, FullyShardedDataParallel))
    ]
    for parts, reason in (
        (find_checkpointed_parts(layer), "checkpointed"),
        (sharded, "sharded by FSDP"),
    ):
        modules = [module for part in parts for module in part.modules()]
        if any(
            hasattr(module, "is_causal") or "attention" in type(module).__name__.lower()
            for module in modules
        ):
            return reason
    return None


def _flatten_values(value: Any) -> Iterator[Any]:
    """Yield the contents of nested tuples, lists and dictionaries."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if type(value) in (tuple, list):
        for item in value:
            yield from _flatten_values(item)
    else:
        yield value
