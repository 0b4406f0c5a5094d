"""``hf-distca plan``: which rank computes which attention, for document lengths of your own."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_distca.cli.files import errors_in_one_line, fail, name_of, read, write

if TYPE_CHECKING:
    from hf_distca.schedule.cost import AttentionShape, CostModel

__all__ = ["CostName", "cost_model", "plan"]


class CostName(StrEnum):
    """Cost models by name."""

    pairs = "pairs"
    cpu = "cpu"
    cuda = "cuda"


def plan(
    placement: Annotated[
        Path, typer.Argument(help="JSON file with 'rank_segments' or 'lengths'; - for standard input.", show_default=False)
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where the plan goes, as JSON; standard output if left out.")
    ] = None,
    tolerance: Annotated[float, typer.Option(help="How far a rank may lie from the mean, as a fraction.")] = 0.01,
    min_gain: Annotated[float, typer.Option(help="Smallest gain for which anything is moved, as a fraction.")] = 0.02,
    tile: Annotated[int, typer.Option(help="Documents are cut at multiples of this.")] = 128,
    query_heads: Annotated[int, typer.Option(help="Query heads of a layer.")] = 32,
    key_value_heads: Annotated[int, typer.Option(help="Key/value heads of a layer.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Width of a head.")] = 128,
    window: Annotated[int | None, typer.Option(help="Keys that a position sees, of layers with a sliding window.")] = None,
    cost: Annotated[CostName, typer.Option(help="What is balanced: causal pairs, or seconds on a device.")] = CostName.pairs,
    measured: Annotated[
        str | None,
        typer.Option("--cost-model", help="Profile to use for seconds instead: a file, or a shipped one.", show_default=False),
    ] = None,
) -> None:
    """Plan which rank computes which attention, and write the plan as JSON.

    PLACEMENT holds {"rank_segments": [[[document, start, end], ...] per rank]}, where a row may go on with the document's
    length, or {"lengths": [[tokens of a document, ...] per rank]} where no document crosses ranks. The default shape is that
    of Llama-3-8B in bfloat16.
    """
    from dataclasses import replace

    from hf_distca.config import DistCAConfig
    from hf_distca.schedule.balance import balance
    from hf_distca.schedule.cost import AttentionShape
    from hf_distca.schedule.load import summarize
    from hf_distca.schedule.placement import parse_placement

    with errors_in_one_line():
        config = DistCAConfig(tolerance=tolerance, min_gain=min_gain, tile=tile)
        shape = AttentionShape(query_heads, key_value_heads, head_dim, head_dim, 2)
        model = replace(cost_model(shape, cost, tile, measured), window=window)
        layout = parse_placement(read(placement), name_of(placement))
        if not layout.query_tokens.any():
            fail(f"{name_of(placement)} has no tokens: there is nothing to plan.")
        result = balance(layout, model, config)
        lines = [f"{'cost model':<26} {model.name}"]
        if window is not None:
            # Without, the plan is for layers that see all: no document is longer than the window.
            lines.append(f"{'sliding window':<26} {window} keys{'' if result.window else ', as long as any document'}")
        lines.append(summarize(result, model).table(seconds=measured is not None or cost is not CostName.pairs))
        write(result.to_json(), "\n".join(lines), output)


def cost_model(shape: AttentionShape, cost: CostName, tile: int, measured: str | None = None) -> CostModel:
    """The cost model of a measured profile, or else the built-in one of this name."""
    from hf_distca.schedule.cost import CostModel
    from hf_distca.schedule.profiles import Profile

    if measured is not None:
        return Profile.load(measured).cost_model(shape, tile=tile)

    if cost is CostName.pairs:
        return CostModel.pairs(shape)
    return CostModel.analytic(shape, device_type=cost.value, tile=tile)
