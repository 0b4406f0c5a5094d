"""The page of what eight GPUs showed, made from the figures alone."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from eight_arms import ARMS
from eight_lengths import describe_lengths, read_lengths
from eight_predictions import PEAKS
from eight_rank import GRADIENT, LOSS

_WITHIN = 0.10  # of a prediction's ratio
_CONTROL = 0.99


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def median_seconds(row: dict[str, Any]) -> float | None:
    """Median over the steps of both turns."""
    taken = [value for turn in row.get("seconds", {}).values() for value in turn]
    return statistics.median(taken) if taken else None


def write_page(out: Path) -> Path:
    """Write `page.md`, and a picture where matplotlib is installed; returns its path."""
    manifest = read(out / "manifest.json")
    parts = [Figures(out, manifest, *pair) for pair in manifest["parts"]]
    lines = [*head(manifest), *lengths_table(manifest), *verdicts(parts)]
    for part in parts:
        lines += part.table()
    drawn = draw(parts, out / "page.png")
    if drawn:
        lines += ["", "![Measured and predicted steps](page.png)"]
    lines += ["", "## Topology", "", "```", manifest["topology"] or "no nvidia-smi", "```"]
    path = out / "page.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def head(manifest: dict[str, Any]) -> list[str]:
    """Title, machine, versions and links."""
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
        f"- {manifest['tokens']} tokens of a rank in a step, layers:"
        f" {manifest['layers'] or 'all'}; FSDP2, checkpointing, loss in chunks, AdamW with a rate"
        " of 0",
        f"- `{'`, `'.join(manifest['commands'])}`",
    ]


def lengths_table(manifest: dict[str, Any]) -> list[str]:
    """Histograms of the sets of lengths."""
    lines = ["", "## Lengths", ""]
    for name in dict.fromkeys(lengths for _, lengths in manifest["parts"]):
        found = describe_lengths(read_lengths(name, shrink=manifest["shrink"]))
        lines += [
            f"**{name}**: {found['documents']} documents, {found['mean']:.0f} tokens in the mean,"
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
    """What is known of a part: predictions, rows and ratios."""

    def __init__(self, out: Path, manifest: dict[str, Any], model: str, lengths: str) -> None:
        self.model, self.lengths, self.manifest = model, lengths, manifest
        name = f"{model}--{lengths}"
        self.predicted = read(out / f"predictions--{name}.json")
        self.rows = read(out / f"{name}.json")
        self.base = next(
            (arm for arm in ("packed", "own") if median_seconds(self.rows.get(arm, {}))), None
        )

    def ratio(self, arm: str) -> float | None:
        """Measured seconds beside those of the base."""
        seconds = median_seconds(self.rows.get(arm, {}))
        if seconds is None or self.base is None:
            return None
        base = median_seconds(self.rows[self.base])
        return seconds / base if base else None

    def predicted_ratio(self, arm: str) -> float | None:
        """The same as it was predicted."""
        found, base = (self.expected(name).get("seconds") for name in (arm, self.base or "packed"))
        return found / base if found and base else None

    def expected(self, arm: str) -> dict[str, float]:
        """What was predicted of an arm."""
        return dict(self.predicted.get("arms", {}).get(arm, {}))

    def bound(self) -> str:
        """The share of attention in the base's step, and how far evening it out could get."""
        found = self.expected(self.base or "packed")
        if not found:
            return ""
        share = found["slowest"] / found["seconds"]
        least = 1 - (found["slowest"] - found["mean"]) / found["seconds"]
        return (
            f" Predicted: attention is {share:.0%} of the slowest rank's step; with equal attention"
            f" on all ranks and nothing exchanged, a step would take {least:.2f} of it, and less"
            " where a recomputed attention is kept."
        )

    def table(self) -> list[str]:
        """Lines of the part."""
        weights = self.predicted.get("weights", 0) / 1e9
        columns = (
            *("", "losses differ by", "gradients", "seconds, both turns", "tokens/s a rank"),
            *("of the card's peak", "peak GB"),
            *("attention, slowest / mean: predicted", "measured, in order → as run"),
            *(f"to {ARMS[self.base].title if self.base else 'it'}", "predicted", "off by"),
        )
        lines = [
            "",
            f"## {self.model}, {self.lengths}",
            "",
            f"{weights:.3g} billion weights; predicted {self.predicted.get('made')} UTC by the"
            f" rates of {self.predicted.get('rates')}, before the part ran. Parity: losses within"
            f" {LOSS:g}, gradients of queries' and keys' weights within {GRADIENT:g}."
            f"{self.bound()}",
            "",
            f"| {' | '.join(columns)} |",
            f"|---|{'---:|' * (len(columns) - 1)}",
        ]
        return lines + [self.line(arm) for arm in ARMS if arm in self.manifest["arms"]]

    def line(self, arm: str) -> str:
        """A row: figures, or why there are none."""
        row, title = self.rows.get(arm, {}), ARMS[arm].title
        title += f" ({row['attention']})" if arm == "packed" and "attention" in row else ""
        seconds, ratio = median_seconds(row), self.ratio(arm)
        cells = [title, *(_number(row.get(f"{name}_off"), ".0e") for name in _COMPARED)]
        reason = row.get("absent") or row.get("failed", "").strip().splitlines()[-1:]
        if reason or row.get("parity") is False or seconds is None:
            what = "not run: " if "absent" in row else "failed: " if reason else ""
            why = reason if isinstance(reason, str) else " ".join(reason)
            unequal = "not equal: no time is shown" if row.get("parity") is False else "no time yet"
            text = f"{what}{why}" if reason else unequal
            predicted = _number(self.predicted_ratio(arm))
            return f"| {' | '.join(cells)} | {_clean(text)} | | | | | | | {predicted} | |"
        predicted, turns = self.predicted_ratio(arm), row["seconds"].values()
        off = ratio - predicted if ratio and predicted else None
        spread = ", ".join(f"{statistics.median(turn):.3g}" for turn in turns)
        rate = self.manifest["tokens"] / seconds
        cells += [f"{seconds:.3g} ({spread})", f"{rate:,.0f}", self.share_of_peak(seconds)]
        figures = row.get("figures", {})
        cells.append(_number(figures.get("peak_gb")))
        expected = self.expected(arm)
        cells.append(_number(expected["slowest"] / expected["mean"] if expected else None))
        measured = (figures.get(f"distca/imbalance_measured_{when}") for when in _WHEN)
        cells.append(" → ".join(_number(value) for value in measured if value is not None))
        cells += [_number(ratio), _number(predicted), _number(off, "+.2f")]
        return f"| {' | '.join(cells)} |"

    def share_of_peak(self, seconds: float) -> str:
        """Operations of a step, checkpointing's left out, by those of the cards' data sheets."""
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


