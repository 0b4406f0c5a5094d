"""An attention group without processes, whose other ranks tests make up, and packed documents."""

from __future__ import annotations

from collections.abc import Callable

from hf_distca.agreement.documents import Documents, PackedDocuments, TokenBatch
from hf_distca.runtime.group import AttentionGroup
from hf_distca.schedule.layout import IntArray

Rows = Callable[[IntArray], list[IntArray]]


def pack(*lengths: int) -> Documents:
    """Read documents of these lengths, packed in a row."""
    return TokenBatch(1, sum(lengths), packed=PackedDocuments(lengths)).read_documents()


class MadeUpGroup(AttentionGroup):
    """A group that gathers the rows that `others` makes from the row of this rank."""

    def __init__(self, ranks: int, others: Rows | None = None) -> None:
        super().__init__(ranks=tuple(range(ranks)))
        object.__setattr__(self, "others", others or (lambda row: [row] * ranks))
        object.__setattr__(self, "gathered", [])

    def gather(self, row: IntArray, *, activity: str) -> list[IntArray]:
        self.gathered.append(activity)
        return self.others(row)

    gather_same_length = gather
