"""Sections of the page about kernels: parity, rates, emulated ranks, the cost model."""

from __future__ import annotations

import json

from report_layout import PEAK_FLOPS, Figures, percent, table, tera


def parity(data: Figures) -> list[str]:
    groups: dict[tuple[str, str, str], list[Figures]] = {}
    for case in data.get("cases", []):
        groups.setdefault(
            (case["kernel"], case["dtype"].removeprefix("torch."), case["scores"]), []
        ).append(case)
    rows = []
    for (kernel, dtype, scores), cases in groups.items():
        reason = next((case["unsupported"] for case in cases if "unsupported" in case), None)
        if reason:
            rows.append((kernel, dtype, scores, "", f"not supported: {reason}"))
            continue
        batches = [batch for case in cases for batch in case["batches"].values()]
        failed = [case["failed"] for case in cases if "failed" in case]
        worst = max(
            (error for batch in batches for error in batch["errors"].values()), default=float("nan")
        )
        good = sum(batch["passed"] for batch in batches)
        rows.append(
            (
                kernel,
                dtype,
                scores,
                f"{worst:.2g}",
                f"{good} of {len(batches)}" + "".join(f"; {e}" for e in failed[:1]),
            )
        )
    widths = sorted({case["heads"][2] for case in data.get("cases", [])})
    models = []
    for case in data.get("models", []):
        found = [error for batch in case["batches"].values() for error in batch["errors"].values()]
        good = sum(batch["passed"] for batch in case["batches"].values())
        said = case.get("unsupported") or case.get("failed") or f"{good} of {len(case['batches'])}"
        models.append(
            (
                case["kernel"],
                case["scores"],
                case["heads"],
                f"{max(found, default=float('nan')):.2g}",
                said,
            )
        )
    text = [
        "## Parity",
        "",
        (
            f"Head dims {widths}; norm of the difference to float32 over its norm, the largest of"
            " o, lse, dq, dk,"
        ),
    ]
    text += [
        "dv (and of the sinks' gradient); bound 2 units in the last place, 1e-5 in float32.",
        "",
    ]
    text += table(("kernel", "dtype", "scores", "largest error", "batches within bound"), rows)
    if models:
        text += table(
            ("kernel", "shape of", "heads, width", "largest error", "batches within bound"), models
        )
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
    text = ["## Kernels", ""]
    rows = []
    for row in data.get("whole", []):
        cells = [
            f"{tera(row[way])} ({percent(row[way] / PEAK_FLOPS)})"
            for way in ("forward", "backward")
        ]
        rows.append((row["kernel"], row["length"], *cells))
    text += ["TFLOP/s of whole documents, and the share of 989 TFLOP/s.", ""]
    text += table(("kernel", "document", "forward", "backward"), rows)
    rows = []
    for row in data.get("orders", []):
        cells = [
            f"{tera(rates['forward'])} / {tera(rates['backward'])}"
            for rates in row["rates"].values()
        ]
        rows.append((row["kernel"], row["placement"], "+".join(map(str, row["tasks"])), *cells))
    if rows:
        text += [
            (
                "TFLOP/s of the server with the most tasks, forward / backward, by the order of"
                " tasks in a call."
            ),
            "",
        ]
        text += table(
            ("kernel", "placement", "tasks", "as planned", "longest first", "shortest first"), rows
        )
    text += [
        (
            "TFLOP/s of rebatched tasks of a plan beside whole documents of as many pairs (goal:"
            " 95 %)."
        ),
        "",
    ]
    rows = []
    for row in data.get("rebatched", []):
        cells = [
            f"{tera(row['rebatched'][d])} / {tera(row['whole'][d])} = {percent(row['ratio'][d])}"
            for d in row["ratio"]
        ]
        tasks = "+".join(map(str, row["tasks"]))
        rows.append(
            (
                row["kernel"],
                row["model"],
                row["placement"],
                row["rank"],
                tasks,
                row["document_length"],
                *cells,
            )
        )
    text += table(
        ("kernel", "model", "placement", "rank", "tasks", "document", "forward", "backward"), rows
    )
    text += slices(data)
    return text + [f"{name}: {data[name]}\n" for name in ("cudnn", "not_run") if name in data]


def slices(data: Figures) -> list[str]:
    """Curves of rates by the rows of a slice."""
    text: list[str] = []
    for curve in data.get("curves", []):
        whole = curve["whole"]
        text += [
            f"Slices, {curve['kernel']}, {curve['model']}: percent of one long document, which"
            " runs at "
        ]
        text[-1] += (
            f"{tera(whole['forward'])} forward and {tera(whole['backward'])} TFLOP/s backward."
            " Shortest slice at 95 %: "
        )
        text[-1] += (
            f"{curve['tile']['forward']} rows forward, {curve['tile']['backward']} backward."
        )
        alone = {row["rows"]: row for row in curve["alone"]}
        many = {row["rows"]: row for row in curve["many"]}
        rows = []
        for n, one in alone.items():
            cells = [percent(one[d] / whole[d]) for d in whole]
            rows.append(
                (
                    n,
                    *([percent(many[n][d] / whole[d]) for d in whole] if n in many else ["", ""]),
                    *cells,
                )
            )
        text += [
            "",
            *table(
                ("rows", "many, forward", "many, backward", "one, forward", "one, backward"), rows
            ),
        ]
    return text


