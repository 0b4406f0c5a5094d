"""Trains a tiny Llama under every engine and compares distca with sdpa.

Each kind of engine gets new gloo processes on the CPU. Both runs see the same packed documents and
position ids. The table has the differences of losses and gradient norms.

    python tests/engines/matrix.py --engine ZeRO --json matrix.json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))

from case import Case, Run
from tiny_llama import LAYERS

from engines import BY_NAME, cases, train
from ranks import RankPool

# Timeout in seconds of a run with its processes. Imports take most of the time, and machines may be
# busy.
TIMEOUT = 600.0


@dataclass(frozen=True)
class Outcome:
    """One line of the table. Differences are the largest of all steps, relative to sdpa. If the
    case failed, they are None and `error` has the reason.
    """

    case: Case
    engine: str = ""
    loss_difference: float | None = None
    grad_norm_difference: float | None = None
    step_seconds: float | None = None
    sdpa_step_seconds: float | None = None
    calls_per_layer: float | None = None
    gathers_per_micro_batch: float | None = None
    sent_bytes: int = 0
    error: str = ""


def compare(pool: RankPool, case: Case, theirs: list[Run]) -> Outcome:
    """Run `case` under distca and compare with `theirs`, the same case under sdpa. Raises
    AssertionError if a rank fails.
    """
    ours = pool(train, case, "distca", timeout=TIMEOUT)

    def worst(name: str) -> float:
        pairs = [
            pair
            for a, b in zip(ours, theirs, strict=True)
            for pair in zip(getattr(a, name), getattr(b, name), strict=True)
        ]
        if len(pairs) < len(ours) * case.steps:
            raise AssertionError(f"{case}: only {len(pairs)} values of {name} on {len(ours)} ranks")
        return max(compute_difference(a, b) for a, b in pairs)

    engines = {run.engine for run in ours}
    if engines != {run.engine for run in theirs}:
        raise AssertionError(
            f"{case}: {engines} under distca, {[run.engine for run in theirs]} under sdpa"
        )
    sent = sum(run.sent_bytes for run in ours)
    if sent == 0:
        raise AssertionError(f"{case}: nothing was exchanged, so nothing was compared")
    calls = {run.calls for run in ours}
    if calls != {case.calls}:
        raise AssertionError(
            f"{case}: {calls} calls of core attention on the ranks, not {case.calls}"
        )
    gathers = {run.gathers for run in ours}
    if len(gathers) > 1 or max(gathers) > case.gathers:
        raise AssertionError(
            f"{case}: {gathers} collectives of planning on the ranks, not {case.gathers}"
        )
    seconds = [max(run.seconds for run in runs) for runs in (ours, theirs)]
    micro_batches = case.steps * case.accumulation
    counts = case.calls / (LAYERS * micro_batches), gathers.pop() / micro_batches
    return Outcome(
        case, engines.pop(), worst("losses"), worst("grad_norms"), *seconds, *counts, sent
    )


def compute_difference(value: float, wanted: float) -> float:
    """Compute the relative difference, or 0 for a step in which both values overflow."""
    if not (math.isfinite(value) or math.isfinite(wanted)):
        return 0.0
    return abs(value - wanted) / abs(wanted) if math.isfinite(value - wanted) else math.inf


class Runs:
    """Runs cases one after another in the same processes; DeepSpeed, which patches torch, has
    separate ones.

    Sdpa's results do not depend on ping-pong, so one run serves both cases.
    """

    def __init__(self) -> None:
        self._kind: object = None
        self._pool: RankPool | None = None
        self._theirs: dict[Case, list[Run]] = {}

    def outcome(self, case: Case) -> Outcome:
        """Run a case under distca and sdpa. Raises AssertionError if a rank fails; the next case
        then gets new processes.
        """
        twin = replace(case, ping_pong=False)
        if twin not in self._theirs:
            try:
                self._theirs[twin] = self._processes(case)(train, twin, "sdpa", timeout=TIMEOUT)
            except AssertionError as error:
                raise AssertionError(f"fails under sdpa, too\n{error}") from error
        return compare(self._processes(case), case, self._theirs[twin])

    def _processes(self, case: Case) -> RankPool:
        kind = case.engine.startswith("ZeRO"), case.ranks
        if self._pool is None or not self._pool.alive or kind != self._kind:
            self.close()
            self._pool, self._kind = RankPool(case.ranks), kind
        return self._pool

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.close()


def run_all(selected: list[Case], progress: Console) -> list[Outcome]:
    """Run all cases and return their outcomes, including failures."""
    found: list[Outcome] = []
    runs = Runs()
    for case in selected:
        try:
            found.append(runs.outcome(case))
        except AssertionError as error:
            found.append(Outcome(case, error=str(error).strip()))
        one = found[-1]
        result = one.error or f"loss {one.loss_difference:.1e}, norm {one.grad_norm_difference:.1e}"
        progress.print(
            f"{len(found)}/{len(selected)} {case}: {result}", highlight=False, soft_wrap=True
        )
    runs.close()
    return found


def show(found: list[Outcome]) -> None:
    table = Table(title="distca compared with sdpa")
    switches = ("checkpointing", "LoRA", "ping-pong")
    figures = ("loss", "gradient norm", "s/step", "sdpa s/step")
    counts = ("calls/layer", "gathers/micro-batch", "evidence")
    for column in ("engine", "precision", "ranks", *switches, *figures, *counts):
        table.add_column(column, overflow="fold")
    for one in found:
        case = one.case
        extras = [f"x{case.accumulation} accumulated"] * (case.accumulation > 1)
        switches = (case.checkpointing, "yes" if case.peft else "", "yes" if case.ping_pong else "")
        what = (", ".join([case.engine, *extras]), case.precision, str(case.ranks), *switches)
        if one.error:
            lines = one.error.splitlines()
            reason = lines[-1] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
            table.add_row(*what, *[""] * 6, f"failed: {reason}", style="red")
            continue
        figures = (f"{one.loss_difference:.1e}", f"{one.grad_norm_difference:.1e}")
        seconds = (f"{one.step_seconds:.2f}", f"{one.sdpa_step_seconds:.2f}")
        counted = (f"{one.calls_per_layer:g}", f"{one.gathers_per_micro_batch:.3g}")
        table.add_row(*what, *figures, *seconds, *counted, one.engine)
    Console(width=170).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    named = "only engines whose name contains TEXT"
    parser.add_argument("--engine", metavar="TEXT", default="", help=named)
    quick = "only the first case of each engine and precision, with and without ping-pong"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write JSON to FILE")
    arguments = parser.parse_args()
    selected = [case for case in cases() if arguments.engine.lower() in case.engine.lower()]
    if arguments.quick:
        first = {(case.engine, case.precision, case.ping_pong): case for case in reversed(selected)}
        selected = [case for case in selected if case in first.values()]
    if not selected:
        parser.error(f"no engine's name contains {arguments.engine!r}; engines: {[*BY_NAME]}")
    found = run_all(selected, Console(stderr=True))
    show(found)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in found], indent=1))
    sys.exit(any(one.error for one in found))


if __name__ == "__main__":
    main()
