"""Draw what the simulator predicts: imbalance against ranks, speedup against context and against
ranks, idle share by strategy.

    python benchmarks/simulated/simulator_picture.py simulated.png

Llama-3-8B on H100, 64K tokens a rank or the whole context if that is longer, ProLong-like lengths,
FSDP, full checkpointing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from tqdm import tqdm

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

from hf_distca.advise.document_lengths import find_distribution
from hf_distca.schedule.load import compute_imbalance
from simulator.hardware import find_hardware
from simulator.model_shape import find_model
from simulator.predict import simulate
from simulator.setting import Setting
from simulator.strategies import STRATEGIES as KNOWN

mpl.use("Agg")
from matplotlib import pyplot as plt

from published_planner import PUBLISHED

K = 1024
COLORS = {
    "plain": "#9aa7b5",
    "lpt": "#e9b44c",
    "all-gather": "#b08ea2",
    "wlb": "#7fb069",
    "published": "#d1495b",
    "dealt": "#7fa7d1",
    "dealt-ping-pong": "#2f6fb0",
}
STRATEGIES = KNOWN | {PUBLISHED.name: PUBLISHED}
BALANCED = ("plain", "lpt", "published", "dealt")
COMPARED = ("lpt", "all-gather", "published", "dealt", "dealt-ping-pong")  # with WLB-LLM


def setting_of(ranks: int, tokens: int = 64 * K) -> Setting:
    return Setting(
        find_model("llama-3-8b"), find_hardware("h100"), ranks, tokens, checkpointing="full"
    )


def imbalances(ranks: int, context: int, batches: int) -> dict[str, float]:
    """Attention seconds of the slowest rank over the mean, means over batches."""
    setting, found = setting_of(ranks), {name: [] for name in BALANCED}  # type: dict[str, list[float]]
    for lengths in find_distribution("prolong", context).draw_batches(setting.tokens, batches):
        for name, values in found.items():
            values.append(
                compute_imbalance(
                    STRATEGIES[name]
                    .candidates(setting, [lengths])[0]
                    .works[0]
                    .attention.sum(axis=0)
                )
            )
    return {name: float(np.mean(values)) for name, values in found.items()}


def speedups(ranks: int, context: int, batches: int) -> dict[str, float]:
    """Seconds of WLB-LLM's step over those of others; the idle share of each is under its name and
    " idle".
    """
    setting = setting_of(ranks)
    strategies = [STRATEGIES[name] for name in ("wlb", *COMPARED)]
    found = {
        one.strategy: one
        for one in simulate(
            setting, find_distribution("prolong", context), strategies, batches=batches
        )
    }
    # What does not fit, or cuts documents so that attention is lost, is not drawn.
    ratios = {
        name: found["wlb"].step_seconds / found[name].step_seconds
        if found[name].comparable
        else np.nan
        for name in COMPARED
    }
    return ratios | {f"{name} idle": one.idle_share for name, one in found.items()}


def lines(
    axis: Any,
    at: Sequence[int],
    rows: list[dict[str, float]],
    names: Sequence[str],
    marks: Sequence[str],
) -> None:
    for name in names:
        values = [row[name] for row in rows]
        if np.isfinite(values).any():
            axis.plot(
                range(len(at)), values, marker="o", color=COLORS[name], label=STRATEGIES[name].title
            )
    axis.set_xticks(range(len(at)), marks)
    axis.grid(axis="y", color="#e3e7ec")
    axis.legend(frameon=False, fontsize=8)


def draw(
    path: Path, contexts: Sequence[int], many: Sequence[int], middle: int, batches: int
) -> None:
    bar = tqdm(total=2 * len(many) + len(contexts), file=sys.stderr)
    context = contexts[len(contexts) // 2] * K

    def told(values: dict[str, float]) -> dict[str, float]:
        bar.update()
        return values

    uneven = [told(imbalances(ranks, context, batches)) for ranks in many]
    by_context = [told(speedups(middle, length * K, batches)) for length in contexts]
    by_ranks = [told(speedups(ranks, context, batches)) for ranks in many]
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5))
    lines(axes[0, 0], many, uneven, BALANCED, [str(ranks) for ranks in many])
    axes[0, 0].set(
        title=f"imbalance of attention, documents to {context // K}K",
        xlabel="ranks",
        ylabel="slowest rank / mean",
    )
    axes[0, 0].set_yscale("log", base=2)
    axes[0, 0].yaxis.set_major_formatter("{x:g}")
    lines(axes[0, 1], contexts, by_context, COMPARED, [f"{length}K" for length in contexts])
    axes[0, 1].set(
        title=f"predicted speedup over WLB-LLM, {middle} ranks",
        xlabel="longest document",
        ylabel="times as fast",
    )
    lines(axes[1, 0], many, by_ranks, COMPARED, [str(ranks) for ranks in many])
    axes[1, 0].set(
        title=f"predicted speedup over WLB-LLM, documents to {context // K}K",
        xlabel="ranks",
        ylabel="times as fast",
    )
    row = by_context[contexts.index(context // K)]
    names = ("lpt", "all-gather", "wlb", "published", "dealt", "dealt-ping-pong")
    axes[1, 1].barh(
        [STRATEGIES[name].title for name in names],
        [100 * row[f"{name} idle"] for name in names],
        color="#2f6fb0",
    )
    axes[1, 1].invert_yaxis()
    axes[1, 1].set(
        title=f"idle share of a step, {middle} ranks, documents to {context // K}K",
        xlabel="% of the step, mean rank",
    )
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_fontsize(10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", type=Path, help="where the picture goes")
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        default=[64, 128, 256, 512],
        help="longest documents, in K tokens",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[8, 16, 32, 64, 128, 256, 512],
        help="ranks to sweep",
    )
    parser.add_argument("--middle", type=int, default=64, help="ranks where contexts are swept")
    parser.add_argument(
        "--batches", type=int, default=5, help="global batches of each point (default: %(default)s)"
    )
    arguments = parser.parse_args()
    draw(
        arguments.picture, arguments.contexts, arguments.ranks, arguments.middle, arguments.batches
    )


if __name__ == "__main__":
    main()
