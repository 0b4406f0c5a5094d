r"""One global batch of documents under data parallelism, dealt by hf-distca, and cut by context
parallelism and by Ulysses.

    python benchmarks/schedule/context_parallel.py --json \
        --placement benchmarks/placements/long_tail_8_ranks.json

Figures are counted, not measured: tokens of a rank, attention of the slowest rank, and the bytes
that the busiest rank sends per layer, forward and backward, for Llama-3-8B in bf16. All ranks of
the placement are one context-parallel group.

- Context parallelism is that of accelerate 1.15 (torch's `context_parallel`): the packed batch is
  one sequence, and each rank holds a head chunk and a tail chunk. There is no document mask, so
  documents attend to those before them: pairs of the whole sequence count. Every rank receives the
  keys and values of all ranks, in forward and again in backward, which also exchanges their
  gradients.
- Ulysses is that of accelerate 1.15 with DeepSpeed: q, k, v and outputs of all tokens change ranks,
  in forward and, as gradients, in backward. Each rank computes some heads of all documents. The
  number of ranks must divide the query heads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

from hf_distca.config import DistCAConfig
from hf_distca.schedule.balance import balance
from hf_distca.schedule.deal import deal
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.placement import read_placement
from hf_distca.schedule.plan import Plan
from placed import CUDA, LLAMA_3_8B, list_lengths
from script import make_parser, output_result, print_table

SERIAL = DistCAConfig()


def measure_plan(plan: Plan, lengths: np.ndarray) -> dict[str, Any]:
    """Compute the figures of a plan of hf-distca."""
    load = PlanLoad(plan, CUDA)
    return {
        "tokens_of_the_fullest_rank": int(plan.layout.query_tokens.max()),
        "attention_of_the_slowest": float(
            load.pairs.max() / (count_pairs(lengths) / plan.layout.world_size)
        ),
        "gigabytes_of_the_busiest": float(load.exchange_bytes[0].max() / 1e9),
    }


def count_pairs(lengths: np.ndarray) -> float:
    """Count the query-key pairs of causal attention within documents."""
    return float((lengths * (lengths + 1.0) / 2).sum())


def measure_context_parallel(lengths: np.ndarray, ranks: int) -> dict[str, Any]:
    """Compute the figures of the packed batch as one sequence without a document mask."""
    tokens = int(lengths.sum())
    from_others = tokens // ranks * (ranks - 1)
    key_bytes = (
        LLAMA_3_8B.key_value_heads
        * (LLAMA_3_8B.head_dim + LLAMA_3_8B.value_head_dim)
        * LLAMA_3_8B.element_bytes
    )
    return {
        "tokens_of_the_fullest_rank": tokens // ranks,
        "attention_of_the_slowest": count_pairs(np.array([tokens])) / count_pairs(lengths),
        # Keys and values in forward, again in backward, and their gradients.
        "gigabytes_of_the_busiest": 3 * from_others * key_bytes / 1e9,
    }


def measure_ulysses(lengths: np.ndarray, ranks: int) -> dict[str, Any] | None:
    """Compute the figures of Ulysses; None if the number of ranks does not divide the heads."""
    if LLAMA_3_8B.query_heads % ranks:
        return None
    tokens = int(lengths.sum()) // ranks
    # k and v are repeated if there are more ranks than heads.
    heads = 2 * LLAMA_3_8B.query_heads + 2 * max(LLAMA_3_8B.key_value_heads, ranks)
    moved = tokens * (ranks - 1) / ranks * heads * LLAMA_3_8B.head_dim * LLAMA_3_8B.element_bytes
    return {
        "tokens_of_the_fullest_rank": tokens,
        "attention_of_the_slowest": 1.0,
        "gigabytes_of_the_busiest": 2 * moved / 1e9,
    }


def measure(path: Path) -> dict[str, Any]:
    given = read_placement(path)
    lengths, ranks = np.array(list_lengths(given)), given.world_size
    layout = deal(lengths, ranks, int(lengths.sum()) // ranks, CUDA)
    ways: dict[str, Callable[[], dict[str, Any] | None]] = {
        "data parallel, as given": lambda: measure_plan(Plan.make_local(given), lengths),
        "hf-distca, as given": lambda: measure_plan(balance(given, CUDA, SERIAL), lengths),
        "hf-distca, dealt": lambda: measure_plan(balance(layout, CUDA, SERIAL), lengths),
        "context parallel": lambda: measure_context_parallel(lengths, ranks),
        "Ulysses": lambda: measure_ulysses(lengths, ranks),
    }
    return {
        "placement": path.stem,
        "ranks": ranks,
        "documents": len(lengths),
        "longest": int(lengths.max()),
        "ways": {name: way() for name, way in ways.items()},
    }


def show(result: dict[str, Any]) -> None:
    about = (
        f"{result['documents']} documents, the longest of {result['longest']} tokens, on"
        f" {result['ranks']} ranks"
    )
    rows = []
    for name, row in result["ways"].items():
        if row is None:
            rows.append((name, "-", "-", "ranks do not divide the heads"))
            continue
        tokens, attention, sent = row.values()
        rows.append((name, str(tokens), f"{attention:.2f}", f"{sent:.2f}"))
    columns = "", "tokens, fullest rank", "attention of the slowest / fair share"
    title = f"{result['placement']}: {about}"
    print_table(title, (*columns, "GB sent a layer, busiest rank"), rows)


def main() -> None:
    parser = make_parser(__doc__)
    text = "a placement in JSON, as hf-distca plan reads it"
    parser.add_argument("--placement", type=Path, required=True, help=text)
    arguments = parser.parse_args()
    output_result(arguments, measure(arguments.placement), show)


if __name__ == "__main__":
    main()
