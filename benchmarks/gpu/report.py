"""The figures of run_all.py as a page.

python benchmarks/gpu/report.py gpu_figures
python benchmarks/gpu/report.py cpu_figures --output benchmarks/results/llama_cpu_2026-11-21.md --note "Other work ran."
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
RESULTS = Path(__file__).resolve().parents[1] / "results"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    return ["| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)] + [""]


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def tera(value: float) -> str:
    return f"{value / 1e12:.4g}"


def parity(data: Figures) -> list[str]:
    groups: dict[tuple[str, str, str], list[Figures]] = {}
    for case in data.get("cases", []):
        groups.setdefault((case["kernel"], case["dtype"].removeprefix("torch."), case["scores"]), []).append(case)
    rows = []
    for (kernel, dtype, scores), cases in groups.items():
        reason = next((case["unsupported"] for case in cases if "unsupported" in case), None)
        if reason:
            rows.append((kernel, dtype, scores, "", f"not supported: {reason}"))
            continue
        batches = [batch for case in cases for batch in case["batches"].values()]
        failed = [case["failed"] for case in cases if "failed" in case]
        worst = max((error for batch in batches for error in batch["errors"].values()), default=float("nan"))
        good = sum(batch["passed"] for batch in batches)
        rows.append((kernel, dtype, scores, f"{worst:.2g}", f"{good} of {len(batches)}" + "".join(f"; {e}" for e in failed[:1])))
    widths = sorted({case["heads"][2] for case in data.get("cases", [])})
    text = [
        "## Parity",
        "",
        f"Head dims {widths}; norm of the difference to float32 over its norm, the largest of o, lse, dq, dk,",
    ]
    text += ["dv (and of the sinks' gradient); bound 2 units in the last place, 1e-5 in float32.", ""]
    text += table(("kernel", "dtype", "scores", "largest error", "batches within bound"), rows)
    if "pytest" in data:
        text += [
            "`pytest tests/kernels/test_cuda_kernels.py`:",
            "",
            "```",
            *data["pytest"].get("output", "").splitlines()[-6:],
            "```",
            "",
        ]
    return text


def kernels(data: Figures) -> list[str]:
    text = ["## Kernels", "", "TFLOP/s of rebatched tasks of a plan beside whole documents of as many pairs (goal: 95 %).", ""]
    rows = []
    for row in data.get("rebatched", []):
        cells = [f"{tera(row['rebatched'][d])} / {tera(row['whole'][d])} = {percent(row['ratio'][d])}" for d in row["ratio"]]
        tasks = "+".join(map(str, row["tasks"]))
        rows.append((row["kernel"], row["model"], row["placement"], row["rank"], tasks, row["document_length"], *cells))
    text += table(("kernel", "model", "placement", "rank", "tasks", "document", "forward", "backward"), rows)
    for curve in data.get("curves", []):
        whole = curve["whole"]
        text += [f"Slices, {curve['kernel']}, {curve['model']}: percent of one long document, which runs at "]
        text[-1] += f"{tera(whole['forward'])} forward and {tera(whole['backward'])} TFLOP/s backward. Shortest slice at 95 %: "
        text[-1] += f"{curve['tile']['forward']} rows forward, {curve['tile']['backward']} backward."
        alone = {row["rows"]: row for row in curve["alone"]}
        many = {row["rows"]: row for row in curve["many"]}
        rows = []
        for n, one in alone.items():
            cells = [percent(one[d] / whole[d]) for d in whole]
            rows.append((n, *([percent(many[n][d] / whole[d]) for d in whole] if n in many else ["", ""]), *cells))
        text += ["", *table(("rows", "many, forward", "many, backward", "one, forward", "one, backward"), rows)]
    return text + [f"{name}: {data[name]}\n" for name in ("cudnn", "not_run") if name in data]


def stack(data: Figures) -> list[str]:
    rows = []
    for row in data.get("rows", []):
        host = row["host_seconds"]
        micro = [f"{1e6 * host[name][part]:.0f}" for name in host for part in ("first_layer", "other_layers")]
        waits = "; ".join(f"{name}: {found['profiler']}, {found['warned']} warned" for name, found in row["syncs"].items())
        spread = f"{min(row['ratios']):.3f}..{max(row['ratios']):.3f}"
        rows.append(
            (row["tokens"], row["fastest_other"], f"{row['ratio']:.4f} ({spread})", *micro, waits, f"{row['difference']:.1e}")
        )
    names = [f"{name} {part} us" for name in ("distca", "plain") for part in ("first layer", "others")]
    head = ("tokens", "beside", "step ratio", *names, "waits in a step", "outputs differ by")
    return ["## A stack of layers, world of one", "", *table(head, rows)]


def ranks(data: Figures) -> list[str]:
    rows = []
    for count, found in data.get("ranks", {}).items():
        for dtype, by_rank in found["dtypes"].items():
            for mode in by_rank[0]:
                worst = [max(row[mode][name] for row in by_rank) for name in ("output", "gradients")]
                good = "" if mode == "sdpa" else all(row[mode]["passed"] for row in by_rank)
                exchanges = by_rank[0][mode].get("exchanges", "")
                rows.append((count, dtype.removeprefix("torch."), mode, *(f"{x:.1e}" for x in worst), exchanges, good))
        if found["failed"]:
            rows.append((count, "", "failed", found["failed"][-200:].replace("\n", " "), "", "", False))
    text = ["## A world of one", "", f"Exchanges with oneself: {data['world_of_one']}", ""] if "world_of_one" in data else []
    text += [
        "## Several ranks on one device",
        "",
        "Relative errors of the output and of the worst gradient to `sdpa` in float32.",
        "",
    ]
    return text + table(("ranks", "dtype", "mode", "output", "gradients", "exchanges", "passed"), rows)


def emulator(data: Figures) -> list[str]:
    rows = []
    for row in data.get("placements", []):
        cells = [
            f"{row['before'][d]['imbalance']:.3f} to {row['after'][d]['imbalance']:.3f}" for d in ("forward", "backward", "both")
        ]
        ends = [f"{row['before']['both']['slowest']:.3g} to {row['after']['both']['slowest']:.3g}"]
        ends += [f"{row['slowest_after_to_before']:.3f}", f"{row['total_after_to_before']:.3f}"]
        rows.append((row["placement"], row["model"], row["ranks"], *cells, *ends))
    head = ("placement", "model", "ranks", "forward", "backward", "both", "slowest rank, s", "ratio", "ratio of all ranks' work")
    text = [
        "## Emulated ranks",
        "",
        "Measured kernel seconds of a layer, slowest rank / mean, before and after; no messages.",
        "",
    ]
    text += table(head, rows)
    if rows and len(data["placements"][0]["before"]["both"]["seconds"]) <= 8:
        for row in data["placements"]:
            for when in ("before", "after"):
                parts = {d: [round(x, 3) for x in row[when][d]["seconds"]] for d in ("forward", "backward")}
                text.append(f"- {row['placement']}, {when}, seconds by rank: {parts}")
    return [*text, ""]


def profile(data: Figures) -> list[str]:
    rows = []
    for model, sets in data.get("errors", {}).items():
        for what, found in sets.items():
            cells = [f"{percent(found[d]['median'])}, {percent(found[d]['90%'])}" for d in ("forward", "backward")]
            rows.append((model, what, *cells))
    text = ["## Cost model", "", f"Size of relative errors, median and 90 %, {data.get('shape')}.", ""]
    text += table(("model", "on", "forward", "backward"), rows)
    for name, model in data.get("models", {}).items():
        read = json.loads(model)
        text.append(f"- {name}: forward {read['forward']}, backward {read['backward']}")
    rows = []
    for row in data.get("simulation", []):
        imbalance = f"{row['seconds_imbalance_before']:.3f} to {row['seconds_imbalance_after']:.3f}"
        before, after = row["slowest_seconds_before"], row["slowest_seconds_after"]
        sent = f"{row['max_sent_bytes'] / 2**20:.0f}"
        rows.append((row["placement"], row["model"], imbalance, f"{before:.4g} to {after:.4g}", f"{after / before:.3f}", sent))
    text += ["", "Plans made with the model fitted to batches, estimated by it; exchanges at its built-in rate:", ""]
    head = ("placement", "model", "slowest / mean", "slowest rank with exchange, s a layer", "ratio", "busiest sender, MiB")
    return text + table(head, rows)


def memory(data: Figures) -> list[str]:
    rows = []
    for row in data.get("rows", []):
        cells = [row[name][what] for what in ("kept_after_forward", "peak") for name in ("distca", "plain_varlen")]
        shown = (f"{cell / 2**20:.0f}" for cell in cells)
        rows.append((row["tokens"], row["checkpointing"], *shown, f"{row['peak_ratio']:.4f}"))
    head = ("tokens", "checkpointing", "kept, distca", "kept, plain", "peak, distca", "peak, plain", "ratio of peaks")
    return ["## Memory", "", "MiB above weights and inputs.", "", *table(head, rows)]


def overlap(data: Figures) -> list[str]:
    rows = []
    for row in data.get("rows", []):
        for way, found in row.items():
            if isinstance(found, dict):
                cells = (f"{found['without']:.4g}", f"{found['with']:.4g}", percent(found["hidden"]))
                rows.append((row["load"], f"{row['exchange_seconds']:.4g}", way, *cells))
    head = ("exchanges / compute", "s of exchanges", "layers", "s without", "s with", "hidden")
    text = ["## Artificial exchanges", "", f"Share that is hidden (goal in ping-pong: {percent(data.get('goal', 0.8))})."]
    difference = data.get("difference", float("nan"))
    return [*text, f"Outputs of whole layers and of ping-pong differ by {difference:.1e}.", "", *table(head, rows)]


PARTS: dict[str, Callable[[Figures], list[str]]] = {
    "parity": parity,
    "kernels": kernels,
    "stack": stack,
    "ranks": ranks,
    "emulator": emulator,
    "profile": profile,
    "memory": memory,
    "overlap": overlap,
}


def page(folder: Path, notes: Sequence[str]) -> str:
    run = json.loads((folder / "run.json").read_text())
    environment = run["environment"]
    name = environment.get("gpu", environment["processor"])
    text = [f"# Llama attention on {name}, {environment['date']}", "", *notes, *([""] if notes else [])]
    text += table(("", ""), list(environment.items()))
    text += ["Parts, each with the command that ran it:", ""]
    for part, record in run["parts"].items():
        text.append(f"- {part}: {record['status']} after {record['seconds']} s, `{record['command']}`")
    text.append("")
    for part, write in PARTS.items():
        path = folder / f"{part}.json"
        if part not in run["parts"] or not path.exists():
            continue
        data = json.loads(path.read_text())
        text += write(data)
        if data.get("left_out"):
            text += [f"Left out for time: {'; '.join(data['left_out'][:8])} ({len(data['left_out'])} in all).", ""]
        if "failed" in data:
            text += ["This part failed:", "", "```", *data["failed"].splitlines()[-4:], "```", ""]
    return "\n".join(text).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figures", type=Path, help="folder that run_all.py wrote")
    parser.add_argument("--output", type=Path, help="page to write (default: benchmarks/results/llama_HARDWARE_DATE.md)")
    parser.add_argument("--note", action="append", default=[], help="a line about the conditions, under the title")
    arguments = parser.parse_args()
    environment = json.loads((arguments.figures / "run.json").read_text())["environment"]
    hardware = re.sub(r"\W+", "-", environment.get("gpu", "cpu")).lower()
    output = arguments.output or RESULTS / f"llama_{hardware}_{environment['date']}.md"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page(arguments.figures, arguments.note), encoding="utf-8")
    print(output)
    fitted = arguments.figures / "cost_model.json"
    if fitted.exists():  # for DistCAConfig(cost_model=CostModel.from_json(...)) on the same hardware
        shipped = output.with_name(f"{output.stem}_cost_model.json")
        shipped.write_text(fitted.read_text())
        print(shipped)


if __name__ == "__main__":
    main()
