"""A picture of the part "curves": losses of each training, and their distance from those of sdpa.

python benchmarks/gpu/curves_picture.py gpu_figures/curves.json --output gpu_figures/curves.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path


def draw(losses: Mapping[str, Sequence[float]], output: Path) -> None:
    """Draw losses by training; the others are compared with those of sdpa."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), sharex=True)
    for number, (name, curve) in enumerate(losses.items()):
        width = 4 if name == "sdpa" else 1.2
        above.plot(curve, color=f"C{number}", linewidth=width, label=name)
        if name != "sdpa":
            pairs = zip(curve, losses["sdpa"], strict=False)
            apart = [abs(a - b) / b or None for a, b in pairs]
            below.semilogy(apart, color=f"C{number}", linewidth=1)
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
    parser.add_argument("--output", type=Path, default=Path("curves.png"), help="picture to write")
    arguments = parser.parse_args()
    runs = json.loads(arguments.figures.read_text())["runs"]
    draw({name: run["losses"] for name, run in runs.items()}, arguments.output)
    print(arguments.output)


if __name__ == "__main__":
    main()
