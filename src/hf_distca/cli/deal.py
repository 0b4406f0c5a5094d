"""``hf-distca deal``: which rank gets which documents, for document lengths of your own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_distca.cli.plan import CostName, cost_model, fail
from hf_distca.config import DistCAConfig
from hf_distca.errors import DistCAError, LayoutError
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.deal import deal as deal_documents
from hf_distca.schedule.deal import deal_nano_batches, plan_dealt
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import summarize

__all__ = ["deal"]


def deal(
    lengths: Annotated[Path, typer.Argument(help="JSON file with a list of document lengths in tokens.", show_default=False)],
    ranks: Annotated[int, typer.Option(help="Ranks to deal to.", show_default=False)],
    tokens_per_rank: Annotated[int, typer.Option(help="Tokens of each rank.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the placement goes, as JSON.", show_default=False)],
    ranks_per_node: Annotated[int | None, typer.Option(help="Ranks of a node, which a document should not leave.")] = None,
    ping_pong: Annotated[bool, typer.Option("--ping-pong", help="Deal two nano-batches that share no document.")] = False,
    tile: Annotated[int, typer.Option(help="Documents are cut at multiples of this where tokens allow.")] = 128,
    query_heads: Annotated[int, typer.Option(help="Query heads of a layer.")] = 32,
    key_value_heads: Annotated[int, typer.Option(help="Key/value heads of a layer.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Width of a head.")] = 128,
    window: Annotated[int | None, typer.Option(help="Keys that a position sees, if all layers have a sliding window.")] = None,
    cost: Annotated[CostName, typer.Option(help="What is dealt by: causal pairs, or seconds on a device.")] = CostName.cuda,
) -> None:
    """Deal documents to ranks, with equal tokens and about equal attention, and write the placement as JSON.

    LENGTHS holds [tokens of a document, ...], RANKS times TOKENS_PER_RANK in all. The placement is what `hf-distca plan` reads;
    with --ping-pong it also holds "first_nano_batch", the tokens that each rank has in its first half. The default shape is
    that of Llama-3-8B in bfloat16.
    """
    try:
        shape = AttentionShape(query_heads, key_value_heads, head_dim, head_dim, 2)
        model = replace(cost_model(shape, cost, tile), window=window)
        config = DistCAConfig(tile=tile, ping_pong=ping_pong)
        options: dict[str, Any] = {"tile": tile, "ranks_per_node": ranks_per_node}
        layouts: tuple[Layout, ...]
        if ping_pong:
            layouts = deal_nano_batches(_read_lengths(lengths), ranks, tokens_per_rank, model, **options)
        else:
            layouts = (deal_documents(_read_lengths(lengths), ranks, tokens_per_rank, model, **options),)
        output.write_text(json.dumps(_placement(layouts), separators=(",", ":")) + "\n", encoding="utf-8")
    except DistCAError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename or output}: {error.strerror or error}.")
    typer.echo(f"{'cost model':<26} {model.name}")
    for number, layout in enumerate(layouts, 1):
        if ping_pong:
            typer.echo(f"{'nano-batch':<26} {number}")
        typer.echo(_summary(layout, model, config))


def _summary(layout: Layout, model: CostModel, config: DistCAConfig) -> str:
    tokens = layout.query_tokens
    equal = f"{tokens.max()} on each rank" if tokens.min() == tokens.max() else f"{tokens.min()} or {tokens.max()} on a rank"
    documents = len(set(layout.document.tolist()))
    lines = [f"{'tokens':<26} {equal}", f"{'documents':<26} {documents}, {len(layout.spanning)} of them on several ranks"]
    return "\n".join([*lines, str(summarize(plan_dealt(layout, model, config), model))])


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


def _read_lengths(path: Path) -> list[Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LayoutError(f"{path} is not JSON: {error}.") from error
    if not isinstance(data, list):
        raise LayoutError(f"{path} must hold a list of document lengths, it holds {type(data).__name__}.")
    wrong = next((value for value in data if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 2**63), None)
    if wrong is not None:
        raise LayoutError(f"{path}: {wrong!r} must be an integer.")
    return data
