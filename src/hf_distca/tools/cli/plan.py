"""``hf-distca plan``: assigns attention to ranks, and documents to ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_distca.errors import ConfigError
from hf_distca.tools.cli.files import (
    check_documents,
    exit_on_error,
    exit_with_error,
    get_input_name,
    read,
    write,
)
from hf_distca.tools.cli.lengths import read_lengths
from hf_distca.tools.cli.options import Layer, with_options

if TYPE_CHECKING:
    from hf_distca.config import DistCAConfig
    from hf_distca.schedule.cost import CostModel
    from hf_distca.schedule.layout import Layout
    from hf_distca.schedule.plan import Plan

_MOST_RANKS = 65536
_LONG_SECONDS = 1.0


@with_options(Layer)
@exit_on_error()
def plan(
    layer: Layer,
    documents: Annotated[
        Path,
        typer.Argument(
            help="JSON file with 'rank_segments' or 'lengths', or with --deal a list of lengths; -"
            " for standard input.",
            show_default=False,
        ),
    ],
    deal: Annotated[
        int | None,
        typer.Option(
            help="Deal documents to ranks of so many tokens, and write their placement.",
            show_default=False,
        ),
    ] = None,
    ping_pong: Annotated[
        bool, typer.Option("--ping-pong", help="Deal two nano-batches that share no document.")
    ] = False,
    tolerance: Annotated[
        float, typer.Option(help="How far a rank may lie from the mean, as a fraction.")
    ] = 0.01,
    min_gain: Annotated[
        float, typer.Option(help="Smallest gain for which anything is moved, as a fraction.")
    ] = 0.02,
    head_groups: Annotated[
        int, typer.Option(help="Most head groups of a long document; 1 plans all heads together.")
    ] = 8,
) -> None:
    """Plan which rank computes which attention, and write the plan as JSON.

    DOCUMENTS holds {"rank_segments": [[[document, start, end], ...] per rank]}, where a row may go
    on with the document's length, or {"lengths": [[tokens of a document, ...] per rank]} where no
    document crosses ranks. The default shape is that of Llama-3-8B in bfloat16.

    With --deal it holds [tokens of a document, ...], and what is written is a placement with equal
    tokens and about equal attention, which `hf-distca plan` reads; with --ping-pong it also holds
    "first_nano_batch", the tokens that each rank has in its first half.
    """
    from hf_distca.config import DistCAConfig

    if ping_pong and deal is None:
        raise ConfigError("--ping-pong divides documents that are dealt: give --deal TOKENS too.")
    config = DistCAConfig(
        tolerance=tolerance,
        min_gain=min_gain,
        tile=layer.tile,
        head_groups=head_groups,
        ping_pong=ping_pong,
    )
    model = layer.make_cost_model()
    lines = [f"{'cost model':<26} {model.name}"]
    with _announce_if_slow():
        if deal is None:
            layouts, written = [_read_layout(documents)], ""
        else:
            layouts, written = _deal_documents(documents, deal, layer, model, ping_pong)
        for number, layout in enumerate(layouts, 1):
            result, summary = _plan_layout(layer, layout, model, config)
            lines += [f"{'nano-batch':<26} {number}"] * ping_pong
            if deal is not None:
                lines += _describe_layout(layout)
            elif layer.window is not None:
                # If no document is longer than the window, the plan has none.
                lines.append(
                    f"{'sliding window':<26} {layer.window}"
                    f" keys{'' if result.window else ', as long as any document'}"
                )
            lines.append(summary)
    write(written or result.to_json(), "\n".join(lines), layer.output)


def deal() -> None:
    """Say that documents are dealt by `hf-distca plan`."""
    exit_with_error(
        "deal is an option of another verb now: hf-distca plan LENGTHS --deal TOKENS_PER_RANK, for"
        " as many ranks as these tokens need."
    )


def _read_layout(path: Path) -> Layout:
    """Read a placement."""
    from hf_distca.schedule.placement import parse_placement

    layout = parse_placement(read(path), get_input_name(path))
    check_documents(len(layout.document), path)
    if not layout.query_tokens.any():
        exit_with_error(f"{get_input_name(path)} has no tokens: there is nothing to plan.")
    return layout


def _deal_documents(
    path: Path, tokens: int, layer: Layer, model: CostModel, ping_pong: bool
) -> tuple[list[Layout], str]:
    """Deal the documents of a file; return the layouts and the placement."""
    from hf_distca.schedule import deal as dealing

    lengths = read_lengths(path)
    check_documents(len(lengths), path)
    ranks = max(sum(lengths) // max(tokens, 1), 1)
    if ranks > _MOST_RANKS:
        raise ConfigError(
            f"--deal {tokens}: {sum(lengths)} tokens would need {ranks} ranks, and at most"
            f" {_MOST_RANKS} are dealt to."
        )
    options: dict[str, Any] = {"tile": layer.tile, "ranks_per_node": layer.ranks_per_node}
    if ping_pong:
        layouts = [*dealing.deal_nano_batches(lengths, ranks, tokens, model, **options)]
    else:
        layouts = [dealing.deal(lengths, ranks, tokens, model, **options)]
    return layouts, json.dumps(_make_placement(layouts, lengths), separators=(",", ":"))


def _plan_layout(
    layer: Layer, layout: Layout, model: CostModel, config: DistCAConfig
) -> tuple[Plan, str]:
    """Plan a layout, and summarize the plan."""
    from hf_distca.schedule.balance import balance
    from hf_distca.schedule.load import format_summary, summarize_plan
    from hf_distca.schedule.ranks import Ranks

    ranks = Ranks(per_node=layer.ranks_per_node)
    planned = balance(layout, model, config, ranks)
    return planned, format_summary(summarize_plan(planned, model, ranks), seconds=layer.has_seconds)


def _describe_layout(layout: Layout) -> list[str]:
    """Describe a layout."""
    tokens = layout.query_tokens
    equal = (
        f"{tokens.max()} on each rank"
        if tokens.min() == tokens.max()
        else f"{tokens.min()} or {tokens.max()} on a rank"
    )
    documents = len(set(layout.document.tolist()))
    return [
        f"{'tokens':<26} {equal}",
        f"{'documents':<26} {documents}, {layout.has_many_ranks.sum()} of them on several ranks",
    ]


def _make_placement(layouts: list[Layout], lengths: list[int]) -> dict[str, Any]:
    """Return the rows of each rank, those of its first nano-batch first."""
    rows = [
        [
            [s.document, s.start, s.end, lengths[s.document]]
            for layout in layouts
            for s in layout.list_segments(rank)
        ]
        for rank in range(layouts[0].world_size)
    ]
    placement: dict[str, Any] = {"rank_segments": rows}
    if len(layouts) > 1:
        placement["first_nano_batch"] = layouts[0].query_tokens.tolist()
    return placement


@contextmanager
def _announce_if_slow() -> Iterator[None]:
    """Tell a terminal what a command is doing, once that has taken more than a second."""
    said = (
        "planning; the first time after an installation the loop of the scheduler is compiled,"
        " which takes some seconds ..."
    )
    timer = Timer(_LONG_SECONDS, print, [said], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
