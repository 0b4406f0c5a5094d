"""Trains the example's model on dealt documents and compares it with one process under sdpa.

A global batch has the same tokens on any number of ranks, and documents are up to three times as
long as the share of one of four ranks. The losses of all optimizer steps and the final weights are
compared with one process in float32. In float32 they are equal up to rounding. In bfloat16, the
usual precision, the difference may be twice that of sdpa in bfloat16.

    python tests/engines/equal_training.py --json equal_training.json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))

from dealt_training import LONGEST, Case, Run, cases, train

from ranks import RankPool

LOSS, WEIGHTS = 1e-5, 1e-4  # bounds in float32
# In bfloat16, the bounds are this multiple of the difference that sdpa makes on one process. Tests
# of flash attention use the same measure.
TIMES = 2
TIMEOUT = 300.0


def prepare(folder: Path) -> None:
    """Write the example's tokens and model."""
    sys.path.append(str(Path(__file__).parents[2] / "examples"))
    from arguments import DocumentArguments
    from packing import load_documents, tokenized
    from stdlib_corpus import write_initial_model

    data = DocumentArguments()
    documents = load_documents(data)
    write_initial_model(folder / "model", documents, max_length=LONGEST, seed=0)
    tokenized(
        documents, AutoTokenizer.from_pretrained(folder / "model"), data, LONGEST
    ).save_to_disk(str(folder / "tokens"))


@dataclass(frozen=True)
class Outcome:
    """The differences of a case, their bounds, and its number of documents on several ranks.

    Attributes:
        loss: the largest relative difference.
        weights: the largest difference in float32; the root mean square in bfloat16, because Adam
            moves some weights by the sign of a gradient near 0.
    """

    case: Case
    loss: float = math.nan
    weights: float = math.nan
    loss_bound: float = LOSS
    weights_bound: float = WEIGHTS
    spanning: int = 0
    error: str = ""

    @property
    def held(self) -> bool:
        """Return whether the differences keep their bounds."""
        spans = self.spanning > 0 or self.case.ranks == 1
        return (
            not self.error
            and spans
            and self.loss <= self.loss_bound
            and self.weights <= self.weights_bound
        )


class Runs:
    """Runs cases in processes that stay up; DeepSpeed, which patches torch, has its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pool: RankPool | None = None
        self._kind: object = None
        self._references: dict[Case, Run] = {}

    def outcome(self, case: Case) -> Outcome:
        """Train and compare. Raises AssertionError if a rank fails."""
        exact, bounds = self._reference(replace(case, precision="float32")), (LOSS, WEIGHTS)
        if case.precision != "float32":
            loss, weights = compute_differences(case, self._reference(case), exact)
            bounds = TIMES * loss, TIMES * weights
        ours = self._run(case)
        return Outcome(case, *compute_differences(case, ours, exact), *bounds, ours.spanning)

    def _reference(self, case: Case) -> Run:
        """Train the reference of a case, once for all cases that share it."""
        if case.reference not in self._references:
            self._references[case.reference] = self._run(case.reference)
        return self._references[case.reference]

    def _run(self, case: Case) -> Run:
        kind = case.engine.startswith("ZeRO"), case.ranks
        if self._pool is None or not self._pool.alive or kind != self._kind:
            self.close()
            # Ranks may start loader workers, which daemons cannot.
            self._pool, self._kind = RankPool(case.ranks, daemon=False), kind
        return self._pool(train, case, str(self.folder), timeout=TIMEOUT)[0]

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.close()


def compute_differences(case: Case, ours: Run, theirs: Run) -> tuple[float, float]:
    """Compute the differences of losses and of weights, as `Outcome` defines them."""
    if len(ours.losses) != case.steps or ours.weights.keys() != theirs.weights.keys():
        raise AssertionError(
            f"{case}: {len(ours.losses)} losses; weights"
            f" {ours.weights.keys() ^ theirs.weights.keys()}"
        )
    loss = max(abs(a - b) / abs(b) for a, b in zip(ours.losses, theirs.losses, strict=True))
    apart = torch.cat(
        [
            (ours.weights[name].float() - weight.float()).flatten()
            for name, weight in theirs.weights.items()
        ]
    )
    return loss, float(
        apart.abs().max() if case.precision == "float32" else apart.square().mean().sqrt()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="only cases whose name contains TEXT"
    )
    parser.add_argument(
        "--steps", type=int, default=20, help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="write JSON to FILE")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        runs = Runs(Path(folder))
        selected = [
            replace(case, steps=arguments.steps)
            for case in cases()
            if arguments.only.lower() in str(case).lower()
        ]
        for case in selected:
            try:
                found.append(runs.outcome(case))
            except AssertionError as error:
                found.append(Outcome(case, error=str(error).strip()))
            one = found[-1]
            result = (
                one.error.splitlines()[-1]
                if one.error
                else f"loss {one.loss:.1e}, weights {one.weights:.1e}"
            )
            console.print(f"{len(found)} {case}: {result}", highlight=False, soft_wrap=True)
        runs.close()
    table = Table(
        title=f"{arguments.steps} steps on dealt documents, compared with one process under sdpa"
    )
    for column in ("case", "loss", "bound", "weights", "bound", "documents over ranks", ""):
        table.add_column(column, overflow="fold")
    for one in found:
        figures = (
            f"{value:.1e}" for value in (one.loss, one.loss_bound, one.weights, one.weights_bound)
        )
        table.add_row(str(one.case), *figures, str(one.spanning), "" if one.held else "differs")
    Console(width=150).print(table)
    if arguments.json:
        rows = [{**asdict(one), "name": str(one.case), "held": one.held} for one in found]
        Path(arguments.json).write_text(json.dumps(rows, indent=1))
    sys.exit(not all(one.held for one in found))


if __name__ == "__main__":
    main()
