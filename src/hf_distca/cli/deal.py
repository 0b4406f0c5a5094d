"""``hf-distca deal``: which rank gets which documents, for document lengths of your own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_distca.cli.files import errors_in_one_line, write
from hf_distca.cli.layer import CostName, Layer
from hf_distca.cli.lengths import read_lengths
from hf_distca.cli.options import taking
from hf_distca.cli.waiting import PLANNING, said_if_long

if TYPE_CHECKING:
    from hf_distca.config import DistCAConfig
    from hf_distca.schedule.cost import CostModel
    from hf_distca.schedule.layout import Layout

__all__ = ["deal"]

_MOST_RANKS = 65536


@taking(Layer)
def deal(
    layer: Layer,
    lengths: Annotated[
        Path, typer.Argument(help="JSON file with a list of lengths in tokens; - for standard input.", show_default=False)
    ],
    ranks: Annotated[int, typer.Option(help="Ranks to deal to, 1 to 65536.", show_default=False)],
    tokens_per_rank: Annotated[int, typer.Option(help="Tokens of each rank.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where the placement goes, as JSON; standard output if left out.")
    ] = None,
    ping_pong: Annotated[bool, typer.Option("--ping-pong", help="Deal two nano-batches that share no document.")] = False,
    cost: Annotated[CostName, typer.Option(help="What is dealt by: causal pairs, or seconds on a device.")] = CostName.cuda,
) -> None:
    """Deal documents to ranks, with equal tokens and about equal attention, and write the placement as JSON.

    LENGTHS holds [tokens of a document, ...], RANKS times TOKENS_PER_RANK in all. The placement is what `hf-distca plan` reads;
    with --ping-pong it also holds "first_nano_batch", the tokens that each rank has in its first half. The default shape is
    that of Llama-3-8B in bfloat16.
    """
    from hf_distca.config import DistCAConfig
    from hf_distca.errors import ConfigError
    from hf_distca.schedule.deal import deal as deal_documents
    from hf_distca.schedule.deal import deal_nano_batches

    with errors_in_one_line():
        if not 1 <= ranks <= _MOST_RANKS:
            raise ConfigError(f"ranks={ranks} must be a whole number from 1 to {_MOST_RANKS}.")
        model = layer.cost_model(cost)
        config = DistCAConfig(tile=layer.tile, ping_pong=ping_pong)
        documents = read_lengths(lengths)
        options: dict[str, Any] = {"tile": layer.tile, "ranks_per_node": layer.ranks_per_node}
        layouts: tuple[Layout, ...]
        with said_if_long(PLANNING):
            if ping_pong:
                layouts = deal_nano_batches(documents, ranks, tokens_per_rank, model, **options)
            else:
                layouts = (deal_documents(documents, ranks, tokens_per_rank, model, **options),)
            lines = [f"{'cost model':<26} {model.name}"]
            for number, layout in enumerate(layouts, 1):
                if ping_pong:
                    lines.append(f"{'nano-batch':<26} {number}")
                lines.append(_summary(layout, model, config, layer.ranks_per_node))
        write(json.dumps(_placement(layouts), separators=(",", ":")), "\n".join(lines), output)


def _summary(layout: Layout, model: CostModel, config: DistCAConfig, ranks_per_node: int | None) -> str:
    from hf_distca.schedule.balance import balance
    from hf_distca.schedule.ranks import Ranks
    from hf_distca.schedule.summary import summarize

    ranks = Ranks(per_node=ranks_per_node)
    tokens = layout.query_tokens
    equal = f"{tokens.max()} on each rank" if tokens.min() == tokens.max() else f"{tokens.min()} or {tokens.max()} on a rank"
    documents = len(set(layout.document.tolist()))
    lines = [f"{'tokens':<26} {equal}", f"{'documents':<26} {documents}, {len(layout.spanning)} of them on several ranks"]
    return "\n".join([*lines, str(summarize(balance(layout, model, config, ranks), model, ranks))])


def _placement(layouts: tuple[Layout, ...]) -> dict[str, Any]:
    """The rows of a rank, those of its first nano-batch first."""
    ends: dict[int, int] = {}
    for layout in layouts:
        for document, end in zip(layout.document.tolist(), layout.end.tolist(), strict=True):
            ends[document] = max(ends.get(document, 0), end)
    ranks = range(layouts[0].world_size)
    rows = [[[s.document, s.start, s.end, ends[s.document]] for layout in layouts for s in layout.segments(r)] for r in ranks]
    placement: dict[str, Any] = {"rank_segments": rows}
    if len(layouts) > 1:
        placement["first_nano_batch"] = layouts[0].query_tokens.tolist()
    return placement
