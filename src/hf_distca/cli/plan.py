"""``hf-distca plan``: which rank computes which attention, for document lengths of your own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_distca.cli.files import errors_in_one_line, fail, name_of, read, write
from hf_distca.cli.layer import CostName, Layer
from hf_distca.cli.options import taking
from hf_distca.cli.waiting import PLANNING, said_if_long

__all__ = ["plan"]


@taking(Layer)
def plan(
    layer: Layer,
    placement: Annotated[
        Path, typer.Argument(help="JSON file with 'rank_segments' or 'lengths'; - for standard input.", show_default=False)
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where the plan goes, as JSON; standard output if left out.")
    ] = None,
    tolerance: Annotated[float, typer.Option(help="How far a rank may lie from the mean, as a fraction.")] = 0.01,
    min_gain: Annotated[float, typer.Option(help="Smallest gain for which anything is moved, as a fraction.")] = 0.02,
    head_groups: Annotated[int, typer.Option(help="Most head groups of a long document; 1 plans all heads together.")] = 8,
    cost: Annotated[CostName, typer.Option(help="What is balanced: causal pairs, or seconds on a device.")] = CostName.pairs,
) -> None:
    """Plan which rank computes which attention, and write the plan as JSON.

    PLACEMENT holds {"rank_segments": [[[document, start, end], ...] per rank]}, where a row may go on with the document's
    length, or {"lengths": [[tokens of a document, ...] per rank]} where no document crosses ranks. The default shape is that
    of Llama-3-8B in bfloat16.
    """
    from hf_distca.config import DistCAConfig
    from hf_distca.schedule.balance import balance
    from hf_distca.schedule.placement import parse_placement
    from hf_distca.schedule.ranks import Ranks
    from hf_distca.schedule.summary import summarize

    with errors_in_one_line():
        config = DistCAConfig(tolerance=tolerance, min_gain=min_gain, tile=layer.tile, head_groups=head_groups)
        model = layer.cost_model(cost)
        with said_if_long(PLANNING):
            layout = parse_placement(read(placement), name_of(placement))
        if not layout.query_tokens.any():
            fail(f"{name_of(placement)} has no tokens: there is nothing to plan.")
        ranks = Ranks(per_node=layer.ranks_per_node)
        with said_if_long(PLANNING):
            result = balance(layout, model, config, ranks)
        lines = [f"{'cost model':<26} {model.name}"]
        if layer.window is not None:
            # Without, the plan is for layers that see all: no document is longer than the window.
            lines.append(f"{'sliding window':<26} {layer.window} keys{'' if result.window else ', as long as any document'}")
        lines.append(summarize(result, model, ranks).table(seconds=layer.measured is not None or cost is not CostName.pairs))
        write(result.to_json(), "\n".join(lines), output)
