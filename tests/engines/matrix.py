"""Trains a tiny Llama under every engine with distca and with sdpa, and prints how far their losses and gradients are apart.

Each engine gets fresh gloo processes on the CPU. Both runs see the same packed documents and position ids.

    python tests/engines/matrix.py --engine ZeRO --json matrix.json
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))

from engines import ENGINES, Case, cases, train, world_of
from ranks import RankPool


@dataclass(frozen=True)
class Outcome:
    """One line of the table. Differences are the largest of all steps, relative to sdpa; None with `error` where none ran."""

    case: Case
    engine: str = ""
    loss_difference: float | None = None
    grad_norm_difference: float | None = None
    step_seconds: float | None = None
    sdpa_step_seconds: float | None = None
    sent_bytes: int = 0
    error: str = ""


def compare(pool: RankPool, case: Case, timeout: float = 300.0) -> Outcome:
    """Run `case` under both implementations. Raises AssertionError if a rank fails."""
    ours = pool(train, case, "distca", timeout=timeout)
    theirs = pool(train, case, "sdpa", timeout=timeout)

    def worst(name: str) -> float:
        pairs = [pair for a, b in zip(ours, theirs, strict=True) for pair in zip(getattr(a, name), getattr(b, name), strict=True)]
        if len(pairs) < len(ours) * case.steps:
            raise AssertionError(f"{case}: only {len(pairs)} values of {name} on {len(ours)} ranks")
        return max(abs(a - b) / abs(b) for a, b in pairs)

    engines = {run.engine for run in ours}
    if engines != {run.engine for run in theirs}:
        raise AssertionError(f"{case}: {engines} under distca, {[run.engine for run in theirs]} under sdpa")
    sent = sum(run.sent_bytes for run in ours)
    if sent == 0:
        raise AssertionError(f"{case}: nothing was exchanged, so nothing was compared")
    seconds = [max(run.seconds for run in runs) for runs in (ours, theirs)]
    return Outcome(case, engines.pop(), worst("losses"), worst("grad_norms"), *seconds, sent)


def outcomes(selected: list[Case], progress: Console) -> list[Outcome]:
    """All lines; a failing case ends its processes, and the next one gets fresh ones."""
    found = []
    for _, group in groupby(selected, key=lambda case: case.engine):
        pool: RankPool | None = None
        for case in group:
            if pool is None or not pool.alive:
                pool = RankPool(world_of(case))
            try:
                found.append(compare(pool, case))
            except AssertionError as error:
                found.append(Outcome(case, error=str(error).strip()))
            result = found[-1].error or f"loss {found[-1].loss_difference:.1e}, {found[-1].step_seconds:.2f} s a step"
            progress.print(f"{len(found)}/{len(selected)} {case}: {result}", highlight=False, soft_wrap=True)
        if pool is not None and pool.alive:
            pool.close()
    return found


def show(found: list[Outcome]) -> None:
    table = Table(title="distca against sdpa")
    for column in ("engine", "checkpointing", "LoRA", "loss", "gradient norm", "s/step", "sdpa s/step", "what ran"):
        table.add_column(column, overflow="fold")
    for one in found:
        case = one.case
        extras = [f"x{case.accumulation} accumulated"] * (case.accumulation > 1) + ["bf16"] * case.bf16
        name = ", ".join([case.engine, *extras])
        lora = "yes" if case.peft else ""
        if one.error:
            table.add_row(name, case.checkpointing, lora, "", "", "", "", f"failed: {one.error.splitlines()[-1]}", style="red")
            continue
        figures = (f"{one.loss_difference:.1e}", f"{one.grad_norm_difference:.1e}")
        seconds = (f"{one.step_seconds:.2f}", f"{one.sdpa_step_seconds:.2f}")
        table.add_row(name, case.checkpointing, lora, *figures, *seconds, one.engine)
    Console(width=170).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", metavar="TEXT", default="", help="only engines whose name contains TEXT")
    parser.add_argument("--quick", action="store_true", help="one case an engine: no checkpointing, no LoRA")
    parser.add_argument("--list", action="store_true", help="print the names of the engines and end")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write JSON to FILE, or to standard output")
    arguments = parser.parse_args()
    if arguments.list:
        Console().print("\n".join(ENGINES), highlight=False)
        return
    selected = [case for case in cases() if arguments.engine.lower() in case.engine.lower()]
    if arguments.quick:
        selected = [case for case in selected if case == Case(case.engine)]
    if not selected:
        parser.error(f"no engine's name contains {arguments.engine!r}; --list prints them")
    found = outcomes(selected, Console(stderr=True))
    text = json.dumps([asdict(one) for one in found], indent=1)
    if arguments.json is None:
        show(found)
    elif arguments.json == "-":
        sys.stdout.write(text + "\n")
    else:
        Path(arguments.json).write_text(text)
        show(found)
    sys.exit(any(one.error for one in found))


if __name__ == "__main__":
    main()
