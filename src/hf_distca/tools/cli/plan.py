"""``hf-distca plan``: plans which rank computes which attention, or deals documents to ranks."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
from hf_distca.tools.cli.options import read_rate, with_options

if TYPE_CHECKING:
    from hf_distca.config import DistCAConfig
    from hf_distca.schedule.cost import CostModel
    from hf_distca.schedule.layout import Layout
    from hf_distca.schedule.plan import Plan

_MOST_RANKS = 65536
_LIMIT = 2**31  # for the options below, whose products must fit into 64 bits
_LIMITED = (
    "tile",
    "query_heads",
    "key_value_heads",
    "head_dim",
    "window",
    "ranks_per_node",
    "ranks_per_link",
)
_MAY_COMPILE = (
    "planning; the first time after an installation the loop of the scheduler is compiled, which"
    " takes some seconds ..."
)


@dataclass(frozen=True, slots=True)
class Options:
    """Documents, an attention layer in bfloat16, and the devices and links that compute it."""

    documents: Annotated[
        Path,
        typer.Argument(
            help="JSON file with 'rank_segments' or 'lengths', or '-' for standard input. With"
            " --deal, a list of lengths.",
            show_default=False,
        ),
    ]
    cost: Annotated[
        Literal["pairs", "cpu", "cuda"],
        typer.Option(help="What is balanced: seconds on a device, or causal pairs."),
    ] = "cuda"
    tile: Annotated[
        int,
        typer.Option(help="Documents are cut at multiples of this many tokens if possible."),
    ] = 128
    query_heads: Annotated[int, typer.Option(help="Query heads of a layer.")] = 32
    key_value_heads: Annotated[int, typer.Option(help="Key/value heads of a layer.")] = 8
    head_dim: Annotated[int, typer.Option(help="Width of a head.")] = 128
    window: Annotated[
        int | None,
        typer.Option(help="Keys that a position sees, if all layers have a sliding window."),
    ] = None
    cost_file: Annotated[
        str | None,
        typer.Option(
            "--cost-model",
            help="JSON file with your own CostModel, used instead of --cost.",
            show_default=False,
        ),
    ] = None
    ranks_per_node: Annotated[
        int | None,
        typer.Option(help="Ranks per node. Links inside a node are faster.", show_default=False),
    ] = None
    link_gigabytes: Annotated[
        float | None,
        typer.Option(
            help="GB/s that a rank sends to other nodes.",
            show_default="from the cost model",
        ),
    ] = None
    node_gigabytes: Annotated[
        float | None,
        typer.Option(
            help="GB/s that a rank sends inside its node.",
            show_default="from the cost model",
        ),
    ] = None
    ranks_per_link: Annotated[
        int, typer.Option(help="Ranks of a node that share a link to other nodes.")
    ] = 1
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="File for the result, as JSON. By default, standard output."
        ),
    ] = None
    deal: Annotated[
        int | None,
        typer.Option(
            help="Deal documents, this many tokens to each rank, and write their placement.",
            show_default=False,
        ),
    ] = None
    ping_pong: Annotated[
        bool, typer.Option("--ping-pong", help="Deal two nano-batches that share no document.")
    ] = False
    tolerance: Annotated[
        float, typer.Option(help="How far a rank may lie from the mean, as a fraction.")
    ] = 0.01
    min_gain: Annotated[
        float, typer.Option(help="Smallest gain for which anything is moved, as a fraction.")
    ] = 0.02
    head_groups: Annotated[
        int, typer.Option(help="Into how many head groups a document may be split; 1 splits none.")
    ] = 4

    def make_cost_model(self) -> CostModel:
        """Make the cost model from the user's file or, without a file, the built-in cost model for
        `cost`. Rates of links come from the options if these are given.
        """
        from hf_distca.config import read_cost_model
        from hf_distca.schedule.cost import AttentionShape, CostModel

        for name in _LIMITED:
            if (getattr(self, name) or 0) >= _LIMIT:
                raise ConfigError(
                    f"--{name.replace('_', '-')} {getattr(self, name)}: the limit is 2**31."
                )
        shape = AttentionShape(
            self.query_heads, self.key_value_heads, self.head_dim, self.head_dim, 2
        )
        if self.cost_file is not None:
            model = replace(read_cost_model(self.cost_file), shape=shape, tile=self.tile)
        elif self.cost == "pairs":
            model = CostModel.make_of_pairs(shape)
        else:
            model = CostModel.make_analytic(shape, device_type=self.cost, tile=self.tile)
        link = read_rate("--link-gigabytes", self.link_gigabytes)
        node = read_rate("--node-gigabytes", self.node_gigabytes)
        return replace(
            model,
            window=self.window,
            ranks_per_link=self.ranks_per_link,
            exchange_bytes_per_second=link or model.exchange_bytes_per_second,
            node_bytes_per_second=node or model.node_bytes_per_second,
        )


@with_options(Options)
@exit_on_error()
def plan(options: Options) -> None:
    """Plan which rank computes which attention, and write the plan as JSON.

    DOCUMENTS holds {"rank_segments": [[[document, start, end], ...] per rank]}. A segment may have
    a fourth number, the length of the document. If no document crosses ranks, DOCUMENTS may hold
    {"lengths": [[length of a document, ...] per rank]} instead. The default layer is that of
    Llama-3-8B in bfloat16.

    With --deal, DOCUMENTS holds [length of a document, ...]. The result is a placement that
    `hf-distca plan` can read. Ranks get equal tokens and about equal attention. With --ping-pong,
    the placement also holds "first_nano_batch": for each rank, the number of tokens in its first
    nano-batch.
    """
    from hf_distca.config import DistCAConfig

    if options.ping_pong and options.deal is None:
        raise ConfigError("--ping-pong is an option of dealing: also give --deal TOKENS.")
    config = DistCAConfig(
        tolerance=options.tolerance,
        min_gain=options.min_gain,
        tile=options.tile,
        head_groups=options.head_groups,
    )
    model = options.make_cost_model()
    lines = [f"{'cost model':<26} {model.name}"]
    if sys.stderr.isatty():
        typer.echo(_MAY_COMPILE, err=True)
    if options.deal is None:
        layouts, written = [_read_layout(options.documents)], ""
    else:
        layouts, written = _deal_documents(options, options.deal, model)
    for number, layout in enumerate(layouts, 1):
        result, summary = _plan_layout(options, layout, model, config)
        lines += [f"{'nano-batch':<26} {number}"] * options.ping_pong
        if options.deal is not None:
            lines += _describe_layout(layout)
        elif options.window is not None:
            # If no document is longer than the window, the plan has no window.
            lines.append(
                f"{'sliding window':<26} {options.window}"
                f" keys{'' if result.window else ', as long as any document'}"
            )
        lines.append(summary)
    write(written or result.to_json(), "\n".join(lines), options.output)


def _read_layout(path: Path) -> Layout:
    from hf_distca.schedule.placement import parse_placement

    layout = parse_placement(read(path), get_input_name(path))
    check_documents(len(layout.document), path)
    if not layout.query_tokens.any():
        exit_with_error(f"{get_input_name(path)} has no tokens: there is nothing to plan.")
    return layout


def _deal_documents(options: Options, tokens: int, model: CostModel) -> tuple[list[Layout], str]:
    """Deal the documents of a file to ranks with `tokens` tokens each. Return the layouts of the
    nano-batches (or of the whole batch) and the placement as JSON.
    """
    from hf_distca.schedule import deal as dealing

    lengths = read_lengths(options.documents)
    check_documents(len(lengths), options.documents)
    ranks = max(sum(lengths) // max(tokens, 1), 1)
    if ranks > _MOST_RANKS:
        raise ConfigError(
            f"--deal {tokens}: {sum(lengths)} tokens would need {ranks} ranks, but the limit is"
            f" {_MOST_RANKS}."
        )
    by: dict[str, Any] = {"tile": options.tile, "ranks_per_node": options.ranks_per_node}
    if options.ping_pong:
        layouts = [*dealing.deal_nano_batches(lengths, ranks, tokens, model, **by)]
    else:
        layouts = [dealing.deal(lengths, ranks, tokens, model, **by)]
    return layouts, json.dumps(_make_placement(layouts, lengths), separators=(",", ":"))


def _plan_layout(
    options: Options, layout: Layout, model: CostModel, config: DistCAConfig
) -> tuple[Plan, str]:
    """Plan a layout, and summarize the plan."""
    from hf_distca.schedule.balance import balance
    from hf_distca.schedule.load import format_summary, summarize_plan
    from hf_distca.schedule.ranks import Ranks

    ranks = Ranks(per_node=options.ranks_per_node)
    planned = balance(layout, model, config, ranks)
    summary = summarize_plan(planned, model, ranks)
    has_seconds = options.cost_file is not None or options.cost != "pairs"
    return planned, format_summary(summary, seconds=has_seconds)


def _describe_layout(layout: Layout) -> list[str]:
    """Describe the tokens and documents of a layout in lines."""
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
    """Return the placement of documents: for each rank, its segments in order. Segments of the
    first nano-batch come first.
    """
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
