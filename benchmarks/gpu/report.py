r"""The figures of run_all.py as a page.

python benchmarks/gpu/report.py gpu_figures
python benchmarks/gpu/report.py cpu_figures \
    --output benchmarks/results/llama_cpu_2026-11-21.md --note "Other work ran."
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from report_kernels import blocks, emulator, kernels, parity, profile, variants, widths
from report_layout import Figures, percent, table
from report_training import (
    curves,
    families,
    faults,
    first_script,
    hybrids,
    model,
    soak,
    trainer,
    transient,
)


def checkpointing(data: Figures) -> list[str]:
    rows = []
    for row in data.get("rows", []):
        seconds, plain = row["seconds"], row["plain"]
        gigabytes = (
            [f"{row['peak_bytes'][name] / 2**30:.1f}" for name in ("distca", plain)]
            if "peak_bytes" in row
            else ["", ""]
        )
        cells = (
            row["kernel"],
            "on" if row["checkpointing"] else "off",
            row["tokens"],
            row["documents"],
        )
        cells += (
            f"{1e3 * seconds['distca']:.1f}",
            f"{1e3 * seconds[plain]:.1f}",
            f"**{row['times_faster']:.3f}**",
            *gigabytes,
        )
        rows.append(cells)
    layers = next((row["layers"] for row in data.get("rows", [])), "")
    text = ["## Activation checkpointing on one GPU", ""]
    text += [
        (
            f"A step of {layers} layers of Llama-8B's shape, distca beside plain varlen attention"
            " by the same kernel."
        ),
        "",
    ]
    head = (
        "kernel",
        "checkpointing",
        "tokens",
        "documents",
        "distca, ms",
        "plain, ms",
        "times faster",
        "peak, GiB",
        "plain, GiB",
    )
    return text + table(head, rows)


def host(data: Figures) -> list[str]:
    rows = []
    for row in data.get("rows", []):
        cells = (f"{1e3 * row['seconds'][name]:.2f}" for name in ("distca", row["plain"]))
        first = (
            f"{1e6 * row['more_seconds_first_layer']:.0f}"
            if "more_seconds_first_layer" in row
            else ""
        )
        rows.append(
            (
                row["kernel"],
                row["tokens"],
                row["layers"],
                *cells,
                f"{1e6 * row['more_seconds_a_layer']:.0f}",
                first,
            )
        )
    text = [
        "## The host",
        "",
        "Steps of a model so small that the GPU waits for the host, forward and backward.",
        "",
    ]
    text += table(
        (
            "kernel",
            "tokens",
            "layers",
            "distca, ms",
            "plain, ms",
            "more a layer, us",
            "more for the first, us",
        ),
        rows,
    )
    rows = []
    for row in data.get("earlier", []):
        cells = (f"{1e3 * row['seconds'][name]:.2f}" for name in ("distca", row["plain"]))
        rows.append(
            (
                row["kernel"],
                row["tokens"],
                row["layers"],
                *cells,
                f"{1e6 * row['more_seconds_a_step'] / row['layers']:.0f}",
            )
        )
    if rows:
        text += [
            "Earlier commits on the same card; the first layer's share is in the last column.",
            "",
        ]
        text += table(
            (
                "kernel, commit",
                "tokens",
                "layers",
                "distca, ms",
                "plain, ms",
                "more a step / layers, us",
            ),
            rows,
        )
    for name, found in data.get("profiles", {}).items():
        layer = (
            f", {found['calls_a_layer']:.0f} for one more layer" if "calls_a_layer" in found else ""
        )
        text.append(
            f"- {name}: {found['calls_a_step']:.0f} calls of functions and built-ins a step{layer}"
            " (cProfile)"
        )
    return [*text, ""]


def stack(data: Figures) -> list[str]:
    rows = []
    for row in data.get("rows", []):
        host, plain = row["host_seconds"], row["plain"]
        micro = [
            f"{1e6 * host[name][part]:.0f}"
            for name in host
            for part in ("first_layer", "other_layers")
        ]
        waits = "; ".join(
            f"{name}: {found['profiler']}, {found['warned']} warned"
            for name, found in row["syncs"].items()
        )
        spread = f"{min(row['ratios']):.3f}..{max(row['ratios']):.3f}"
        others = [
            f"{name} {value / row['seconds']['distca']:.2f}"
            for name, value in row["seconds"].items()
            if name != "distca"
        ]
        cells = (
            row["tokens"],
            row["kernel"],
            plain,
            f"{row['ratio']:.4f} ({spread})",
            ", ".join(others),
            *micro,
            waits,
        )
        rows.append((*cells, f"{row['difference']:.1e}"))
    names = [
        f"{name} {part} us" for name in ("distca", "plain") for part in ("first layer", "others")
    ]
    head = (
        "tokens",
        "kernel",
        "beside",
        "step ratio",
        "steps of others / distca's",
        *names,
        "waits in a step",
        "outputs differ by",
    )
    return ["## A stack of layers, world of one", "", *table(head, rows)]


def ranks(data: Figures) -> list[str]:
    rows = []
    for count, found in data.get("ranks", {}).items():
        for dtype, by_rank in found.get("dtypes", {}).items():
            for mode in by_rank[0]:
                worst = [
                    max(row[mode][name] for row in by_rank) for name in ("output", "gradients")
                ]
                good = "" if mode == "sdpa" else all(row[mode]["passed"] for row in by_rank)
                exchanges = by_rank[0][mode].get("exchanges", "")
                rows.append(
                    (
                        count,
                        dtype.removeprefix("torch."),
                        mode,
                        *(f"{x:.1e}" for x in worst),
                        exchanges,
                        good,
                    )
                )
        if found["failed"]:
            rows.append(
                (count, "", "failed", str(found["failed"])[-200:].replace("\n", " "), "", "", False)
            )
    text = (
        ["## A world of one", "", f"Exchanges with oneself: {data['world_of_one']}", ""]
        if "world_of_one" in data
        else []
    )
    text += [f"## Several ranks on one device over {data.get('backend', 'gloo')}", ""]
    text += ["Relative errors of the output and of the worst gradient to `sdpa` in float32.", ""]
    return text + table(
        ("ranks", "dtype", "mode", "output", "gradients", "exchanges", "passed"), rows
    )


def memory(data: Figures) -> list[str]:
    rows = []
    for row in data.get("rows", []):
        if "failed" in row:
            rows.append((row["tokens"], row["checkpointing"], row["failed"], "", "", "", "", ""))
            continue
        cells = [
            row[name][what]
            for what in ("kept_after_forward", "peak")
            for name in ("distca", row["plain"])
        ]
        shown = (f"{cell / 2**30:.2f}" for cell in cells)
        ratios = (f"{row['peak_ratio']:.3f}", f"{row['simulated_ratio']:.3f}")
        rows.append((row["tokens"], row["checkpointing"], *shown, *ratios))
    head = ("tokens", "checkpointing", "kept, distca", "kept, plain", "peak, distca", "peak, plain")
    head += ("peak / plain's", "simulated / peak")
    return ["## Memory", "", "GiB with weights, without an optimizer.", "", *table(head, rows)]


def overlap(data: Figures) -> list[str]:
    rows = []
    for row in data.get("rows", []):
        for way, found in row.items():
            if isinstance(found, dict):
                cells = (
                    f"{found['without']:.4g}",
                    f"{found['with']:.4g}",
                    percent(found["hidden"]),
                )
                rows.append((row["load"], f"{row['exchange_seconds']:.4g}", way, *cells))
    head = ("exchanges / compute", "s of exchanges", "layers", "s without", "s with", "hidden")
    text = [
        "## Artificial exchanges",
        "",
        f"Share that is hidden (goal in ping-pong: {percent(data.get('goal', 0.8))}).",
    ]
    difference = data.get("difference", float("nan"))
    return [
        *text,
        f"Outputs of whole layers and of ping-pong differ by {difference:.1e}.",
        "",
        *table(head, rows),
    ]


PARTS: dict[str, Callable[[Figures], list[str]]] = {
    "checkpointing": checkpointing,
    "model": model,
    "emulator": emulator,
    "trainer": trainer,
    "first_script": first_script,
    "host": host,
    "stack": stack,
    "kernels": kernels,
    "variants": variants,
    "memory": memory,
    "ranks": ranks,
    "transient": transient,
    "soak": soak,
    "faults": faults,
    "parity": parity,
    "profile": profile,
    "overlap": overlap,
    "families": families,
    "hybrids": hybrids,
    "blocks": blocks,
    "widths": widths,
    "curves": curves,
}


def page(folder: Path, notes: Sequence[str]) -> str:
    run = json.loads((folder / "run.json").read_text())
    environment = run["environment"]
    name = environment.get("gpu", environment["processor"])
    text = [
        f"# Llama attention on {name}, {environment['date']}",
        "",
        *notes,
        *([""] if notes else []),
    ]
    text += table(("", ""), list(environment.items()))
    text += ["Parts, each with the command that ran it:", ""]
    for part, record in run["parts"].items():
        clocks = (
            f", at {record['clocks'][0]} to {record['clocks'][1]} MHz" if "clocks" in record else ""
        )
        taken = "" if record["seconds"] is None else f" after {record['seconds']} s"
        text.append(f"- {part}: {record['status']}{taken}{clocks}, `{record['command']}`")
    text.append("")
    if (folder / "traces.png").exists():
        text += [
            (
                "A step of two layers of Llama-8B's shape, 8K tokens, by torch's profiler (traces"
                " in this folder):"
            ),
            "",
        ]
        text += ["![Host and GPU in a step](traces.png)", ""]
    for part, write in PARTS.items():
        path = folder / f"{part}.json"
        if part not in run["parts"] or not path.exists():
            continue
        data = json.loads(path.read_text())
        text += write(data)
        if data.get("left_out"):
            text += [
                (
                    f"Left out for time: {'; '.join(data['left_out'][:8])} ({len(data['left_out'])}"
                    " in all)."
                ),
                "",
            ]
        if data.get("failed"):
            text += [
                "This part failed:",
                "",
                "```",
                *str(data["failed"]).splitlines()[-4:],
                "```",
                "",
            ]
    return "\n".join(text).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figures", type=Path, help="folder that run_all.py wrote")
    parser.add_argument(
        "--output", type=Path, help="page to write (default: README.md in that folder)"
    )
    parser.add_argument(
        "--note", action="append", default=[], help="a line about the conditions, under the title"
    )
    arguments = parser.parse_args()
    output = arguments.output or arguments.figures / "README.md"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page(arguments.figures, arguments.note), encoding="utf-8")
    print(output)


if __name__ == "__main__":
    main()
