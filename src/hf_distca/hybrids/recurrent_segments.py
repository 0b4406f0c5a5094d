"""Find the segments along which recurrent layers run, from the arguments of a model and from the
documents of other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_distca.agreement.announce import (
    Announcement,
    Announcements,
    check_document_kinds,
    check_shares,
)
from hf_distca.agreement.document_starts import convert_mask
from hf_distca.agreement.documents import Documents, TokenBatch
from hf_distca.errors import LayoutError, UnsupportedError
from hf_distca.hybrids.recurrent_rows import RecurrentRows
from hf_distca.hybrids.segments import Segments
from hf_distca.integration.handle import LayerPlanner
from hf_distca.integration.hooks.positions import mark_document_starts
from hf_distca.integration.session import Session
from hf_distca.runtime.group import AttentionGroup
from hf_distca.schedule.layout import Layout


@torch.compiler.disable  # type: ignore[untyped-decorator]  # documents are read on the host
def make_recurrent_rows(
    planner: LayerPlanner, model: PreTrainedModel, arguments: Mapping[str, Any]
) -> RecurrentRows | None:
    """Make the `RecurrentRows` of a batch.

    Returns:
        The rows; None if the model reads a cache, or if attention will raise an error for the
        documents.
    """
    session = planner.session
    tokens = arguments.get("inputs_embeds")
    if tokens is None:
        tokens = arguments.get("input_ids")
    cache, mask = arguments.get("past_key_values"), arguments.get("attention_mask")
    if (
        not isinstance(tokens, torch.Tensor)
        or isinstance(mask, dict)
        or (cache is not None and cache.get_seq_length())
    ):
        return None
    batch_size, length = tokens.shape[:2]
    padding = (
        convert_mask(mask[:, :length])
        if isinstance(mask, torch.Tensor) and mask.dim() == 2
        else None
    )
    try:
        positions = _select_text_positions(arguments.get("position_ids"))
        batch = TokenBatch(batch_size, length, padding=padding).with_documents(
            {**arguments, "position_ids": positions}
        )
        documents = batch.read_documents(
            span_ranks=session.config.documents_span_ranks, training=model.training
        )
        is_shared = model.training or planner.takes_all_ranks(documents if cache is None else None)
        segments = (
            _make_rank_segments(documents, session, is_shared)
            if documents.span_ranks and (is_shared or not documents.has_whole_documents)
            else _make_packed_segments(documents, batch_size, length)
        )
    except (LayoutError, UnsupportedError):
        return None
    if segments is not None and cache is not None:
        raise UnsupportedError(
            f"{type(model).__name__} got past_key_values, and {len(documents.runs)} packed"
            f" documents in {batch_size} rows: a cache has only one state for each row. Leave"
            " past_key_values out."
        )
    return RecurrentRows(documents, (batch_size, length), segments)


def _select_text_positions(positions: torch.Tensor | None) -> torch.Tensor | None:
    """Select the text positions of M-RoPE position ids: axis 0 if there are four axes. Three axes
    contain no text positions. For three axes, return 0 for the first token of each document, and 1
    for all other tokens.
    """
    if positions is None or positions.dim() < 3:
        return positions
    return positions[0] if len(positions) == 4 else mark_document_starts(positions)


def _make_packed_segments(documents: Documents, batch_size: int, length: int) -> Segments | None:
    """Make segments of whole documents, each with the padding after it. Return None if no row has
    more than one document.
    """
    if not documents.is_packed(length):
        return None
    starts = documents.first_token_indices
    starts[0] = 0  # the first segment also gets the padding before it
    return Segments.from_lengths(np.diff(starts, append=batch_size * length).tolist())


def _make_rank_segments(documents: Documents, session: Session, is_shared: bool) -> Segments:
    """Make this rank's segments of documents that may continue on other ranks. If `is_shared`, all
    ranks run this forward, and the call is collective.
    """
    group = session.join_trainers() if is_shared else AttentionGroup()
    name = f"micro-batch {session.planner.number + 1}"
    return Segments.from_layout(
        _agree_on_layout(documents, group, name), group, session.meter, name
    )


# Values of `Announcement.count` for recurrent layers. They are negative, because attention
# announces a count of 0 or more.
_NUMBERS_ROW, _SHARE_ROW = -1, -2


def _agree_on_layout(documents: Documents, group: AttentionGroup, name: str) -> Layout:
    """Return the layout of all ranks. It comes from this rank's share of a dealt batch, or from
    documents that ranks exchange. Either all ranks get the same layout, or all raise an error.

    Attention compares the shares of ranks in its first layer. Recurrent layers may exchange
    messages earlier, so they also compare the shares. Without this comparison, ranks with different
    shares could get messages of unexpected sizes, which crash the process under gloo.
    """
    share = documents.dealt_share
    if share is None:
        announcement = Announcement(_NUMBERS_ROW, documents=[(documents, 0)])
    else:
        share.check_group(group)
        if not share.whole_layout.has_many_ranks.any():
            return share.whole_layout
        announcement = Announcement(_SHARE_ROW, share_numbers=[*share.batch_id, share.digest])
        name = f"{name} ({share})"
    activity = f"comparing documents of {name} for recurrent layers"
    announced = Announcements.from_rows(group.gather(announcement.to_row(), activity=activity))
    check_document_kinds(group, announced.header[:, 0], name)
    if share is not None:
        check_shares(announced.share_numbers, group, name)
        return share.whole_layout
    return announced.read_documents()[0].build_layout()
