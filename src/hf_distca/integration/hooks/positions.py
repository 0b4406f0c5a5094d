"""Positions in models whose documents lie in several parts.

A model must use the positions that its tokens have in their documents.

With ``rope_type`` "dynamic" or "longrope", a rotary module also chooses its frequencies by the
largest position in the batch. A rank that holds only the beginning of a document would choose other
frequencies than the rank with the end. Every share (a rank's part of a global batch) knows the
largest position of the batch. So this position passes through the module as one more token, whose
rotation is dropped.

A "dynamic" module also remembers the largest position of earlier batches, until a batch is shorter
than the length for which the model was made. If a rank evaluates or generates alone, the remembered
position would change on this rank only. So before each share the module gets back the state that
earlier shares left, which is the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_distca.agreement.documents import PackedDocuments
from hf_distca.errors import LayoutError, UnsupportedError
from hf_distca.integration.callers import find_model_argument
from hf_distca.kernels.varlen import to_device

_checked_models: WeakSet[torch.nn.Module] = WeakSet()
_first_positions: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()


def find_first_position(model: torch.nn.Module | None) -> int:
    """Return the position that a model gives to the first token of a document: `padding_idx` + 1 in
    RoBERTa and similar models, 0 in all other models.
    """
    if model is None:
        return 0
    if model not in _first_positions:
        _first_positions[model] = max(map(_read_first_position, model.modules()))
    return _first_positions[model]


def _read_first_position(module: torch.nn.Module) -> int:
    counts = hasattr(module, "create_position_ids_from_input_ids") and hasattr(
        module, "position_embeddings"
    )
    padding = getattr(module, "padding_idx", None) if counts else None
    return 0 if padding is None else int(padding) + 1


def accept_document_positions() -> None:
    """Add a hook to each new model that counts positions from a number other than 0. The hook
    shifts the positions of documents, which count from 0.

    The collator cannot shift them, because it does not know the model. If a batch has
    ``distca_documents``, its positions and the positions that the model needs differ only by a
    constant.
    """
    original = PreTrainedModel.post_init

    @wraps(original)
    def post_init(self: PreTrainedModel) -> None:
        original(self)  # type: ignore[no-untyped-call]
        if any(map(_read_first_position, self.children())):
            self.register_forward_pre_hook(_shift_positions, with_kwargs=True)

    PreTrainedModel.post_init = post_init  # type: ignore[method-assign]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiler would make a graph for each length
def _shift_positions(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    documents, positions = kwargs.get("distca_documents"), kwargs.get("position_ids")
    if not isinstance(documents, PackedDocuments):
        return None
    expected = documents.positions + find_first_position(model)
    tokens = next(
        (
            value
            for value in (positions, *args, *kwargs.values())
            if isinstance(value, torch.Tensor)
        ),
        None,
    )
    shape = () if tokens is None else tokens.shape[:2]
    if tokens is None or math.prod(shape) != len(expected) or not len(expected):
        return None
    if positions is None:
        positions = to_device(torch.from_numpy(expected), tokens.device).view(shape)
    else:
        positions = positions - positions.flatten()[0] + int(expected[0])
    return args, {**kwargs, "position_ids": positions}


def mark_document_starts(axes: torch.Tensor | None) -> torch.Tensor | None:
    """Convert positions on two or three axes, (axes, batch, length), to (batch, length): 0 for the
    first token of each document, 1 for all others. Return None for any other shape.

    Only the first token of a document has 0 on all axes. Inside a document the positions of an axis
    may decrease, for example at the end of an image.
    """
    return (
        (axes != 0).any(0).long()
        if axes is not None and axes.dim() == 3 and len(axes) in (2, 3)
        else None
    )


def check_positions(
    model: PreTrainedModel,
    documents: PackedDocuments,
    position_ids: torch.Tensor | None,
    *,
    counts_itself: bool = False,
) -> None:
    """Check that the position ids of a model's first batch are the positions in its documents. They
    differ if, for example, a training loop passes no position ids.

    Attention reads the parts of documents from ``distca_documents``. The rest of the model reads
    position ids, or, without position ids, counts a rank's tokens from 0. A model that passed is
    not checked again, because the check may wait for a device. For whole documents, only the
    position of each document's first token is compared, and only if the model does not count from
    0.

    Args:
        model, documents: the model of the forward, and its documents.
        position_ids: (1 or batch, length) position ids that the model uses; None if they are not
            known. In a model that counts from 0, all ids may exceed the positions in documents by
            the same constant.
        counts_itself: whether the model got no position ids and counts tokens itself. Its count may
            be unknown, as in OPT.

    Raises:
        LayoutError: names the difference.
    """
    first = find_first_position(model)
    if model in _checked_models or (documents.starts is None and not first):
        return
    position = documents.positions + first
    if counts_itself:
        counted = np.arange(len(position)) + first
    elif position_ids is None or position_ids.numel() != len(position):
        return  # a wrong number of positions raises an error when documents are read
    else:
        counted = position_ids.reshape(-1).cpu().numpy()
    offsets = counted - position
    is_wrong = offsets != (0 if first else offsets[:1]) if len(offsets) else offsets != 0
    is_wrong |= offsets < 0
    if documents.starts is None:
        is_wrong &= documents.positions == 0
    if is_wrong.any():
        token = int(is_wrong.argmax())
        raise LayoutError(
            f"{type(model).__name__} has position {counted[token]} for token {token} of the batch,"
            f" but distca_documents requires position {position[token]}"
            + (f" (this model counts from {first})" if first else "")
            + ". Give the model position_ids, as PackingCollator does for shares."
        )
    if not counts_itself:
        _checked_models.add(model)


# Attributes that distca sets on a rotary module. The first tells whether the largest position was
# appended to the position ids of the running call. The second maps each kind of layer to the length
# that the module remembers from earlier shares.
_HAS_LONGEST, _REACHED = "_distca_longer", "_distca_reached"
_found_rotaries: WeakKeyDictionary[torch.nn.Module, tuple[list[torch.nn.Module], bool]] = (
    WeakKeyDictionary()
)


def extend_rotary(
    model: PreTrainedModel | None, config: PreTrainedConfig | None, documents: object
) -> str | None:
    """Give the length of the longest document to a model's rotary embedding, if the embedding
    depends on that length.

    Returns:
        Why the model cannot compute these documents in several parts; None if it can.
    """
    kinds = ", ".join(sorted(_list_varying_kinds(config)))
    if not kinds:
        return None
    rotaries, in_layers = ([], False) if model is None else _find_rotaries(model)
    if in_layers:
        reason = "and each layer makes its own"
    elif not rotaries:
        reason = "and distca does not find the module that makes it"
    else:
        reason = "which only shares of hf_distca.document_shares know"
        for rotary in rotaries:
            if not hasattr(rotary, _HAS_LONGEST):
                setattr(rotary, _HAS_LONGEST, False)
                setattr(rotary, _REACHED, {})
                rotary.register_forward_pre_hook(_add_longest, with_kwargs=True)
                rotary.register_forward_hook(_drop_longest)
        if _get_longest_document(documents) is not None:
            return None
    return (
        f"their rotary embedding ({kinds}) depends on the longest document of all ranks, {reason}"
    )


def _list_varying_kinds(config: PreTrainedConfig | None) -> set[str]:
    """Return the kinds of rotary embedding in a model's config whose frequencies depend on the
    longest document.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    # The config has either one set of parameters for all layers, or a set for each kind of layer.
    rotaries = [parameters, *parameters.values()]
    kinds = {str(rotary.get("rope_type")) for rotary in rotaries if isinstance(rotary, Mapping)}
    return {kind for kind in kinds if _is_varying_kind(kind)}


