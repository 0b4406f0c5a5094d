"""A picture of the part "curves": losses of each training, and how far they are from sdpa's.

python benchmarks/gpu/curves_picture.py gpu_figures/curves.json --output gpu_figures/curves.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

COLOURS = {"sdpa": "#64748b", "sdpa, other order": "#1d4ed8", "distca": "#c2410c"}


def draw(figures: Path, output: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    runs = json.loads(figures.read_text())["runs"]
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), sharex=True)
    for name, colour in COLOURS.items():
        if name in runs:
            width = 4 if name == "sdpa" else 1.2
            above.plot(runs[name]["losses"], color=colour, linewidth=width, label=name)
        if name in runs and name != "sdpa":
            pairs = zip(runs[name]["losses"], runs["sdpa"]["losses"], strict=False)
            below.semilogy([abs(a - b) / b or None for a, b in pairs], color=colour, linewidth=1)
    above.set_ylabel("loss")
    above.legend(frameon=False)
    below.set_ylabel("relative difference from sdpa")
    below.set_xlabel("step")
    for axis in (above, below):
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(output, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figures", type=Path, help="curves.json of run_all.py")
    parser.add_argument(
        "--output", type=Path, default=Path("curves.png"), help="picture (default: %(default)s)"
    )
    arguments = parser.parse_args()
    draw(arguments.figures, arguments.output)
    print(arguments.output)


if __name__ == "__main__":
    main()
