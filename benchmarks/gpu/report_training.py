"""Sections of the page about training: a model, the Trainer, soak, faults, families."""

from __future__ import annotations

from report_layout import Figures, percent, table

_ERRORS = ("distca", "eager")


def model(data: Figures) -> list[str]:
    rows = []
    runs = data.get("runs", [])
    for run in runs:
        way = "on" if run["checkpointing"] else "off"
        if "failed" in run:
            rows.append((run["attention"], run["kernel"], way, run["failed"], "", "", "", "", ""))
            continue
        cells = (sum(run["documents"]), f"{run['seconds']:.3f}", f"{run['tokens_a_second']:.0f}")
        cells += (
            percent(run["mfu"]) if "mfu" in run else "",
            f"{run.get('peak_bytes', 0) / 2**30:.1f}",
        )
        rows.append((run["attention"], run["kernel"], way, *cells, f"{run['losses'][-1]:.5f}"))
    head = (
        "attention",
        "kernel",
        "checkpointing",
        "tokens",
        "s a step",
        "tokens a second",
        "MFU",
        "peak, GiB",
        "last loss",
    )
    text = ["## A model of 1.3 billion weights", "", *table(head, rows)]
    whole = [run for run in runs if run["checkpointing"] and "losses" in run]
    for run in whole[1:]:
        off = max(abs(a / b - 1) for a, b in zip(run["losses"], whole[0]["losses"], strict=True))
        text.append(
            f"- losses of {run['attention']} ({run['kernel']}) differ from"
            f" {whole[0]['attention']}'s by at most {off:.1e}"
        )
    if len(whole) > 2:
        pairs = zip(whole[-1]["losses"], whole[-2]["losses"], strict=True)
        text.append(
            "- losses of the two plain kernels differ by at most"
            f" {max(abs(a / b - 1) for a, b in pairs):.1e}"
        )
    return [*text, ""]


def trainer(data: Figures) -> list[str]:
    rows = []
    for name, case in data.get("cases", {}).items():
        if "losses" not in case:
            rows.append((name, case.get("failed") or case.get("left_out"), "", "", "", ""))
            continue
        off = case.get("off", {})
        cells = (
            (f"{off['losses']:.1e}", f"{off['gradient_norms']:.1e}", case["passed"])
            if off
            else ("", "", "")
        )
        row = case["last_row"]
        moved = (
            f"{row['distca/exchanged_mb_per_layer']:.1f}"
            if "distca/exchanged_mb_per_layer" in row
            else ""
        )
        rows.append((name, case["engine"], *cells, moved))
    text = [f"## The Trainer on two ranks over {data.get('backend', 'nccl')}", ""]
    text += [
        (
            "Largest relative difference to `sdpa` on the same ranks over all steps, in bf16"
            f" (bound {data.get('bound')})."
        ),
        "",
    ]
    return text + table(
        ("case", "engine", "losses", "gradient norms", "passed", "MB moved a layer"), rows
    )


def first_script(data: Figures) -> list[str]:
    rows = []
    for name, case in data.get("cases", {}).items():
        if "losses" in case:
            rows.append((name, f"{case['losses'][-1]:.5f}", f"{case.get('off', 0.0):.1e}"))
        else:
            rows.append((name, case["failed"], ""))
    text = [
        "## README's script",
        "",
        "Documents dealt to two ranks in bf16; losses of one process differ at most by a part"
        f" (bound {data.get('bound')}).",
        "",
    ]
    return text + table(("case", "last loss", "losses differ by"), rows)


def soak(data: Figures) -> list[str]:
    text = ["## Soak", "", "FSDP2 with prefetch and ping-pong, other documents in each step.", ""]
    if data.get("failed"):
        text += [f"Did not end: {data['failed']}", ""]
    if "steps" not in data:
        return text
    text.append(
        f"{data['steps']} of {data['wanted']} steps in {data['seconds']:.0f} s; outputs differ from"
        " those without balancing"
    )
    return [*text, f"by at most {data['off']:.1e} (bound {data['bound']}).", ""]