def widths(data: Figures) -> list[str]:
    text = ["## Heads of gpt-oss and Gemma 3", "", "TFLOP/s of whole documents.", ""]
    rows = [
        (row["model"], row["kernel"], row["length"], tera(row["forward"]), tera(row["backward"]))
        for row in sorted(data.get("whole", []), key=lambda row: row["model"])
    ]
    text += table(("model", "kernel", "document", "forward", "backward"), rows)
    return text + slices(data)


def blocks(data: Figures) -> list[str]:
    text = ["## Blocks and shared prompts", ""]
    text += ["Milliseconds of one layer's attention, heads of Gemma 3 4B.", ""]
    ways = ("causal alone", "blocks", "sdpa with a mask")
    rows = [
        (
            row["kernel"],
            f"{row['images']} of {row['size']} in {row['tokens']}",
            *(milliseconds(row[way]) for way in ways),
            f"{max(row['apart']):.1e}",
        )
        for row in data.get("images", [])
    ]
    head = ("kernel", "images", *(f"{way}, forward + backward" for way in ways))
    text += table((*head, "worst difference from sdpa"), rows)
    rows = [
        (
            row["kernel"],
            f"{row['prompt']} + {len(row['answers'])} of {row['answers'][0]}",
            *(milliseconds(row[way]) for way in ("shared", "copies")),
        )
        for row in data.get("prompts", [])
    ]
    return text + table(("kernel", "prompt and answers", "shared", "copies of the prompt"), rows)


def milliseconds(seconds: dict[str, float]) -> str:
    return f"{1e3 * seconds['forward']:.2f} + {1e3 * seconds['backward']:.2f}"


def emulator(data: Figures) -> list[str]:
    rows = []
    for row in data.get("placements", []):
        cells = [
            f"{row['before'][d]['imbalance']:.3f} to {row['after'][d]['imbalance']:.3f}"
            for d in ("forward", "backward", "both")
        ]
        ends = [f"{row['before']['both']['slowest']:.3g} to {row['after']['both']['slowest']:.3g}"]
        ends += [f"{row['slowest_after_to_before']:.3f}", f"{row['total_after_to_before']:.3f}"]
        rows.append((row["placement"], row["model"], row["ranks"], *cells, *ends))
    head = (
        "placement",
        "model",
        "ranks",
        "forward",
        "backward",
        "both",
        "slowest rank, s",
        "ratio",
        "ratio of all ranks' work",
    )
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
                parts = {
                    d: [round(x, 3) for x in row[when][d]["seconds"]]
                    for d in ("forward", "backward")
                }
                text.append(f"- {row['placement']}, {when}, seconds by rank: {parts}")
    return [*text, ""]


def profile(data: Figures) -> list[str]:
    rows = []
    for model, sets in data.get("errors", {}).items():
        for what, found in sets.items():
            cells = [
                f"{percent(found[d]['median'])}, {percent(found[d]['90%'])}"
                for d in ("forward", "backward")
            ]
            rows.append((model, what, *cells))
    text = [
        "## Cost model",
        "",
        f"Size of relative errors, median and 90 %, {data.get('shape')}.",
        "",
    ]
    text += table(("model", "on", "forward", "backward"), rows)
    for name, model in data.get("models", {}).items():
        read = json.loads(model)
        text.append(f"- {name}: forward {read['forward']}, backward {read['backward']}")
    rows = []
    for row in data.get("simulation", []):
        imbalance = f"{row['seconds_imbalance_before']:.3f} to {row['seconds_imbalance_after']:.3f}"
        before, after = row["slowest_seconds_before"], row["slowest_seconds_after"]
        sent = f"{row['max_sent_bytes'] / 2**20:.0f}"
        rows.append(
            (
                row["placement"],
                row["model"],
                imbalance,
                f"{before:.4g} to {after:.4g}",
                f"{after / before:.3f}",
                sent,
            )
        )
    text += [
        "",
        (
            "Plans made with the model fitted to batches, estimated by it; exchanges at its"
            " built-in rate:"
        ),
        "",
    ]
    head = (
        "placement",
        "model",
        "slowest / mean",
        "slowest rank with exchange, s a layer",
        "ratio",
        "busiest sender, MiB",
    )
    return text + table(head, rows)


def variants(data: Figures) -> list[str]:
    text = ["## Compiled ahead", ""]
    for name, kind in data.get("kinds", {}).items():
        text.append(
            f"- {name}: compiled or loaded in {kind['compile_seconds']:.1f} s before the first"
            f" step; {kind['late_compiles']} compiles in {kind['layouts']} calls of other layouts"
        )
    rows = []
    for row in data.get("gaps", []):
        ways = (row["as sequences"], row["gathered copies"])
        cells = [f"{1e3 * way[name]:.2f}" for name in ("forward", "backward") for way in ways]
        both = [way["forward"] + way["backward"] for way in ways]
        rows.append((row["kernel"], row["documents"], *cells, f"{both[1] / both[0]:.2f}"))
    if rows:
        text += [
            "",
            "Batches with gaps, ms: gaps as sequences without keys, and gathered copies.",
            "",
        ]
        head = (
            "kernel",
            "documents",
            "forward",
            "with copies",
            "backward",
            "with copies",
            "times faster",
        )
        text += table(head, rows)
    return [*text, ""]
