"""The report of eight GPUs, made from the recorded figures alone."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from eight_arms import ARMS
from eight_lengths import describe_lengths, read_lengths
from eight_predictions import PEAKS
from eight_rank import GRADIENT, LOSS

_WITHIN = 0.10  # largest difference from a predicted ratio
_CONTROL = 0.99


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def compute_median_seconds(row: dict[str, Any]) -> float | None:
    """Compute the median seconds over the steps of both turns."""
    taken = [value for turn in row.get("seconds", {}).values() for value in turn]
    return statistics.median(taken) if taken else None


def write_page(out: Path) -> Path:
    """Write `page.md`, and a picture if matplotlib is installed; return the path of the page."""
    manifest = read(out / "manifest.json")
    parts = [Figures(out, manifest, *pair) for pair in manifest["parts"]]
    lines = [*format_head(manifest), *format_lengths(manifest), *format_verdicts(parts)]
    for part in parts:
        lines += part.format_table()
    drawn = draw(parts, out / "page.png")
    if drawn:
        lines += ["", "![Measured and predicted steps](page.png)"]
    lines += ["", "## Topology", "", "```", manifest["topology"] or "no nvidia-smi", "```"]
    path = out / "page.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def format_head(manifest: dict[str, Any]) -> list[str]:
    """Return the lines with title, machine, versions and links."""
    cards = manifest["cards"]
    machine = f"{len(cards)} x {cards[0]}" if cards else manifest["processor"]
    names = ("torch", "transformers", "hf-distca", "flash-attn", "flash-attn-4", "ring-flash-attn")
    versions = ", ".join(f"{name} {manifest.get(name)}" for name in names)
    dry = " (dry run: no figure here says anything about a GPU)" if manifest["dry_run"] else ""
    links = [
        "all-to-all {all_to_all_gb_s:.3g}, to the next rank {to_next_gb_s:.3g}".format(**found)
        if "failed" not in found
        else f"failed: {found['failed'].splitlines()[-1]}"
        for found in manifest["links"]
    ]
    return [
        f"# {manifest['ranks']} ranks in one node{dry}",
        "",
        f"- Machine: {machine}; cuda {manifest['cuda']}, nccl {manifest['nccl']};"
        f" {manifest['date']}",
        f"- Commit: {manifest['commit']}; {versions}",
        f"- GB/s that a rank sends, before and after: {'; '.join(links)}",
        f"- MHz of the first card, lowest and highest in each part: {manifest['clocks'] or 'none'}",
        f"- {manifest['tokens']} tokens per rank and step, layers:"
        f" {manifest['layers'] or 'all'}; FSDP2, checkpointing, loss in chunks, AdamW with a rate"
        " of 0",
        f"- `{'`, `'.join(manifest['commands'])}`",
    ]


def format_lengths(manifest: dict[str, Any]) -> list[str]:
    """Return the lines with a histogram of each set of lengths."""
    lines = ["", "## Lengths", ""]
    for name in dict.fromkeys(lengths for _, lengths in manifest["parts"]):
        found = describe_lengths(read_lengths(name, shrink=manifest["shrink"]))
        lines += [
            f"**{name}**: {found['documents']} documents, {found['mean']:.0f} tokens on average,"
            f" the longest {found['longest']}; standard deviation of squares / their mean"
            f" {found['variation_of_squares']:.2f}",
            "",
            "```",
            *(
                f"{least:>7} to {2 * least - 1:<7} {count:4} documents {share:6.1%} of the tokens"
                f" {'#' * round(60 * share)}"
                for least, count, share in found["histogram"]
            ),
            "```",
            "",
        ]
    return lines


class Figures:
    """The figures of a part: predictions, rows and ratios."""

    def __init__(self, out: Path, manifest: dict[str, Any], model: str, lengths: str) -> None:
        self.model, self.lengths, self.manifest = model, lengths, manifest
        name = f"{model}--{lengths}"
        self.predicted = read(out / f"predictions--{name}.json")
        self.rows = read(out / f"{name}.json")
        self.base = next(
            (arm for arm in ("packed", "own") if compute_median_seconds(self.rows.get(arm, {}))),
            None,
        )

    def compute_ratio(self, arm: str) -> float | None:
        """Return the measured seconds relative to the base."""
        seconds = compute_median_seconds(self.rows.get(arm, {}))
        if seconds is None or self.base is None:
            return None
        base = compute_median_seconds(self.rows[self.base])
        return seconds / base if base else None

    def predict_ratio(self, arm: str) -> float | None:
        """Return the predicted seconds relative to the base."""
        found, base = (
            self.find_prediction(name).get("seconds") for name in (arm, self.base or "packed")
        )
        return found / base if found and base else None

    def find_prediction(self, arm: str) -> dict[str, float]:
        """Return the prediction for an arm."""
        return dict(self.predicted.get("arms", {}).get(arm, {}))

    def describe_bound(self) -> str:
        """Describe the share of attention in the base's step, and the shortest step that even
        attention would give.
        """
        found = self.find_prediction(self.base or "packed")
        if not found:
            return ""
        share = found["slowest"] / found["seconds"]
        least = 1 - (found["slowest"] - found["mean"]) / found["seconds"]
        return (
            f" Predicted: attention is {share:.0%} of the slowest rank's step; with equal attention"
            f" on all ranks and no exchange, a step would take {least:.2f} of that time, and less"
            " if recomputed attention is kept instead."
        )

    def format_table(self) -> list[str]:
        """Return the lines of the part."""
        weights = self.predicted.get("weights", 0) / 1e9
        columns = (
            *("", "losses differ by", "gradients", "seconds, both turns", "tokens/s a rank"),
            *("of the card's peak", "peak GB"),
            *("attention, slowest / mean: predicted", "measured, before → after"),
            *(
                f"relative to {ARMS[self.base].title if self.base else 'base'}",
                "predicted",
                "off by",
            ),
        )
        lines = [
            "",
            f"## {self.model}, {self.lengths}",
            "",
            f"{weights:.3g} billion weights; predicted {self.predicted.get('made')} UTC by the"
            f" rates of {self.predicted.get('rates')}, before the part ran. Parity: losses within"
            f" {LOSS:g}, gradients of queries' and keys' weights within {GRADIENT:g}."
            f"{self.describe_bound()}",
            "",
            f"| {' | '.join(columns)} |",
            f"|---|{'---:|' * (len(columns) - 1)}",
        ]
        return lines + [self.format_line(arm) for arm in ARMS if arm in self.manifest["arms"]]

    def format_line(self, arm: str) -> str:
        """Format the row of an arm: figures, or the reason why there are none."""
        row, title = self.rows.get(arm, {}), ARMS[arm].title
        title += f" ({row['attention']})" if arm == "packed" and "attention" in row else ""
        seconds, ratio = compute_median_seconds(row), self.compute_ratio(arm)
        cells = [title, *(_number(row.get(f"{name}_off"), ".0e") for name in _COMPARED)]
        reason = row.get("absent") or row.get("failed", "").strip().splitlines()[-1:]
        if reason or row.get("parity") is False or seconds is None:
            what = "not run: " if "absent" in row else "failed: " if reason else ""
            why = reason if isinstance(reason, str) else " ".join(reason)
            unequal = "not equal: no time is shown" if row.get("parity") is False else "no time yet"
            text = f"{what}{why}" if reason else unequal
            predicted = _number(self.predict_ratio(arm))
            return f"| {' | '.join(cells)} | {_clean(text)} | | | | | | | {predicted} | |"
        predicted, turns = self.predict_ratio(arm), row["seconds"].values()
        off = ratio - predicted if ratio and predicted else None
        spread = ", ".join(f"{statistics.median(turn):.3g}" for turn in turns)
        rate = self.manifest["tokens"] / seconds
        cells += [f"{seconds:.3g} ({spread})", f"{rate:,.0f}", self.format_share_of_peak(seconds)]
        figures = row.get("figures", {})
        cells.append(_number(figures.get("peak_gb")))
        expected = self.find_prediction(arm)
        cells.append(_number(expected["slowest"] / expected["mean"] if expected else None))
        measured = (figures.get(f"distca/imbalance_measured_{when}") for when in _WHEN)
        cells.append(" → ".join(_number(value) for value in measured if value is not None))
        cells += [_number(ratio), _number(predicted), _number(off, "+.2f")]
        return f"| {' | '.join(cells)} |"

    def format_share_of_peak(self, seconds: float) -> str:
        """Format the operations of a step, without recomputed ones, relative to the peak in the
        cards' data sheets.
        """
        cards = self.manifest["cards"]
        name = cards[0].lower() if cards else ""
        peak = next((rate for card, rate in PEAKS.items() if card in name), None)
        if not peak or "operations" not in self.predicted:
            return ""
        return f"{self.predicted['operations'] / seconds / peak / self.manifest['ranks']:.0%}"


_COMPARED, _WHEN = ("losses", "gradients"), ("before", "after")


def _number(value: float | None, form: str = ".2f") -> str:
    return "" if value is None else format(value, form)


def _clean(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")[:160]


def format_verdicts(parts: list[Figures]) -> list[str]:
    """Return the lines that compare predictions with measurements for each part."""
    lines = ["", "## Predicted and measured", ""]
    for part in parts:
        name = f"{part.model}, {part.lengths}"
        unequal = [arm for arm, row in part.rows.items() if row.get("parity") is False]
        equal = [arm for arm, row in part.rows.items() if row.get("parity")]
        said = f"{len(equal)} arms equal" + (
            f", not equal: {', '.join(unequal)}" if unequal else ""
        )
        off = [
            abs(ratio - predicted)
            for arm in part.rows
            if arm != part.base
            and (ratio := part.compute_ratio(arm)) is not None
            and (predicted := part.predict_ratio(arm)) is not None
        ]
        near = sum(difference <= _WITHIN for difference in off)
        said += f"; {near} of {len(off)} ratios within {_WITHIN:.2f} of their predictions"
        if part.lengths == "equal" and (control := part.compute_ratio("given")):
            said += f"; control: {1 / control:.3f} times as fast, at least {_CONTROL} expected"
        lines.append(f"- {name}: {said}")
    return lines


def draw(parts: list[Figures], path: Path) -> bool:
    """Draw measured ratios as bars and predicted ones as marks; return whether there were any."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return False
    measured = [part for part in parts if part.base]
    if not measured:
        return False
    figure, axes = plt.subplots(1, len(measured), figsize=(3.6 * len(measured), 3.6), squeeze=False)
    for axis, part in zip(axes[0], measured, strict=True):
        arms = [arm for arm in ARMS if part.compute_ratio(arm)][::-1]
        axis.barh(arms, [part.compute_ratio(arm) for arm in arms], color="#2f6fb0")
        told = [arm for arm in arms if part.predict_ratio(arm)]
        axis.plot([part.predict_ratio(arm) for arm in told], told, "|", color="#d1495b", ms=14)
        axis.set_title(f"{part.model}, {part.lengths}", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("step relative to packed attention; red: predicted", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True
