"""``hf-distca plan``: which rank computes which attention, for document lengths of your own."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hf_distca.config import DistCAConfig
from hf_distca.errors import DistCAError
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.load import summarize
from hf_distca.schedule.placement import read_placement

__all__ = ["CostName", "cost_model", "fail", "plan"]


class CostName(StrEnum):
    """Cost models by name."""

    pairs = "pairs"
    cpu = "cpu"
    cuda = "cuda"


def plan(
    placement: Annotated[Path, typer.Argument(help="JSON file with 'rank_segments' or 'lengths'.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the plan goes, as JSON.", show_default=False)],
    tolerance: Annotated[float, typer.Option(help="How far a rank may lie from the mean, as a fraction.")] = 0.01,
    min_gain: Annotated[float, typer.Option(help="Smallest gain for which anything is moved, as a fraction.")] = 0.02,
    tile: Annotated[int, typer.Option(help="Documents are cut at multiples of this.")] = 128,
    query_heads: Annotated[int, typer.Option(help="Query heads of a layer.")] = 32,
    key_value_heads: Annotated[int, typer.Option(help="Key/value heads of a layer.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Width of a head.")] = 128,
    window: Annotated[int | None, typer.Option(help="Keys that a position sees, of layers with a sliding window.")] = None,
    cost: Annotated[CostName, typer.Option(help="What is balanced: causal pairs, or seconds on a device.")] = CostName.pairs,
) -> None:
    """Plan which rank computes which attention, and write the plan as JSON.

    PLACEMENT holds {"rank_segments": [[[document, start, end], ...] per rank]}, where a row may go on with the document's
    length, or {"lengths": [[tokens of a document, ...] per rank]} where no document crosses ranks. The default shape is that
    of Llama-3-8B in bfloat16.
    """
    try:
        config = DistCAConfig(tolerance=tolerance, min_gain=min_gain, tile=tile)
        shape = AttentionShape(query_heads, key_value_heads, head_dim, head_dim, 2)
        model = replace(cost_model(shape, cost, tile), window=window)
        result = balance(read_placement(placement), model, config)
        output.write_text(result.to_json() + "\n", encoding="utf-8")
    except DistCAError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename or output}: {error.strerror or error}.")
    typer.echo(f"{'cost model':<26} {model.name}")
    if window is not None:
        # Without, the plan is for layers that see all: no document is longer than the window.
        typer.echo(f"{'sliding window':<26} {window} keys{'' if result.window else ', as long as any document'}")
    typer.echo(str(summarize(result, model)))


def cost_model(shape: AttentionShape, cost: CostName, tile: int) -> CostModel:
    """The built-in cost model of this name."""
    if cost is CostName.pairs:
        return CostModel.pairs(shape)
    return CostModel.analytic(shape, device_type=cost.value, tile=tile)


def fail(message: str) -> None:
    """Say what is wrong in one line and end."""
    typer.echo(f"hf-distca: {' '.join(message.split())}", err=True)
    raise typer.Exit(2)
