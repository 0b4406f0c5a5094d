"""Check that no model takes a part of a document for a whole document.

Shares (parts of dealt batches) are for models under distca, because distca's ranks compute cut
documents together. Another model in the same training, such as a teacher, may not run distca, or
may get only tokens and positions of a share. It would then compute this rank's part of a document
without the tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_distca.agreement.documents import PackedDocuments
from hf_distca.borrowed import CompiledModule
from hf_distca.errors import UnsupportedError
from hf_distca.integration.attention_names import (
    find_distca_configs,
    is_distca_model,
    iterate_models,
)
from hf_distca.integration.callers import is_in_model
from hf_distca.integration.current_session import current_session
from hf_distca.integration.hooks.positions import find_first_position

_REMEDY = (
    'Load the model with attn_implementation="distca", and give it the whole batch:'
    " model(**inputs). All ranks then compute the batch together, in eval() and under no_grad() as"
    " well."
)


@cache
def check_calls() -> None:
    """Check all calls of models from now on, including calls of models that exist already.

    Only processes that train on shares need this. It costs one call per forward of a model, and
    nothing per layer.
    """
    for kind in (PreTrainedModel, CompiledModule):
        kind.__call__ = _add_check(kind.__call__)  # type: ignore[method-assign]


def _add_check(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a `__call__` so that it first checks the outermost model in the called module."""

    @wraps(call)
    def call_checked(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Under a compiler the check would break the graph.
        if not torch.compiler.is_compiling():
            model = next(iterate_models(self), None)
            if model is not None and (
                "distca_documents" not in kwargs or not is_distca_model(model)
            ):
                _check_call(model, args, kwargs)
        return call(self, *args, **kwargs)

    return call_checked


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _check_call(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if this call gives a model only a part of a document, and the model would take it for a
    whole document.

    If only some ranks find such a call, they report the error to the others.
    """
    if kwargs.keys().isdisjoint(("input_ids", "inputs_embeds")) and not _is_row_of_ids(*args[:1]):
        return  # a call without tokens, such as that of a vision tower
    documents = kwargs.get("distca_documents")
    reason = (
        _find_cut_reason(model, documents)
        if isinstance(documents, PackedDocuments)
        else _find_position_reason(model, kwargs)
    )
    if reason is not None:
        with current_session().report_errors(f"calling {type(model).__name__}"):
            raise UnsupportedError(f"{type(model).__name__} {reason} {_REMEDY}")


def _is_row_of_ids(tokens: Any = None) -> bool:
    return isinstance(tokens, torch.Tensor) and not tokens.is_floating_point()


def _find_cut_reason(model: PreTrainedModel, documents: PackedDocuments) -> str | None:
    """Return why a model cannot compute these documents; None if it can. All ranks that have shares
    of a batch get the same answer.
    """
    share = documents.dealt_share
    is_cut = any(documents.starts or ()) if share is None else share.is_cut
    if is_distca_model(model) or not is_cut or find_distca_configs(model):
        return None
    name = getattr(model.config, "_attn_implementation", None)
    return (
        f'has attn_implementation="{name}" and gets a part of'
        f" {share or 'a batch'} whose documents are cut. It would compute this rank's part without"
        " the tokens before it. Give it whole documents, or treat it like the model in training."
    )


def _find_position_reason(model: PreTrainedModel, kwargs: dict[str, Any]) -> str | None:
    """Return why a model that got only tokens and positions cannot compute its row; None if it can.
    It cannot if the row begins inside a document. The first position is read from the device.
    """
    positions = kwargs.get("position_ids")
    if not isinstance(positions, torch.Tensor):
        return None
    is_known = (
        positions.shape[-2:-1] != (1,)  # a share is one row
        or not positions.numel()
        or kwargs.get("past_key_values") is not None
        or kwargs.get("attention_mask") is not None
        or is_in_model()  # the outer model was checked, and may pass on only some arguments
    )
    if is_known or (
        find_distca_configs(model)
        and (model.training or current_session().config.documents_span_ranks)
    ):
        return None
    first = int(positions.flatten()[0]) - find_first_position(model)
    if first <= 0:
        return None
    return (
        f"gets a row that begins at position {first} of a document, but not the documents of its"
        " batch (distca_documents). It would compute this rank's part without the tokens before"
        " it."
    )
