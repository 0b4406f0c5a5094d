"""The cost of documents that are cut in recurrent layers: bytes of states between ranks, and time
of segments.

    python benchmarks/schedule/recurrent.py --placements benchmarks/placements --json out.json

Bytes are counted, not sent. Each document of a placement lies across ranks in order, or is cut head
and tail by `deal`. Layers are those of Qwen3-Next (gated delta rule) and Nemotron-H-8B (Mamba 2),
with float32 states. For Qwen3-Next the table also has the time of the slowest rank in an attention
layer, alone and with the states of three recurrent layers, at the built-in rates of a GPU.

Times are processor times of forward and backward on one core of this machine, with the functions of
transformers: a document in several segments, compared with as many documents of a segment's length.
Exits with status 1 if a rank sends more than the limits.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import normalize
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

from hf_distca.config import DistCAConfig
from hf_distca.hybrids.delta_rule import DeltaInputs, compute_gated_delta_rule, run_by_document
from hf_distca.hybrids.segments import RowNeeds, Segments
from hf_distca.hybrids.state_space import ScanInputs, compute_mamba2, scan_by_document
from hf_distca.runtime.group import AttentionGroup
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.deal import deal, deal_in_order
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.placement import read_placement
from placed import add_placements
from script import add_option, end, make_parser, output_result, print_table

# The shape of attention layers of Qwen3-Next, for which documents are dealt.
COST = CostModel.make_analytic(AttentionShape(16, 2, 256, 256, 2), device_type="cuda")
# Bytes of each layer's bias, transition, and row of the convolution (three rows are needed).
LAYERS = {
    "Qwen3-Next": {
        "bias": 32 * 128 * 128 * 4,
        "transition": 32 * 128 * 128 * 4,
        "row": (2 * 16 + 32) * 128 * 2,
    },
    "Nemotron-H": {
        "bias": 128 * 64 * 128 * 4,
        "transition": 128 * 4,
        "row": (128 * 64 + 2 * 8 * 128) * 2,
    },
}
RECURRENT_LAYERS = 3  # for each layer of attention
# Most bytes of the busiest rank, forward and backward. In order, it has the rest of one document
# and the head of another.
LIMITS = {"head and tail": 400e6, "in order": 10e6}
TIMED = ("gated delta rule", "delta rule by channel", "mamba2")


def count_sent_bytes(needed: RowNeeds, row: int) -> int:
    """Count the bytes that a rank sends, forward and backward, for rows of `row` bytes."""
    return row * (len(needed.rows.runs) + sum(needed.rows.receive.values()))


def count_bytes(layout: Layout) -> dict[str, Any]:
    """Count the bytes that ranks send per layer, forward and backward, on average and on the
    busiest rank, and the cut documents.
    """
    ranks = tuple(range(layout.world_size))
    segments = [Segments.from_layout(layout, AttentionGroup(ranks, rank)) for rank in ranks]
    figures: dict[str, Any] = {
        "cut_documents": int((np.bincount(layout.place) > 1).sum()),
        "segments_of_the_most_cut": int(np.bincount(layout.place).max()),
        "attention_seconds": float(
            PlanLoad(balance(layout, COST, DistCAConfig()), COST).slowest_seconds
        ),
    }
    for name, layer in LAYERS.items():
        states = [
            count_sent_bytes(s.summaries, layer["bias"])
            + count_sent_bytes(s.transitions, layer["transition"])
            for s in segments
        ]
        halos = [count_sent_bytes(s.find_halo(3), layer["row"]) for s in segments]
        figures[name] = {
            "mean": statistics.mean(states),
            "most": max(states),
            "most_of_convolution": max(halos),
        }
    exchange = RECURRENT_LAYERS * figures["Qwen3-Next"]["most"] / COST.exchange_bytes_per_second
    figures["seconds_with_states"] = figures["attention_seconds"] + exchange
    return figures


def count_placements(folder: Path) -> dict[str, Any]:
    """Count the bytes for the documents of each placement, shuffled, head and tail and in order."""
    figures = {}
    for file in sorted(folder.glob("*.json")):
        given = read_placement(file)
        lengths = np.random.default_rng(0).permutation(
            np.bincount(given.place, weights=given.length).astype(np.int64)
        )
        tokens = [int(count) for count in given.query_tokens]
        figures[file.stem] = {
            "head and tail": count_bytes(deal(lengths, given.world_size, tokens, COST)),
            "in order": count_bytes(deal_in_order(lengths, given.world_size, tokens)),
        }
    return figures


def make_delta_layer(
    heads: int, tokens: int, *, by_channel: bool
) -> Callable[[Segments], torch.Tensor]:
    """Make a gated delta rule with keys and values of 128."""
    query, key = (
        normalize(torch.randn(1, tokens, heads, 128), dim=-1).requires_grad_() for _ in range(2)
    )
    value = torch.randn(1, tokens, heads, 128, requires_grad=True)
    decay = (-0.1 * torch.rand(1, tokens, heads, *((128,) if by_channel else ()))).requires_grad_()
    beta = torch.rand(1, tokens, heads, requires_grad=True)
    rule = run_by_document(
        chunk_kimi_delta_attention if by_channel else torch_chunk_gated_delta_rule
    )
    return lambda segments: compute_gated_delta_rule(
        DeltaInputs(query, key, value, decay, beta), segments, rule
    )


def make_scan_layer(heads: int, tokens: int) -> Callable[[Segments], torch.Tensor]:
    """Make a layer of Mamba 2 with heads of 64 and states of 128."""
    x, dt = (
        torch.randn(1, tokens, heads, 64, requires_grad=True),
        (0.1 * torch.rand(1, tokens, heads)).requires_grad_(),
    )
    projections = [torch.randn(1, tokens, 1, 128, requires_grad=True) for _ in range(2)]
    scan = scan_by_document(
        lambda *inputs, **options: mamba2_chunk_scan(*inputs, chunk_size=128, **options)
    )
    return lambda segments: compute_mamba2(
        ScanInputs(x, dt, -torch.rand(heads), *projections), segments, scan
    )


def make_segments(count: int, tokens: int) -> Segments:
    """Put one document in `count` segments, with documents of one token between them."""
    rows = [
        row for number in range(count) for row in ((0, number * tokens, tokens), (number + 1, 0, 1))
    ]
    return Segments.from_layout(Layout.from_segments([rows]), AttentionGroup())


def time_layer(layer: Callable[[Segments], torch.Tensor], segments: Segments, rounds: int) -> float:
    """Time forward and backward, and return the least seconds of all rounds."""
    seconds = []
    for _ in range(rounds):
        begin = time.process_time()
        layer(segments).sum().backward()
        seconds.append(time.process_time() - begin)
    return min(seconds)


def time_segments(options: argparse.Namespace) -> dict[str, Any]:
    """Time a document in 2 and in 8 segments, relative to as many documents."""
    torch.manual_seed(0)
    figures: dict[str, Any] = {}
    for name in TIMED:
        figures[name] = {}
        for count in (2, 8):
            tokens = count * (options.tokens + 1)
            by_channel = "channel" in name
            layer = (
                make_scan_layer(options.heads, tokens)
                if name == "mamba2"
                else make_delta_layer(options.heads, tokens, by_channel=by_channel)
            )
            whole = Segments.from_lengths([options.tokens, 1] * count)
            time_layer(layer, whole, 1)
            before, after = (
                time_layer(layer, segments, options.rounds)
                for segments in (whole, make_segments(count, options.tokens))
            )
            figures[name][count] = {
                "documents_seconds": before,
                "segments_seconds": after,
                "ratio": after / before,
            }
    return figures


def show(result: dict[str, Any]) -> None:
    rows = []
    for placement, ways in result["bytes"].items():
        for way, figures in ways.items():
            cut = [str(figures[name]) for name in ("cut_documents", "segments_of_the_most_cut")]
            for layer in LAYERS:
                names = "mean", "most", "most_of_convolution"
                row = [f"{figures[layer][name] / 1e6:.2f}" for name in names]
                if layer == "Qwen3-Next":
                    names = "attention_seconds", "seconds_with_states"
                    row += [f"{1e3 * figures[name]:.1f}" for name in names]
                else:
                    row += ["", ""]
                rows.append((placement, way, layer, *cut, *row))
    columns = ["placement", "layout", "layer", "cut", "most segments", "MB a rank, mean"]
    columns += ["busiest", "convolution, busiest", "attention, ms", "with states"]
    print_table("bytes of states", columns, rows, texts=3, width=170)
    times = [
        (layer, str(count), *(f"{value:.3f}" for value in row.values()))
        for layer, by_count in result["times"].items()
        for count, row in by_count.items()
    ]
    columns = ["layer", "segments", "documents, s", "segments, s", "ratio"]
    print_table("a document in segments, and as many documents", columns, times)


def main() -> None:
    parser = make_parser(__doc__)
    add_placements(parser)
    add_option(parser, "--heads", 1, "heads of the timed layers")
    add_option(parser, "--tokens", 1024, "tokens of a timed segment")
    add_option(parser, "--rounds", 3, "repetitions of timing; the fastest counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {"bytes": count_placements(options.placements), "times": time_segments(options)}
    output_result(options, found, show)
    end(
        [
            f"{placement}, {way}, {layer}: {figures[layer]['most'] / 1e6:.1f} MB is above"
            f" {LIMITS[way] / 1e6:.0f}"
            for placement, ways in found["bytes"].items()
            for way, figures in ways.items()
            for layer in LAYERS
            if figures[layer]["most"] > LIMITS[way]
        ]
    )


if __name__ == "__main__":
    main()