def _get_longest_document(documents: object) -> int | None:
    """Return the length of the longest document of all ranks; None if it is not known."""
    return (
        documents.dealt_share.longest_document
        if isinstance(documents, PackedDocuments) and documents.dealt_share is not None
        else None
    )


def _is_varying_kind(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _find_rotaries(model: torch.nn.Module) -> tuple[list[torch.nn.Module], bool]:
    """Find the rotary modules of a model that depend on the longest document. Also tell whether any
    of them is in a layer.

    distca cannot give a longer length to rotary modules in layers: a recompute in backward would
    use the length of the last batch.
    """
    # Not imported at the top, because this import registers distca.
    from transformers.modeling_layers import GradientCheckpointingLayer

    if model not in _found_rotaries:
        rotaries = [module for module in model.modules() if _is_varying_rotary(module)]
        in_layers = any(
            part in rotaries
            for layer in model.modules()
            if isinstance(layer, GradientCheckpointingLayer)
            for part in layer.modules()
        )
        _found_rotaries[model] = rotaries, in_layers
    return _found_rotaries[model]


def _is_varying_rotary(module: torch.nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    return any(
        _is_varying_kind(str(kind))
        for kind in (kinds.values() if isinstance(kinds, Mapping) else (kinds,))
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiler would make a graph for each length
def _add_longest(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    longest = _get_longest_document(find_model_argument("distca_documents"))
    setattr(module, _HAS_LONGEST, longest is not None)
    if longest is None:
        return None
    positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
    if not isinstance(positions, torch.Tensor):
        raise UnsupportedError(
            f"{type(module).__name__} is called without position_ids, but its rotary embedding"
            " depends on the longest document of all ranks, and distca appends the last position of"
            " this document to position_ids. Call the module with position_ids."
        )
    longest = _restore_length(
        module, longest, kwargs.get("layer_type", args[2] if len(args) > 2 else None)
    )
    positions = torch.cat(
        [positions, positions.new_full((*positions.shape[:-1], 1), longest - 1)], dim=-1
    )
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": positions}
    return (args[0], positions, *args[2:]), kwargs


def _restore_length(module: Any, longest: int, layer_type: str | None) -> int:
    """Return the length by which a rotary module must choose its frequencies for a share, given the
    longest document.

    A module that remembers a length is reset to its initial state. The result is then the length
    that the module would remember if it had seen only the shares so far.
    """
    kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
    if "dynamic" not in kind:
        return longest
    prefix = "" if layer_type is None else f"{layer_type}_"
    built: int = module.original_max_seq_len
    setattr(module, f"{prefix}max_seq_len_cached", built)
    setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq").clone())
    reached: dict[str | None, int] = getattr(module, _REACHED)
    reached[layer_type] = max(longest, reached.get(layer_type, 0) if longest >= built else 0)
    return reached[layer_type]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _drop_longest(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    if not getattr(module, _HAS_LONGEST):
        return None
    if isinstance(output, torch.Tensor):  # (..., tokens, width)
        return output[..., :-1, :].contiguous()
    return type(output)(rotation[..., :-1, :].contiguous() for rotation in output)
