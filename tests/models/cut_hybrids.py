"""The table of benchmarks/results/hybrids_2026-11.md: each type with recurrent layers, packed and
cut over ranks, against whole documents.

python tests/models/cut_hybrids.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # pytest has it there, too

import torch
from compare import difference
from cut import PAIRS, Case, Parts, Share, compare, whole_documents
from tiny import class_of
from tqdm import tqdm

from hf_distca.hybrids.recurrent_layers import RECURRENT_MODULES
from hf_distca.integration.families import FAMILIES
from hf_distca.schedule.deal import deal, deal_in_order
from hf_distca.schedule.layout import Layout
from ranks import RankPool

PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "hybrids_2026-11.md"
TYPES = sorted(name for name, group in FAMILIES.items() if group == "PACKED")
# The first is longer than three of four ranks hold, and than two chunks of a delta rule.
LENGTHS = (150, 9, 1, 32)
RANKS, TOKENS = 4, 48


def parts_of(layout: Layout) -> Parts:
    """Documents as they lie on ranks."""
    rows = zip(layout.rank, layout.document, layout.start, layout.end, strict=True)
    held = [tuple(map(int, row)) for row in rows]
    return tuple(
        tuple((d, a, b) for rank, d, a, b in held if rank == number)
        for number in range(layout.world_size)
    )


def token_by_token() -> Parts:
    """Tokens 60 to 84 of the long document and all of a short one, each by itself on the next
    rank.
    """
    cut = [(0, a, a + 1) for a in range(60, 84)] + [(1, a, a + 1) for a in range(9)]
    rest = [(0, 0, 60), (0, 84, 150), (2, 0, 1), (3, 0, 32)]
    return tuple((piece, *cut[rank::RANKS]) for rank, piece in enumerate(rest))


# A placement, and whether its batch numbers documents, as shares do: else position ids alone tell
# them apart.
PLACEMENTS: dict[str, tuple[Parts, bool]] = {
    "packed, 1 rank": ((((0, 0, 150), (1, 0, 9), (2, 0, 1), (3, 0, 32)),), False),
    "packed, 2 ranks": ((((0, 0, 150),), ((1, 0, 9), (2, 0, 1), (3, 0, 32))), False),
    "head and tail": (parts_of(deal(LENGTHS, RANKS, TOKENS, PAIRS, tile=8)), True),
    "in order": (parts_of(deal_in_order(LENGTHS, RANKS, TOKENS)), True),
    "one-token pieces": (token_by_token(), True),
    "over 4 ranks": (
        (
            ((0, 60, 101), (1, 0, 9)),
            ((0, 120, 150), (2, 0, 1)),
            ((0, 0, 60),),
            ((3, 0, 32), (0, 101, 120)),
        ),
        True,
    ),
    "3, 2 and 1 pieces": (
        (
            ((0, 0, 20), (0, 50, 70), (2, 0, 1), (0, 100, 120)),
            ((1, 0, 4), (0, 20, 50), (0, 120, 150)),
            ((0, 70, 100),),
            ((1, 4, 9), (3, 0, 32)),
        ),
        True,
    ),
}
# Faults: without what they take away, the same comparison fails by far.
CONTROLS = {
    "states lost": "states of other ranks lost",
    "halos lost": "rows of convolutions of other ranks lost",
}
# In the code's own float32, which rounds whole documents as much: both against whole documents in
# float64.
FLOAT32 = ("float32, cut", "float32, whole")
IN_ORDER = "in order"  # the placement of both


def columns_of(model_type: str) -> list[str]:
    """Columns of the table that a type has: convolutions have no states."""
    has_states = len(RECURRENT_MODULES[class_of(model_type).__module__.split(".")[2]][1]) > 1
    return [
        *PLACEMENTS,
        *(name for name in CONTROLS if has_states or name == "halos lost"),
        *FLOAT32,
    ]


def measure_cut(
    pools: Callable[[int], RankPool], model_type: str, column: str
) -> tuple[float, str, list[Share]]:
    """The largest relative difference of losses, logits and gradients, of what it is, and what
    ranks got.
    """
    want = whole_documents(model_type, "sdpa", torch.float64, LENGTHS)
    if column == "float32, whole":
        return *difference(whole_documents(model_type, "sdpa", torch.float32, LENGTHS), want), []
    parts, numbered = PLACEMENTS.get(column, PLACEMENTS[IN_ORDER])
    dtype = torch.float32 if column in FLOAT32 else torch.float64
    case = Case(model_type, dtype, parts, numbered=numbered, mutation=CONTROLS.get(column))
    return compare(pools(len(parts)), case, want)


def stated() -> dict[tuple[str, str], float]:
    """The figures of the page."""
    names, *rows = (
        re.findall(r"[^|]+", line) for line in _table(PAGE.read_text(encoding="utf-8")).splitlines()
    )
    cells = ((row[0].strip(" `"), zip(names[1:], row[1:], strict=True)) for row in rows[1:])
    return {
        (kind, name.strip()): float(cell)
        for kind, row in cells
        for name, cell in row
        if cell.strip() != "-"
    }


def _table(page: str) -> str:
    found = re.search(r"^\| type \| packed, 1 rank (.*\n)(\|.*\n)+", page, re.MULTILINE)
    assert found, f"{PAGE} has no table of types and placements"
    return found[0]


def main() -> None:
    torch.set_num_threads(1)
    pools = {size: RankPool(size) for size in (1, 2, RANKS)}
    names = [*PLACEMENTS, *CONTROLS, *FLOAT32]
    lines = ["| type | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for model_type in tqdm(TYPES, file=sys.stderr):
        found = {
            name: f"{measure_cut(pools.__getitem__, model_type, name)[0]:.1e}"
            for name in columns_of(model_type)
        }
        lines.append(
            f"| `{model_type}` | " + " | ".join(found.get(name, "-") for name in names) + " |"
        )
    for pool in pools.values():
        pool.close()
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page.replace(_table(page), "\n".join(lines) + "\n"), encoding="utf-8")


if __name__ == "__main__":
    main()
