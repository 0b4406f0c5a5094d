"""hf-distca compared with other ways to train on long documents, on the GPUs of one node; a dry run
does the same with tiny sizes on two CPU processes.

    benchmarks/eight_gpus/run.sh
    benchmarks/eight_gpus/run.sh --dry-run

Prints predictions first. Then compares losses and gradients of every arm with those of packed
attention on the same batches, and times only the arms that are equal. A second call continues where
the first one stopped. A failure becomes a row. At the end, the figures are made into `page.md` in
their folder; --page makes it again.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

from run_all import prepare

# The most important part comes first.
PARTS = (
    ("qwen3_8b", "long_tail"),
    ("gpt_oss_20b", "long_tail"),
    ("qwen3_5_9b", "long_tail"),
    ("qwen3_8b", "equal"),
    ("gpt_oss_20b", "equal"),
    ("qwen3_5_9b", "equal"),
)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on two CPU processes")
    parser.add_argument(
        "--one-card", action="store_true", help="rehearse with two ranks on one GPU; needs --layers"
    )
    parser.add_argument("--page", action="store_true", help="only make the page again")
    parser.add_argument("--out", type=Path, help="folder of the figures (default: eight_figures)")
    parser.add_argument("--seconds", type=float, default=3600, help="total time (default: 3600)")
    parser.add_argument("--tokens", type=int, help="tokens per rank in a step (default: 32768)")
    parser.add_argument("--layers", type=int, help="layers of each model (default: all)")
    parser.add_argument(
        "--steps", type=int, help="steps of an arm in each of two turns (default: 5)"
    )
    parser.add_argument("--models", nargs="+", help="models whose names contain these words")
    parser.add_argument("--lengths", nargs="+", help="sets of lengths whose names contain these")
    parser.add_argument("--arms", nargs="+", help="names of arms (default: all)")
    arguments = parser.parse_args()
    small = arguments.dry_run
    defaults = {"tokens": (32768, 1024), "steps": (5, 1)}
    for name, (large, tiny) in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, tiny if small else large)
    arguments.out = arguments.out or Path("eight_dry_run" if small else "eight_figures")
    return arguments


def make_parts(arguments: argparse.Namespace) -> list[Any]:
    """Make the parts that were asked for; a dry run leaves out the control of two models."""
    import torch

    from eight_rank import Part

    dry = arguments.dry_run
    cards = torch.cuda.device_count()
    ranks = 2 if dry or (arguments.one_card and cards) else cards
    if ranks < 2:
        sys.exit(
            f"run.sh found {cards} GPUs and needs at least two; --one-card needs one, --dry-run"
            " none."
        )
    sized = (arguments.tokens, 32768 // arguments.tokens if dry else 1, arguments.layers, dry)
    chosen = [
        pair
        for pair in (PARTS[:4] if dry else PARTS)
        if all(
            not words or any(word in name for word in words)
            for name, words in zip(pair, (arguments.models, arguments.lengths), strict=True)
        )
    ]
    steps = (2 if dry or arguments.one_card else 4, arguments.steps)
    out = arguments.out.resolve()
    kind = "cpu" if dry else "cuda"
    return [Part(*pair, ranks, kind, *sized, *steps, out) for pair in chosen]


def run_until_done(part: Any, arms: list[str], end: float) -> None:
    """Run a part until all arms ended or failed, or the time is over."""
    from eight_arms import find_obstacle
    from eight_launch import Launch
    from eight_predictions import count_token_operations, count_weights
    from eight_rank import read_rows, run_part, write_rows

    path = part.out / f"{part.name}.json"
    rows, config = read_rows(path), part.config()
    for arm in arms:
        if reason := find_obstacle(arm, config, part.ranks, part.device):
            rows.setdefault(arm, {})["absent"] = reason
    write_rows(path, rows)
    running = path.with_suffix(".running")
    launch = Launch(part.ranks, part.device, part.out, running, 90.0 if part.tiny else 400.0)
    operations = count_token_operations(count_weights(part))
    while time.time() < end:
        rows = read_rows(path)
        left = [arm for arm in arms if not {"absent", "failed"} & rows.get(arm, {}).keys()]
        if not any(is_open(rows.get(arm, {})) for arm in left):
            return
        running.unlink(missing_ok=True)
        failed = launch.run(run_part, part, left, end, operations)
        if failed is None:
            return
        rows = read_rows(path)  # rows from earlier attempts included
        # Without a running arm, building the model failed.
        blamed = json.loads(running.read_text()) if running.exists() else None
        for arm in [blamed[0]] if blamed else left:
            during = blamed[1] if blamed else "building the model"
            rows.setdefault(arm, {})["failed"] = f"{during}: {failed}"
            print(f"    {arm} failed, {during}: {failed.splitlines()[-1]}", flush=True)
        write_rows(path, rows)


def is_open(row: dict[str, Any]) -> bool:
    """Return whether an arm still has something to measure."""
    if "losses" not in row or "parity" not in row:
        return True
    return row["parity"] and not (len(row.get("seconds", {})) == 2 and "trace" in row)


def print_predictions(part: Any, links: dict[str, Any], arms: list[str]) -> None:
    """Print the predictions for a part, before anything of the part runs."""
    from eight_predictions import put_predictions

    found = put_predictions(part, links, {arm: part.resolve(arm) for arm in arms})
    seconds = {arm: one["seconds"] for arm, one in found["arms"].items() if one}
    base = seconds.get("packed") or next(iter(seconds.values()), 1.0)
    said = ", ".join(f"{arm} {value / base:.2f}" for arm, value in seconds.items())
    # One comparison per batch, two turns with one uncounted step each, a trace, and two for memory.
    steps = part.batches + 2 * (part.steps + 1) + 3
    minutes = steps * sum(seconds.values()) / 60
    print(
        f"predicted for {part.name} by the rates of {found['rates']}: {base:.3g} s a step of packed"
        f" attention; relative to it {said}; {minutes:.1f} minutes of steps",
        flush=True,
    )


def print_part(part: Any) -> None:
    """Print how arms compare, and the seconds of the equal ones."""
    from eight_page import compute_median_seconds
    from eight_rank import read_rows

    for arm, row in read_rows(part.out / f"{part.name}.json").items():
        if "losses_off" in row:
            off = f"losses {row['losses_off']:.1e}, gradients {row['gradients_off']:.1e}"
            seconds = compute_median_seconds(row)
            said = f"{off}; {seconds:.3g} s" if seconds else off
            print(f"    {arm}: {said if row['parity'] else 'not equal: ' + said}", flush=True)


def main() -> None:
    arguments = read_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    environment = prepare(arguments.out.resolve())
    from clocks import watching_clocks
    from eight_arms import ARMS
    from eight_launch import Launch
    from eight_machine import make_manifest, measure_links
    from eight_page import write_page

    out, end = arguments.out.resolve(), time.time() + arguments.seconds
    if arguments.page:
        print(write_page(out))
        return
    parts, arms = make_parts(arguments), arguments.arms or list(ARMS)
    path = out / "manifest.json"
    manifest = json.loads(path.read_text()) if path.exists() else {}
    for kept in ("links", "commands", "clocks"):
        manifest.setdefault(kept, [])
    manifest |= make_manifest(environment)
    manifest["commands"].append(shlex.join(["benchmarks/eight_gpus/run.sh", *sys.argv[1:]]))
    manifest |= {"parts": [[part.model, part.lengths] for part in parts], "arms": arms}
    manifest |= {"ranks": parts[0].ranks, "tokens": parts[0].tokens, "shrink": parts[0].shrink}
    manifest |= {"layers": arguments.layers, "dry_run": arguments.dry_run}
    kind = parts[0].device
    launch = Launch(parts[0].ranks, kind, out, out / "links.part", 180.0)

    def put_links() -> None:
        manifest["links"].append(measure_links(launch))
        path.write_text(json.dumps(manifest, indent=1))
        print(f"links: {manifest['links'][-1]}", flush=True)

    put_links()
    for part in parts:
        print_predictions(part, manifest["links"][-1], arms)
    for number, part in enumerate(parts):
        print(f"[{number + 1}/{len(parts)}] {part.name}", flush=True)
        with nullcontext([]) if arguments.dry_run else watching_clocks() as clocks:
            try:
                run_until_done(part, arms, end)
            except Exception as error:  # other parts can still run
                print(f"    failed: {type(error).__name__}: {error}", flush=True)
        manifest["clocks"] += [min(clocks), max(clocks)] if clocks else []
        print_part(part)
    put_links()
    print(write_page(out))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
