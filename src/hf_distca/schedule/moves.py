"""The moves of the greedy: the one loop of the scheduler that is compiled.

Ranks have a *level* that they should end at (`schedule.greedy`). The heaviest rank gives first,
until it is below the cap. A move follows steps 4.1 to 4.3 of docs/scheduler.md:

1. Choose a server: the emptiest, or one of the same node with half as much room.
2. For every piece that the rank still computes, find the tail, rows [x, end), that takes about what
   the server lacks; or the first rows, where no tail fits.
3. Move the slice that exchanges the fewest bytes per second moved. Keys that a server needs anyway,
   for its own rows of the document or for a slice that it got before, cost nothing; so servers that
   have such keys are looked at too.

Moving adds work, because a server reads keys that the home reads too: the levels of all ranks rise
with it.

All ranks make the same moves: this is IEEE double arithmetic in the order in which it is written.
numba compiles the loop when it is first called, and keeps the machine code beside the source or in
the user's cache, under a name with a hash of the sources. If numba is told to compile nothing, the
loop runs in Python, and makes the same moves.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from hf_distca.schedule import slice_cost
from hf_distca.schedule.compiled import compile_function, compile_inner
from hf_distca.schedule.layout import BoolArray, FloatArray, IntArray
from hf_distca.schedule.slice_cost import estimate_slice_seconds, find_tail_start

if TYPE_CHECKING:
    from hf_distca.schedule.cost import MarginalCost  # which counts with `slice_cost`

# Places in `RankLoads.levels`: the edges of the tolerated band, and where ranks outside it should
# end.
FLOOR, LOW, HIGH, CAP = range(4)
# Columns of `Ledger.moves`: a piece, rows [start, end) of its document, and the server that gets
# them.
PIECE, START, END, SERVER = range(4)
# Columns of `Ledger.holders`: a rank that needs the first keys of a document anyway, how many, and
# the row of the holder before.
RANK, KEYS, PREVIOUS = range(3)
# Pieces of a rank that are looked at for a move, and more only if none of them can be moved. The
# first are those deepest in their documents, which exchange the fewest bytes for a second of work.
_MAX_PIECES = 64
# Holders of a document's keys that are looked at for each of its pieces.
MAX_HOLDERS = 8
# What they have to lack at least, as a part of what the server that was asked should get.
MIN_DEFICIT = 0.25


class QueryPieces(NamedTuple):
    """Rows that their homes still compute, in order of ranks; a document that may be split has a
    piece for each head group.

    Attributes:
        number: number of the document or head group, from 0.
        start, end: rows that may be moved, from either end; a bound of transient bytes may end them
            early.
        heads: part of the heads.
        offsets: ``ranks + 1`` numbers; the pieces of rank r are rows ``offsets[r]`` to ``offsets[r
            + 1]``.
    """

    number: IntArray
    start: IntArray
    end: IntArray
    heads: FloatArray
    offsets: IntArray


class RankLoads(NamedTuple):
    """Work of the ranks, and levels for those of each group, [0, size), [size, 2 * size), ....

    Attributes:
        seconds, speed: seconds and speed of each rank.
        can_serve: whether each may get slices.
        size: ranks of a group.
        start_levels: seconds at places `FLOOR` to `CAP` before the first move, a row for each
            group.
        levels, group_span: current levels of the current group, and its first rank and the rank
            after its last.
        excess, total_work: seconds of work to be moved, and of all work, of each group.
        per_node: ranks of a node, where nodes are evened out; else 1, and each rank is a node.
        node_seconds, node_speed: those of the nodes.
        preferred_node_size: ranks of a node, where a server in the node of the source is preferred;
            else 0.
    """

    seconds: FloatArray
    speed: FloatArray
    can_serve: BoolArray
    size: int
    start_levels: FloatArray
    levels: FloatArray
    group_span: IntArray
    excess: FloatArray
    total_work: FloatArray
    per_node: int
    node_seconds: FloatArray
    node_speed: FloatArray
    preferred_node_size: int


class Ledger(NamedTuple):
    """Record of the moves, and of the ranks that have keys of documents.

    Attributes:
        moves: room for rows of `PIECE` to `SERVER`.
        holders: rows of `RANK` to `PREVIOUS`, and behind them room for one for each move. The last
            of a rank and document counts.
        last_holder: for each document, the last row of `holders`, or -1.
    """

    moves: IntArray
    holders: IntArray
    last_holder: IntArray


class MarginalCosts(NamedTuple):
    """Marginal cost of a slice on its server, and at its home."""

    server: MarginalCost
    home: MarginalCost


class _MoveCandidate(NamedTuple):
    """Size of the slice that a source should give to a server, in seconds of work.

    Attributes:
        excess, max_excess: work that the source should give away, and may give away at most.
        deficit, room: work that the server should get, and may get at most.
        min_target: below this, no first rows are taken; else moves would become ever smaller.
    """

    excess: float
    max_excess: float
    deficit: float
    room: float
    min_target: float


class _Slice(NamedTuple):
    """Rows [start, end) of a piece, the seconds removed from its home and added to its
    server, and bytes exchanged per second removed.
    """

    start: int
    end: int
    removed: float
    added: float
    byte_cost: float


class _Move(NamedTuple):
    """A piece, the server that gets a slice of it, and the number of first keys of the document
    that the server then needs.
    """

    piece: int
    server: int
    keys: int


@compile_inner
def _compute_deficit(loads: RankLoads, rank: int) -> float:
    """Compute the seconds of work that a rank lacks to the lower level; between nodes, as far as
    its node does, too.
    """
    level = loads.levels[LOW]
    node = rank // loads.per_node
    return float(
        min(
            (level - loads.seconds[rank]) * loads.speed[rank],
            (level - loads.node_seconds[node]) * loads.node_speed[node],
        )
    )


@compile_inner
def _compute_excess(loads: RankLoads, rank: int, place: int) -> float:
    """Compute the seconds of work that a rank has above a level; between nodes, as far as its node
    does, too.
    """
    level = loads.levels[place]
    node = rank // loads.per_node
    return float(
        min(
            (loads.seconds[rank] - level) * loads.speed[rank],
            (loads.node_seconds[node] - level) * loads.node_speed[node],
        )
    )


@compile_inner
def _find_emptiest(loads: RankLoads, first: int, last: int) -> int:
    """Find the emptiest of ranks [first, last) that lack work; -1 if none does."""
    emptiest = -1
    for rank in range(first, last):
        emptier = emptiest < 0 or loads.seconds[rank] < loads.seconds[emptiest]
        if emptier and loads.can_serve[rank] and _compute_deficit(loads, rank) > 0:
            emptiest = rank
    return emptiest


@compile_inner
def _choose_server(loads: RankLoads, source: int, giving_place: int, leeway: float) -> int:
    """Choose the emptiest rank that lacks work, or one in the preferred node with room for half as
    much; or -1.
    """
    level, span, node_size = loads.levels, loads.group_span, loads.preferred_node_size
    server = _find_emptiest(loads, span[0], span[1])
    if server < 0 and giving_place == CAP:
        # Sources gave more than they had to: now servers get more than they lacked.
        level[LOW] = level[HIGH]
        server = _find_emptiest(loads, span[0], span[1])
    if server >= 0 and node_size:
        enough = 0.5 * _compute_deficit(loads, server)
        if giving_place == CAP and leeway == 0:
            enough = min(enough, 0.5 * _compute_excess(loads, source, HIGH))
        first = source // node_size * node_size
        other = _find_emptiest(loads, first, first + node_size)
        if other >= 0 and _compute_deficit(loads, other) >= enough:
            server = other
    return -1 if giving_place == LOW and loads.seconds[server] >= level[FLOOR] else server


@compile_inner
def _cut_slice(
    marginals: MarginalCosts,
    heads: float,
    rows: tuple[int, int],
    held: int,
    candidate: _MoveCandidate,
) -> _Slice:
    """Cut the tail of rows [start, end) that makes up the deficit of a server with the first `held`
    keys, or else their first rows.

    If neither does, the byte cost is inf and the rest means nothing. First rows are taken only if
    no tail fits, because more of them make planning slow.
    """
    (start, end), server_cost, home_cost = rows, marginals.server, marginals.home
    # What a server receives it does not compute meanwhile; its home sends it, so so much less is
    # removed there.
    send_seconds = (server_cost.row - home_cost.row) * heads
    server_seconds, home_seconds = (
        estimate_slice_seconds(server_cost, heads, start, end),
        estimate_slice_seconds(home_cost, heads, start, end),
    )
    removable = home_seconds - send_seconds * (end - start)
    scale = server_seconds / removable if removable > 0 else 0.0
    max_seconds = min(candidate.max_excess * scale, candidate.room)
    target = min(min(candidate.excess * scale, candidate.room), candidate.deficit)
    x, y, removed, added, byte_cost = start, end, 0.0, 0.0, math.inf
    if target <= 0:
        return _Slice(x, y, removed, added, byte_cost)
    if server_seconds > target and server_seconds > min(max_seconds, 1.1 * target):
        x = find_tail_start(server_cost, heads, start, end, target, max_seconds)
    for _ in range(2):
        removed = (
            home_seconds
            - estimate_slice_seconds(home_cost, heads, start, x)
            - estimate_slice_seconds(home_cost, heads, y, end)
            - send_seconds * (y - x)
        )
        needed = max(y - max(held, x - (server_cost.window - 1)), 0)
        added = estimate_slice_seconds(server_cost, heads, x, y) - (
            server_cost.key - home_cost.key
        ) * heads * (y - needed)
        if 0 < removed <= candidate.max_excess and added <= candidate.room:
            byte_cost = (
                heads
                * (server_cost.query_bytes * (y - x) + server_cost.key_bytes * needed)
                / removed
            )
            break
        if x == start or target < candidate.min_target:
            break
        x = start
        y = find_tail_start(server_cost, heads, start, end, server_seconds - target, math.inf)
        # Where they are more than may go, up to the line of the grid before.
        y = (
            y
            if estimate_slice_seconds(home_cost, heads, start, y) <= candidate.max_excess
            else max((y - 1) // server_cost.grid * server_cost.grid, start)
        )
    return _Slice(x, y, removed, added, byte_cost)


@compile_inner
def _make_candidate(
    loads: RankLoads, source: int, server: int, excess: float, leeway: float
) -> _MoveCandidate:
    """Compute how many seconds a source should give to a server; `leeway` as `_find_best_move` has
    it.
    """
    work, level = loads.seconds, loads.levels
    highest = max(level[CAP], leeway * (work[source] + work[server]))
    room = (highest - work[server]) * loads.speed[server]
    max_excess = room if leeway > 0 else _compute_excess(loads, source, FLOOR)
    deficit = _compute_deficit(loads, server) if work[server] < level[FLOOR] else math.inf
    return _MoveCandidate(excess, max_excess, deficit, room, level[CAP] - level[HIGH])


@compile_inner
def _find_best_move(
    pieces: QueryPieces,
    marginals: MarginalCosts,
    loads: RankLoads,
    ledger: Ledger,
    request: tuple[int, int, int, float],
) -> tuple[_Move, _Slice]:
    """Find the move with the fewest bytes per second; its piece is -1 if there is none.

    `request` holds the source, a server, the level that the source should come down to, and a
    leeway: the part of the work of both that the server may come up to, while the source may end
    below the band. Another server that has keys of a document may get a slice of it instead.
    """
    source, asked_server, target_place, leeway = request
    work, level, holders = loads.seconds, loads.levels, ledger.holders
    move = _Move(-1, -1, 0)
    best = _Slice(0, 0, 0.0, 0.0, math.inf)
    looked_at = 0
    # Holders that lack much less than the server that was asked would get slivers, in very many
    # moves.
    excess = _compute_excess(loads, source, target_place)
    enough = MIN_DEFICIT * min(excess, _compute_deficit(loads, asked_server))
    for piece in range(pieces.offsets[source], pieces.offsets[source + 1]):
        start = pieces.start[piece]
        end = pieces.end[piece]
        last = ledger.last_holder[pieces.number[piece]]
        if start >= end:
            continue
        if looked_at >= _MAX_PIECES and move.piece >= 0:
            break
        row = last
        while row >= 0 and holders[row, RANK] != asked_server:
            row = holders[row, PREVIOUS]
        server = asked_server
        held = holders[row, KEYS] if row >= 0 else 0
        row = last
        tried = 0
        looked_at += 1
        while server >= 0:
            candidate = _make_candidate(loads, source, server, excess, leeway)
            cut = _cut_slice(marginals, pieces.heads[piece], (start, end), held, candidate)
            if cut.byte_cost < best.byte_cost:
                move = _Move(piece, server, max(held, cut.end))
                best = cut
            server = -1
            while row >= 0 and server < 0 and tried < MAX_HOLDERS:
                rank, held, row = holders[row, RANK], holders[row, KEYS], holders[row, PREVIOUS]
                is_candidate = (
                    rank != asked_server
                    and rank != source
                    and work[rank] < level[FLOOR]
                    and _compute_deficit(loads, rank) >= enough
                )
                if (
                    is_candidate
                    and loads.can_serve[rank]
                    and loads.group_span[0] <= rank < loads.group_span[1]
                ):
                    server = rank
                    tried += 1
    return move, best


@compile_inner
def _raise_levels(loads: RankLoads, group: int, added_work: float) -> None:
    """Set levels as far above those before the first move as so much more work raises the mean."""
    for place in range(len(loads.levels)):
        loads.levels[place] = loads.start_levels[group, place] * (
            1 + added_work / loads.total_work[group]
        )


@compile_inner
def _apply_move(
    pieces: QueryPieces,
    loads: RankLoads,
    ledger: Ledger,
    chosen: tuple[_Move, _Slice],
    place: tuple[int, int],
) -> None:
    """Take a slice from its piece, note it in the ledger, and update the loads.

    `place` holds the rank that gives the slice, and the number of earlier moves.
    """
    move, cut = chosen
    source, count = place
    ledger.moves[count, PIECE], ledger.moves[count, SERVER] = move.piece, move.server
    ledger.moves[count, START], ledger.moves[count, END] = cut.start, cut.end
    row = len(ledger.holders) - len(ledger.moves) + count
    number = pieces.number[move.piece]
    ledger.holders[row, RANK] = move.server
    ledger.holders[row, KEYS] = move.keys
    ledger.holders[row, PREVIOUS] = ledger.last_holder[number]
    ledger.last_holder[number] = row
    if cut.end < pieces.end[move.piece]:
        pieces.start[move.piece] = cut.end
    else:
        pieces.end[move.piece] = cut.start
    loads.seconds[source] -= cut.removed / loads.speed[source]
    loads.seconds[move.server] += cut.added / loads.speed[move.server]
    home = source // loads.per_node
    node = move.server // loads.per_node
    loads.node_seconds[home] -= cut.removed / loads.node_speed[home]
    loads.node_seconds[node] += cut.added / loads.node_speed[node]


@compile_inner
def _make_group_moves(
    pieces: QueryPieces,
    marginals: MarginalCosts,
    loads: RankLoads,
    ledger: Ledger,
    group_state: tuple[IntArray, int, int],
) -> int:
    """Make all moves in a group.

    Return the number of moves then, or -1. `group_state` holds its
    ranks, its number, and the moves so far.
    """
    order, group, count = group_state
    # Nothing is divided by 0.
    removed, added_work = 1e-30, 0.0
    # First ranks above the band give, at levels that rise as if all excess were moved at the rate
    # so far. Then they give again, at levels as they rose; but between nodes, where what they were
    # too high saves bytes. At last, while others are below the band, those that have more give.
    for giving_place, target_place, expected in (
        (CAP, HIGH, loads.excess[group]),
        (CAP, HIGH, loads.excess[group] * (loads.per_node > 1)),
        (LOW, FLOOR, 0.0),
    ):
        _raise_levels(loads, group, added_work * max(expected / removed, 1.0))
        for source in order:
            leeway = 0.0
            while _compute_excess(loads, source, giving_place) > 0:
                server = _choose_server(loads, source, giving_place, leeway)
                if server < 0:
                    break
                move, cut = _find_best_move(
                    pieces, marginals, loads, ledger, (source, server, target_place, leeway)
                )
                if move.piece < 0 or (giving_place == LOW and cut.added > 2.0 * cut.removed):
                    # The shortest slice may be more than the tolerated band is wide. Then a source
                    # below it, or a server above it but lower than the source was, is better than
                    # leaving the source as it is.
                    if giving_place == LOW or leeway > 0 or loads.per_node > 1:
                        break
                    leeway = 0.5
                    continue
                if count == len(ledger.moves):
                    return -1
                _apply_move(pieces, loads, ledger, (move, cut), (source, count))
                leeway = 0.0
                count += 1
                removed += cut.removed
                added_work = added_work + cut.added - cut.removed
                _raise_levels(loads, group, added_work * max(expected / removed, 1.0))
    return count


def _make_moves(
    pieces: QueryPieces,
    marginals: MarginalCosts,
    loads: RankLoads,
    ledger: Ledger,
    progress: tuple[IntArray, int],
) -> int:
    """Make all moves, in one group after another.

    Args:
        pieces: pieces of the layout; they shrink.
        marginals: marginal costs of slices.
        loads: work of the ranks; updated.
        ledger: earlier moves, with the homes of pieces of documents that lie on several ranks as
            holders.
        progress: all ranks by groups, in each group the slowest first, and the number of earlier
            moves.

    Returns:
        The number of moves; -1 if the ledger has no room for them.
    """
    order, count = progress
    for group in range(len(loads.excess)):
        first = group * loads.size
        last = (group + 1) * loads.size
        loads.group_span[0], loads.group_span[1] = first, last
        count = _make_group_moves(
            pieces, marginals, loads, ledger, (order[first:last], group, count)
        )
        if count < 0:
            break
    return count


make_moves = compile_function(_make_moves, keep=(__file__, slice_cost.__file__))