def transient(data: Figures) -> list[str]:
    rows = [
        (
            mode,
            ", ".join(f"{value / 2**20:.1f}" for value in found["transient"]),
            f"{sum(found['sent']) / 2**20:.0f}",
        )
        for mode, found in data.get("modes", {}).items()
    ]
    text = ["## Bounded exchanges", "", "MiB of a call beyond what it keeps, by rank, over NCCL."]
    if rows:
        text.append(
            f"{data['tokens']} tokens a rank, {data['heads']} heads of {data['width']}, one long"
            " document on rank 0."
        )
    return [*text, "", *table(("mode", "transient", "MiB sent"), rows)]


def faults(data: Figures) -> list[str]:
    rows = []
    for fault, found in data.get("faults", {}).items():
        rows.append(
            (
                fault,
                found.get("raised"),
                f"{found.get('seconds', float('nan')):.2f}",
                found.get("said", "")[:220],
            )
        )
    head = ("rank 1", "rank 0 raised", "s until then", "its message begins")
    return [
        "## Faults",
        "",
        *table(head, [[str(cell).replace("\n", " ") for cell in row] for row in rows]),
    ]


def families(data: Figures) -> list[str]:
    rows = data.get("rows", [])
    text = ["## Families of models", ""]
    text += [
        (
            f"{data.get('passed', 0)} of {len(rows)} within twice the error of transformers' own"
            " attention, in bfloat16."
        ),
        "",
    ]
    wrong = []
    for row in rows:
        if "failed" in row:
            wrong.append((row["family"], row["failed"], "", ""))
        elif not row["passed"]:
            names = ("distca", "eager", "sdpa")
            pairs = (
                f"{row[name]['logits']:.4f}, {row[name]['gradients']:.4f}" if name in row else ""
                for name in names
            )
            wrong.append((row["family"], *pairs))
    columns = ("family", *(f"{name}: logits, gradients" for name in ("distca", "eager", "sdpa")))
    return text + (table(columns, wrong) if wrong else [])


def hybrids(data: Figures) -> list[str]:
    rows = []
    for row in data.get("rows", []):
        if "failed" in row:
            rows.append((row["family"], row["failed"], "", "", ""))
            continue
        pairs = (f"{row[name]['logits']:.4f}, {row[name]['gradients']:.4f}" for name in _ERRORS)
        rows.append((row["family"], ", ".join(row["functions"]), *pairs, row["passed"]))
    columns = (f"{name}: logits, gradients" for name in _ERRORS)
    head = ("family", "functions of a package", *columns, "passed")
    text = "In bfloat16, packed under distca with packages, alone under eager without them."
    return ["## Hybrids with kernels of packages", "", text, "", *table(head, rows)]


def curves(data: Figures) -> list[str]:
    runs = data.get("runs", {})
    weights = next((run["weights"] for run in runs.values()), 0)
    text = ["## Three curves", ""]
    text += [
        (
            f"A model of {weights / 1e9:.2f} billion weights, documents of {data.get('documents')}"
            f" tokens a step, {data.get('steps')} steps in bfloat16; distca and plain varlen"
            f" attention with checkpointing, by the kernel {data.get('kernel')}, sdpa without."
        ),
        "",
        "![Losses, and how far they are apart](curves.png)",
        "",
    ]
    rows = []
    plain = {f"{data['plain']['attention']}, first steps": data["plain"]} if "plain" in data else {}
    for name, run in {**runs, **plain}.items():
        apart = data.get("apart", {}).get(name)
        cells = (
            [f"{apart[key]:.1e}" for key in ("first", "median", "largest")] if apart else [""] * 3
        )
        peak = f"{run['peak_bytes'] / 2**30:.1f}" if "peak_bytes" in run else ""
        losses = run["losses"]
        last = f"{losses[-1]:.4f}"
        rows.append(
            (name, len(losses), f"{losses[0]:.4f}", last, *cells, f"{run['seconds']:.3f}", peak)
        )
    away = ("first step", "median", "largest")
    head = ("attention", "steps", "first loss", "last loss", *(f"from sdpa, {x}" for x in away))
    return text + table((*head, "seconds a step", "peak, GiB"), rows)