def verdicts(parts: list[Figures]) -> list[str]:
    """What was to be shown, and whether it was."""
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
            and (ratio := part.ratio(arm)) is not None
            and (predicted := part.predicted_ratio(arm)) is not None
        ]
        near = sum(difference <= _WITHIN for difference in off)
        said += f"; {near} of {len(off)} ratios within {_WITHIN:.2f} of their predictions"
        if part.lengths == "equal" and (control := part.ratio("given")):
            said += f"; control: {1 / control:.3f} times as fast, at least {_CONTROL} wanted"
        lines.append(f"- {name}: {said}")
    return lines


def draw(parts: list[Figures], path: Path) -> bool:
    """Draw measured ratios as bars, predicted ones as marks; whether there was something."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return False
    measured = [part for part in parts if part.base]
    if not measured:
        return False
    figure, axes = plt.subplots(1, len(measured), figsize=(3.6 * len(measured), 3.6), squeeze=False)
    for axis, part in zip(axes[0], measured, strict=True):
        arms = [arm for arm in ARMS if part.ratio(arm)][::-1]
        axis.barh(arms, [part.ratio(arm) for arm in arms], color="#2f6fb0")
        told = [arm for arm in arms if part.predicted_ratio(arm)]
        axis.plot([part.predicted_ratio(arm) for arm in told], told, "|", color="#d1495b", ms=14)
        axis.set_title(f"{part.model}, {part.lengths}", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("step to that of packed attention; red: predicted", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True
