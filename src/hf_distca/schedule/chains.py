"""Chains of rows: what one rank sends to each other rank, gets from it, and runs tasks on. All of it is compiled.

A chain is a message, a pool or a batch in the making. It is made in its order, and neighbours become one record as they come.
Chains are numbered by what travels and by the other rank, so that reading one after another gives the order of messages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hf_distca.schedule.compiled import compiled, table

__all__ = ["CHAINS", "KINDS", "Book", "added", "chain_of", "emptied", "full", "put"]

# Fields of a chain: its first and last record, rows of all, and its number among the sections that are received.
FIRST, LAST, TOTAL, SECTION, _CHAIN = range(5)
# Fields of a record: the next of its chain; what it belongs to; first row or document position; rows; and where they lie: of a
# task the row of position 0, of what is passed on the row of the pool, of others the rank that sends or needs them. Of this
# rank's own rows the first is a token, and what they belong to is minus the number of their head group, -1 if there are none.
NEXT, OF, START, ROWS, PLACE, _RECORD = range(6)


class _Chains(NamedTuple):
    """Chains of which there is one.

    Attributes:
        all: counts records.
        pool: keys that tasks of this rank read, by the chain in which they come.
        passed: those of them that it passes on.
        tasks, needs: of the document at hand, or of the batch that is written; keys that servers need, by server.
        kept: counts rows of tasks of head groups on this rank's own keys.
    """

    all: int
    pool: int
    passed: int
    tasks: int
    needs: int
    kept: int


class _Kinds(NamedTuple):
    """Kinds of chains of which there is one for each rank.

    Attributes:
        queries: query rows by the server that gets them, this rank's own among them.
        homes: tasks on pools by their home.
        keys, passed_keys: key rows by the rank that gets them, in the first and in the second hop.
        came, passed_came: rows of the pool by the rank that they come from.
        latest: the latest need of each server.
        mine: tasks on this rank's own tensors, with a chain for each of its segments.
    """

    queries: int
    homes: int
    keys: int
    passed_keys: int
    came: int
    passed_came: int
    latest: int
    mine: int


# Numbers in tuples are variables to numba, which compiles a function again for every plain number that it is called with.
CHAINS = _Chains(*range(6))
KINDS = _Kinds(*range(8))


class Book(NamedTuple):
    """Tables of chains and of records. Record 0 is none."""

    chains: Any
    records: Any

    @classmethod
    def of(cls, ranks: int, segments: int, records: int) -> Book:
        """An empty one, for a rank with so many segments among so many ranks, with room for so many records."""
        return cls(table(len(CHAINS) + KINDS.mine * ranks + segments, _CHAIN), table(records + 1, _RECORD))


@compiled
def chain_of(kind: int, ranks: int, other: int) -> int:
    """The chain of a kind for a rank, or for a segment."""
    return len(CHAINS) + kind * ranks + other


@compiled
def full(book: Book) -> bool:
    """Whether there were more records than there is room for."""
    return bool(book.chains[CHAINS.all][TOTAL] >= len(book.records))


@compiled
def emptied(book: Book, chain: int) -> None:
    """Begin a chain anew."""
    for field in range(_CHAIN):
        book.chains[chain][field] = 0


@compiled
def added(book: Book, chain: int, of: int, start: int, rows: int, place: int) -> None:
    """Add a record to the end of a chain. If there is no room it is counted, no more."""
    mine, row = book.chains[chain], book.chains[CHAINS.all][TOTAL] + 1
    book.chains[CHAINS.all][TOTAL] = row
    if row >= len(book.records):
        return
    record = book.records[row]
    record[NEXT], record[OF], record[START], record[ROWS], record[PLACE] = 0, of, start, rows, place
    if mine[LAST] > 0:
        book.records[mine[LAST]][NEXT] = row
    else:
        mine[FIRST] = row
    mine[LAST] = row


@compiled
def put(book: Book, chain: int, of: int, start: int, rows: int, place: int) -> None:
    """Add rows to the end of a chain, to its last record if they continue that."""
    mine = book.chains[chain]
    mine[TOTAL] += rows
    last = book.records[mine[LAST]]
    if mine[LAST] > 0 and last[OF] == of and last[PLACE] == place and last[START] + last[ROWS] == start:
        last[ROWS] += rows
    else:
        added(book, chain, of, start, rows, place)
