"""The rows of a batch for recurrent layers: the segments along which they
run, on this rank and from rank to rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_distca.agreement.announce import HEADER, Stated, check_equal, check_shares, layout_of
from hf_distca.agreement.document_starts import as_mask
from hf_distca.agreement.documents import Documents, TokenBatch
from hf_distca.errors import LayoutError, UnsupportedError
from hf_distca.integration.positions import mark_starts
from hf_distca.kernels.varlen import to_device
from hf_distca.recurrent.segments import Segments
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.outputs import OutputStore
from hf_distca.schedule.layout import Layout

if TYPE_CHECKING:
    from hf_distca.integration.session import Session

__all__ = ["RECURRENT_ROWS", "RecurrentRows", "recurrent_rows", "rows_of"]

RECURRENT_ROWS = "distca_rows"  # the keyword argument


class RecurrentRows:
    """The documents of a batch, and the segments along which its recurrent layers run.

    This is no dataclass: FSDP with mixed precision rebuilds dataclasses for every layer.

    Args:
        documents: documents of the batch.
        batch_size, length: its shape in tokens.
        segments: segments of its rows, one after another; None if each row is one, and layers run
            along rows as usual.

    Attributes:
        reached: names of the functions that have run along segments.
    """

    __slots__ = ("_stores", "_tensors", "batch_size", "documents", "length", "reached", "segments")

    def __init__(self, documents: Documents, batch_size: int, length: int, segments: Segments | None) -> None:
        self.documents, self.batch_size, self.length, self.segments = documents, batch_size, length, segments
        self.reached: set[str] = set()
        self._tensors: dict[Any, torch.Tensor] = {}
        self._stores: dict[str, OutputStore] = {}

    def cu_seqlens(self, lengths: Sequence[int], device: torch.device) -> torch.Tensor:
        """Return the starts of documents of these lengths, and the end
        of the last: (documents + 1,) int64.
        """
        return self._on(tuple(lengths), device, lambda: np.cumsum([0, *lengths]))

    def seq_idx(self, device: torch.device) -> torch.Tensor:
        """Return the number of each token's segment: (batch, length) int32."""
        lengths = () if self.segments is None else self.segments.lengths
        numbers, shape = np.arange(len(lengths), dtype=np.int32), (self.batch_size, self.length)
        return self._on("seq_idx", device, lambda: np.repeat(numbers, lengths).reshape(shape))

    def store(self, name: str) -> OutputStore:
        """Return the store for tensors that the functions of that name
        received in the layers of this micro-batch.
        """
        return self._stores.setdefault(name, OutputStore())

    def _on(self, what: Any, device: torch.device, make: Callable[[], np.ndarray[Any, Any]]) -> torch.Tensor:
        """Return a tensor that is made once for a micro-batch and a device."""
        if (what, device) not in self._tensors:
            self._tensors[what, device] = to_device(torch.from_numpy(make()), device)
        return self._tensors[what, device]


def recurrent_rows(arguments: Mapping[str, Any]) -> RecurrentRows | None:
    """Return the `RecurrentRows` among the keyword arguments
    of a layer, if its model added them.
    """
    rows = arguments.get(RECURRENT_ROWS)
    return rows if isinstance(rows, RecurrentRows) else None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it reads documents
def rows_of(model: PreTrainedModel, given: Mapping[str, Any]) -> RecurrentRows | None:
    """Make the rows of a batch; None if a cache is read, or if
    attention will raise for its documents.
    """
    from hf_distca.integration.session import current_session  # it imports handles, which import this

    session = current_session()
    tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
    cache, mask = given.get("past_key_values"), given.get("attention_mask")
    if not isinstance(tokens, torch.Tensor) or isinstance(mask, dict) or (cache is not None and cache.get_seq_length()):
        return None
    batch_size, length = tokens.shape[:2]
    padding = as_mask(mask[:, :length]) if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
    try:
        told = given.get("distca_documents"), given.get("cu_seq_lens_q"), _of_text(given.get("position_ids"))
        batch = TokenBatch(batch_size, length, *told, padding)
        documents = batch.documents(span_ranks=session.config.documents_span_ranks, training=model.training)
        segments = _cut(documents, session, model.training) if documents.spans else _packed(documents, batch_size, length)
    except (LayoutError, UnsupportedError):
        return None
    if segments is not None and cache is not None:
        raise UnsupportedError(
            f"{type(model).__name__} got past_key_values, and {len(documents.rows)} packed documents in {batch_size} rows: a "
            "cache does not keep their states apart. Leave past_key_values out."
        )
    return RecurrentRows(documents, batch_size, length, segments)


def _of_text(positions: torch.Tensor | None) -> torch.Tensor | None:
    """Return text positions (axis 0 of 4) of M-RoPE position ids; for three
    axes, marks of the beginnings of documents.
    """
    if positions is None or positions.dim() < 3:
        return positions
    return positions[0] if len(positions) == 4 else mark_starts(positions)


def _packed(documents: Documents, batch_size: int, length: int) -> Segments | None:
    """Make segments of whole documents, each with the padding after it;
    None if each row is at most one document.
    """
    if not documents.packed(length):
        return None
    begin = documents.first_tokens
    begin[0] = 0  # with the padding before it
    return Segments.packed(np.diff(begin, append=batch_size * length).tolist())


def _cut(documents: Documents, session: Session, training: bool) -> Segments:
    """Make the segments of this rank of documents that may continue on other ranks. Collective."""
    group = session.trainers if training or session.config.balance_evaluation else AttentionGroup()
    name = f"micro-batch {session.planner.progress.next_number}"
    return Segments.from_layout(_layout(documents, group, name), group, session.meter, name)


# What begins a row of numbers for other ranks. Announcements for attention begin with their count, which is not negative.
_NUMBERED, _SHARE = -1, -2


def _layout(documents: Documents, group: AttentionGroup, name: str) -> Layout:
    """Return the layout of all ranks, known from a share or else
    exchanged; all ranks get the same, or an error.

    Attention compares shares while ranks continue. Here states would travel before that, and over
    gloo messages of unequal sizes end a process.
    """
    dealt = documents.dealt
    if dealt is None:
        kind, numbers = _NUMBERED, documents.rows.reshape(-1)
    else:
        dealt.check_is_for(group)
        if not dealt.whole.has_many_ranks.any():
            return dealt.whole
        kind, numbers, name = _SHARE, np.array([*dealt.batch, dealt.documents]), f"{name} ({dealt})"
    row = np.concatenate([[kind], np.zeros(HEADER - 1, dtype=np.int64), numbers])  # as long as an announcement at least
    rows = group.gather(row, doing=f"comparing documents of {name} for recurrent layers")
    kinds = np.array([-min(int(row[0]), 0) for row in rows])
    what = "documents in recurrent layers (0: all whole, 1: numbered parts, 2: parts of a share)"
    check_equal(group, kinds, what, name, "use the same data set and collator on every rank")
    columns = [row[HEADER:] for row in rows]
    if dealt is not None:
        check_shares(np.stack(columns), group, name)
        return dealt.whole
    none = np.zeros(group.size, dtype=np.int64)
    parts = np.concatenate(columns).reshape(-1, 3)
    return layout_of(Stated(none + 1, none, none, np.array([len(column) // 3 for column in columns]), parts))
