"""``hf-distca plan``: which rank computes which attention, for document lengths of your own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_distca.cli.files import errors_in_one_line, fail, name_of, read, write
from hf_distca.cli.layer import (
    CostName,
    CostProfile,
    HeadDim,
    KeyValueHeads,
    LinkRate,
    NodeRate,
    QueryHeads,
    RanksPerLink,
    RanksPerNode,
    Window,
    cost_model,
    with_links,
)

__all__ = ["plan"]


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
    head_groups: Annotated[int, typer.Option(help="Most head groups of a long document; 1 plans all heads together.")] = 8,
    query_heads: QueryHeads = 32,
    key_value_heads: KeyValueHeads = 8,
    head_dim: HeadDim = 128,
    window: Window = None,
    cost: Annotated[CostName, typer.Option(help="What is balanced: causal pairs, or seconds on a device.")] = CostName.pairs,
    measured: CostProfile = None,
    ranks_per_node: RanksPerNode = None,
    link_gigabytes: LinkRate = None,
    node_gigabytes: NodeRate = None,
    ranks_per_link: RanksPerLink = 1,
) -> None:
    """Plan which rank computes which attention, and write the plan as JSON.

    PLACEMENT holds {"rank_segments": [[[document, start, end], ...] per rank]}, where a row may go on with the document's
    length, or {"lengths": [[tokens of a document, ...] per rank]} where no document crosses ranks. The default shape is that
    of Llama-3-8B in bfloat16.
    """
    from hf_distca.config import DistCAConfig
    from hf_distca.schedule.balance import balance
    from hf_distca.schedule.load import summarize
    from hf_distca.schedule.placement import parse_placement
    from hf_distca.schedule.ranks import Ranks

    with errors_in_one_line():
        config = DistCAConfig(tolerance=tolerance, min_gain=min_gain, tile=tile, head_groups=head_groups)
        model = cost_model(cost, query_heads, key_value_heads, head_dim, tile=tile, window=window, measured=measured)
        model = with_links(model, link_gigabytes, node_gigabytes, ranks_per_link)
        layout = parse_placement(read(placement), name_of(placement))
        if not layout.query_tokens.any():
            fail(f"{name_of(placement)} has no tokens: there is nothing to plan.")
        ranks = Ranks(per_node=ranks_per_node)
        result = balance(layout, model, config, ranks)
        lines = [f"{'cost model':<26} {model.name}"]
        if window is not None:
            # Without, the plan is for layers that see all: no document is longer than the window.
            lines.append(f"{'sliding window':<26} {window} keys{'' if result.window else ', as long as any document'}")
        lines.append(summarize(result, model, ranks).table(seconds=measured is not None or cost is not CostName.pairs))
        write(result.to_json(), "\n".join(lines), output)
