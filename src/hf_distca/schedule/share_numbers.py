"""Chains written down as numbers: of each section how many rows it has, and the rows one after another. All of it is compiled."""

from __future__ import annotations

from hf_distca.schedule.chains import (
    CHAINS,
    FIRST,
    KINDS,
    NEXT,
    OF,
    PLACE,
    ROWS,
    SECTION,
    START,
    TOTAL,
    Book,
    chain_of,
    emptied,
    put,
)
from hf_distca.schedule.compiled import Ints, compiled
from hf_distca.schedule.key_runs import first_key
from hf_distca.schedule.share_keys import Rank

__all__ = ["numbers_in", "write_wave"]


def numbers_in(ranks: int, records: int) -> int:
    """Numbers that so many records are at most, with those of a second wave."""
    return 2 * (4 * records + 10 * ranks + 20)


@compiled
def write_wave(one: Rank, book: Book, hops: int, out: Ints, at: int) -> int:
    """Tasks on own tensors; query rows to send and of this rank's own; keys to send, pool and way back; tasks; any second hop.

    As all of these, it returns where the next number goes.
    """
    _number_sections(one, book)
    at = _write_batch(one, book, KINDS.mine, out, at)
    at = _write_exchange(one, book, KINDS.queries, KINDS.homes, out, at)
    begin = at
    at = _write_runs(one, book, chain_of(KINDS.queries, one.ranks, one.rank), one.rank, out, at + 1)
    out[begin] = (at - begin) // 3
    at = _write_exchange(one, book, KINDS.keys, KINDS.came, out, at)
    at = _write_pieces(one, book, CHAINS.pool, out, at)
    at = _write_exchange(one, book, KINDS.came, KINDS.keys, out, at)
    at = _write_batch(one, book, KINDS.homes, out, at)
    if hops > 1:
        at = _write_pieces(one, book, CHAINS.passed, out, at)
        at = _write_exchange(one, book, KINDS.passed_keys, KINDS.passed_came, out, at)
        at = _write_exchange(one, book, KINDS.passed_came, KINDS.passed_keys, out, at)
    return at


@compiled
def _number_sections(one: Rank, book: Book) -> None:
    """Number what comes from each rank in each hop."""
    section = 0
    for chain in range(chain_of(KINDS.came, one.ranks, 0), chain_of(KINDS.passed_came, one.ranks, one.ranks)):
        book.chains[chain][SECTION] = section
        section += book.chains[chain][TOTAL] > 0


@compiled
def _row(one: Rank, of: int, start: int) -> int:
    """The row of a record: that of a token in its head group, if it is one of this rank's own."""
    return start * one.groups - of - 1 if of < 0 else start


@compiled
def _write_exchange(one: Rank, book: Book, kind: int, back: int, out: Ints, at: int) -> int:
    """Runs to other ranks as rank, start, rows; and then the rows that come from each rank that sends any: rank, rows."""
    begin = at
    at += 1
    for rank in range(one.ranks):
        if rank != one.rank:
            at = _write_runs(one, book, chain_of(kind, one.ranks, rank), rank, out, at)
    out[begin], begin = (at - begin) // 3, at
    at += 1
    for rank in range(one.ranks):
        rows = book.chains[chain_of(back, one.ranks, rank)][TOTAL]
        if rank != one.rank and rows > 0:
            out[at], out[at + 1] = rank, rows
            at += 2
    out[begin] = (at - begin) // 2
    return at


@compiled
def _write_runs(one: Rank, book: Book, chain: int, rank: int, out: Ints, at: int) -> int:
    row = book.chains[chain][FIRST]
    while row > 0:
        record = book.records[row]
        out[at], out[at + 1], out[at + 2] = rank, _row(one, record[OF], record[START]), record[ROWS]
        at, row = at + 3, record[NEXT]
    return at


@compiled
def _write_pieces(one: Rank, book: Book, chain: int, out: Ints, at: int) -> int:
    """Keys as section, or -1 for this rank's own, start, rows; and their row of the pool, if they are passed on."""
    begin, row, width = at, book.chains[chain][FIRST], 4 if chain == CHAINS.passed else 3
    at += 1
    while row > 0:
        record = book.records[row]
        out[at] = -1 if record[OF] < 0 else book.chains[record[OF]][SECTION]
        out[at + 1], out[at + 2] = _row(one, record[OF], record[START]), record[ROWS]
        if width > 3:
            out[at + 3] = record[PLACE]
        at, row = at + width, record[NEXT]
    out[begin] = (at - begin) // width
    return at


@compiled
def _write_batch(one: Rank, book: Book, kind: int, out: Ints, at: int) -> int:
    """Tasks as first query row, query rows, first key, keys: on this rank's own tensors; or on pools, those of this rank first.

    Query rows of tasks on pools follow each other, the others lie where their tokens do.
    """
    own = kind == KINDS.mine
    first, last = chain_of(kind, one.ranks, 0), len(book.chains) if own else chain_of(kind + 1, one.ranks, 0)
    leave = -1 if own else chain_of(kind, one.ranks, one.rank)
    emptied(book, CHAINS.tasks)
    if not own:
        _collect(book, leave)
    for chain in range(first, last):
        if chain != leave:
            _collect(book, chain)
    begin, query, row = at, 0, book.chains[CHAINS.tasks][FIRST]
    at += 1
    while row > 0:
        record = book.records[row]
        start, rows, place = record[START], record[ROWS], record[PLACE]
        key = first_key(start, one.window)
        out[at] = place + start - one.context if own else query
        out[at + 1], out[at + 2], out[at + 3] = rows, place + key, start + rows - key
        at, query, row = at + 4, query + rows, record[NEXT]
    out[begin] = (at - begin) // 4
    return at


@compiled
def _collect(book: Book, chain: int) -> None:
    """Add the tasks of a chain to the batch at hand."""
    row = book.chains[chain][FIRST]
    while row > 0:
        record = book.records[row]
        put(book, CHAINS.tasks, record[OF], record[START], record[ROWS], record[PLACE])
        row = record[NEXT]
