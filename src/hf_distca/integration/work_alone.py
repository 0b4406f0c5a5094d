"""`work_alone`: work of a micro-batch that a rank computes by itself, without planning."""

from __future__ import annotations

import torch

from hf_distca.agreement.announce import AnnouncedBatch, PlanKey, build_layout
from hf_distca.agreement.documents import Documents
from hf_distca.errors import LayoutError, UnsupportedError
from hf_distca.integration.handle import AttentionHandle, Work
from hf_distca.kernels.varlen import to_device
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.outputs import OutputStore
from hf_distca.runtime.route import Route
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import Plan

__all__ = ["ALONE", "keep_of", "work_alone"]

ALONE = AttentionGroup()


def work_alone(handle: AttentionHandle, key: PlanKey, device: torch.device, meter: Meter, *, evaluating: bool) -> Work:
    """Make the work of a micro-batch whose documents were read; for
    whole documents, their lengths suffice.

    Raises:
        LayoutError: if a part of a document is missing; an `UnsupportedError` while `evaluating`.
    """
    documents = handle.documents
    if documents is None:
        raise RuntimeError("a micro-batch was taken up before its documents were read")
    if documents.has_whole_documents:
        handle.check(None, key.window)
        lengths = documents.runs[:, 2].tolist()
        window = _within(key.window, max(lengths, default=0))
        route = Route.for_whole_documents(lengths)
    else:
        layout = _layout(documents, evaluating=evaluating)
        handle.check(layout, key.window)
        window = _within(key.window, layout.longest)
        route = Route.build(Plan.local(layout, window), 0)
    return Work(ALONE, route, keep_of(documents, device), window, meter, key.nano, OutputStore())


def keep_of(documents: Documents, device: torch.device) -> torch.Tensor | None:
    """Return `Documents.token_indices` on a device."""
    return None if documents.token_indices is None else to_device(torch.from_numpy(documents.token_indices), device)


def _layout(documents: Documents, *, evaluating: bool) -> Layout:
    try:
        return build_layout(AnnouncedBatch.from_documents(documents))
    except LayoutError as error:
        if not (evaluating and documents.span_ranks):
            raise
        raise UnsupportedError(
            "a document that spans ranks met a model in evaluation mode, where each rank works alone: "
            "call model.train() to train, or set DistCAConfig(balance_evaluation=True) if all ranks evaluate together."
        ) from error


def _within(window: int | None, longest: int) -> int | None:
    """Return the window if it hides a key of the longest document
    from one of its tokens, else None.
    """
    return None if window is None or window >= longest else window
