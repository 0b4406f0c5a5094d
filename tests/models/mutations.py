"""Faults to put into the library while it runs, each of a kind that a proof of a family must
notice.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from hf_distca.agreement.announce import AnnouncedDocuments
from hf_distca.agreement.documents import Documents, TokenBatch
from hf_distca.integration.nano_batches import NanoBatches
from hf_distca.schedule.layout import Layout

Original = Callable[..., Any]


def _scores(**changes: Callable[[Any], Any]) -> Callable[[Original], Original]:
    """Change what a layer's scores say; what is None stays so."""

    def wrap(original: Original) -> Original:
        def wrapped(*args: Any) -> Any:
            scores = original(*args)
            given = {
                name: change(getattr(scores, name))
                for name, change in changes.items()
                if getattr(scores, name) is not None
            }
            return replace(scores, **given)

        return wrapped

    return wrap


def _one_document_a_row(original: Original) -> Original:
    def wrapped(batch: TokenBatch, **_: Any) -> Documents:
        rows = np.array([(-1, 0, batch.length)] * batch.batch_size, dtype=np.int64)
        return Documents(rows)

    return wrapped


def _one_document_over_ranks(original: Original) -> Original:
    """The first document of each rank continues the last of the rank before."""

    def wrapped(stated: AnnouncedDocuments) -> Layout:
        numbers, segments = itertools.count(), []
        document, end = next(numbers), 0
        for lengths in stated.split_by_rank():
            segments.append([])
            for length in lengths.tolist():
                segments[-1].append((document, end, length))
                document, end = next(numbers), 0
            *_, (document, start, length) = segments[-1]
            end = start + length
        return Layout.from_segments(segments)

    return wrapped


def _one_copy_lost(which: int) -> Callable[[Original], Original]:
    """Of all sums of copies, dk and dv in turn, forget to add the first or the second."""

    def wrap(original: Original) -> Original:
        calls = itertools.count()
        return lambda pooled, grad, received: (
            grad if next(calls) == which else original(pooled, grad, received)
        )

    return wrap


def _no_gradient(original: Original) -> Original:
    def wrapped(*args: Any) -> torch.Tensor | None:
        grad = original(*args)
        return None if grad is None else torch.zeros_like(grad)

    return wrapped


def _no_context(original: Original) -> Original:
    """A document that crosses the cut begins anew behind it."""

    def wrapped(self: Documents, at: int) -> tuple[Documents, Documents]:
        first, second = original(self, at)
        runs = second.runs[1:] * [1, 0, 1] if second.context_tokens else second.runs
        return first, replace(second, runs=runs, context_tokens=0)

    return wrapped


def _detached_keys(original: Original) -> Original:
    def wrapped(self: NanoBatches, *args: Any) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.detach() for tensor in original(self, *args))

    return wrapped


def _lost(tensors: int) -> Callable[[Original], Original]:
    """Zeros in place of what came in exchanges of so many tensors: of states two, of rows of a
    convolution one.
    """

    def wrap(original: Original) -> Original:
        def wrapped(self: Any, held: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            received = original(self, held)
            return (
                [torch.zeros_like(rows) for rows in received] if len(held) == tensors else received
            )

        return wrapped

    return wrap


def _gradients_lost(original: Original) -> Original:
    def wrapped(self: Any, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        returned = original(self, gradients)
        return [gradient[: len(whole)] for gradient, whole in zip(gradients, returned, strict=True)]

    return wrapped


_ATTENTION, _DOCUMENTS = "integration.hooks.attention", "agreement.documents"
# What is replaced, and by what it is replaced, given the original.
MUTATIONS: dict[str, tuple[str, str, Callable[[Original], Original]]] = {
    "window one key too wide": (
        _ATTENTION,
        "_make_scores",
        _scores(window=lambda window: window + 1),
    ),
    "window one key too narrow": (
        _ATTENTION,
        "_make_scores",
        _scores(window=lambda window: window - 1),
    ),
    "chunk one token too long": (
        _DOCUMENTS,
        "Documents.cut_into_chunks",
        lambda original: lambda self, size: original(self, size and size + 1),
    ),
    "scale wrong by 1 %": (_ATTENTION, "_make_scores", _scores(scale=lambda scale: 1.01 * scale)),
    "softcap dropped": (_ATTENTION, "_make_scores", _scores(softcap=lambda _: None)),
    "sink dropped": (_ATTENTION, "_flatten_sink", lambda _: lambda *_: None),
    "gradient of the sink dropped": (
        "runtime.core_attention",
        "_compute_sink_gradient",
        _no_gradient,
    ),
    "documents of a row leak": (_DOCUMENTS, "TokenBatch.read_documents", _one_document_a_row),
    "convolutions see the document before": (
        "hybrids.convolution",
        "_convolve_segments",
        lambda _: lambda states, convolve, *_: convolve(states),
    ),
    "states go on in the next document": (
        "hybrids.segments",
        "Segments.count_tokens",
        lambda original: lambda self, which: [sum(original(self, which))],
    ),
    "states of other ranks lost": ("hybrids.carryover", "_Exchange.get_received", _lost(2)),
    "rows of convolutions of other ranks lost": (
        "hybrids.carryover",
        "_Exchange.get_received",
        _lost(1),
    ),
    "gradients of states and rows of other ranks lost": (
        "hybrids.carryover",
        "_Exchange.return_gradients",
        _gradients_lost,
    ),
    "documents leak over ranks": (
        "agreement.announce",
        "AnnouncedDocuments.build_layout",
        _one_document_over_ranks,
    ),
    "dk of one copy lost": ("runtime.route", "PooledTasks.add_copies", _one_copy_lost(0)),
    "dv of one copy lost": ("runtime.route", "PooledTasks.add_copies", _one_copy_lost(1)),
    "second half without the keys of the first": (_DOCUMENTS, "Documents.split_at", _no_context),
    "gradient of the keys handed over lost": (
        "integration.nano_batches",
        "NanoBatches.pass_keys",
        _detached_keys,
    ),
}


@contextmanager
def mutated(name: str | None) -> Iterator[None]:
    """The library with one fault, in this process, while the block runs; without any if None."""
    if name is None:
        yield
        return
    place, attribute, fault = MUTATIONS[name]
    *classes, attribute = attribute.split(".")
    owner = reduce(getattr, classes, importlib.import_module(f"hf_distca.{place}"))
    with patch.object(owner, attribute, fault(getattr(owner, attribute))):
        yield
