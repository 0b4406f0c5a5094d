"""The slowest rank before and after planning, where tokens see later tokens or documents share
prefixes.

    python benchmarks/schedule/masks.py --json

Ranks of 32K tokens draw documents of up to 32K: causal ones, text with images (256 or 1,120 tokens
each), documents with a prefix that all their tokens see (a third or more), documents whose tokens
all see each other (up to 8K and up to 32K), and prompts with eight answers. Plans assume hidden
exchanges and Llama-3-8B in bf16, by the built-in figures for CUDA: 300 GB/s inside nodes of 8, 40
between nodes. Figures are estimates, not measurements: compute seconds of the slowest rank divided
by the mean over ranks, for several micro-batches each. Work that stays at home counts everywhere.
"not known" is a plan that ignores the work at home. Bytes are per token and layer, forward and
backward.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

from hf_distca.agreement.announce import Announcement, Announcements
from hf_distca.agreement.documents import Documents, PackedDocuments, TokenBatch
from hf_distca.config import DistCAConfig
from hf_distca.integration.seen_ahead import Ahead, sum_documents
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import MarginalCost
from hf_distca.schedule.load import PlanLoad, compute_imbalance
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import Ranks
from placed import TWO_LEVELS as CUDA
from script import add_option, make_parser, output_result, print_table

TOKENS, CPU = 32768, torch.device("cpu")
Generator = np.random.Generator


def draw_length(rng: Generator, median: float, sigma: float, most: int, least: int = 64) -> int:
    return int(np.clip(rng.lognormal(np.log(median), sigma), least, most))


def draw_document(rng: Generator, most: int = 32768) -> int:
    return draw_length(rng, 1500, 1.3, most)


def draw_images(rng: Generator) -> list[int]:
    """Draw a document of images between texts, as blocks of tokens."""
    images = int(rng.choice([0, 1, 3, 12], p=[0.25, 0.45, 0.2, 0.1]))
    size = 256 if images == 12 else int(rng.choice([256, 1120]))
    scale = draw_length(rng, 250, 1.2, 4000) if images else 3000
    ids: list[int] = []
    for image in range(images + 1):
        ids += [-1] * max(2, int(rng.exponential(scale)))
        ids += [image] * size * (image < images)
    return ids


def draw_prefix(rng: Generator) -> list[int]:
    length = draw_document(rng)
    prefix = int(length * rng.uniform(0.3, 0.9))
    return [0] * prefix + [-1] * (length - prefix)


def draw_group(rng: Generator) -> list[int]:
    """Draw the tokens of a prompt and of its answers."""
    return [
        draw_length(rng, 1000, 1.2, 12000),
        *(draw_length(rng, 1200, 0.8, 4000) for _ in "8 answers"),
    ]


def fill(
    rng: Generator, draw: Callable[[Generator], Any], count: Callable[[Any], int]
) -> list[Any]:
    """Draw until the next draw does not fit on the rank."""
    found, room = [], TOKENS
    while (size := count(one := draw(rng))) <= room:
        found.append(one)
        room -= size
    return found


def make_blocks(rng: Generator, draw: Callable[[Generator], list[int]]) -> Documents:
    drawn = fill(rng, draw, len)
    packed = PackedDocuments([len(ids) for ids in drawn])
    ids = torch.tensor([block for ids in drawn for block in ids], dtype=torch.int64)[None]
    return _sum(packed, Ahead(ids))


def make_whole(rng: Generator, most: int, ahead: Ahead | None) -> Documents:
    lengths = fill(rng, lambda rng: draw_document(rng, most), int)
    return _sum(PackedDocuments(lengths), ahead)


def make_groups(rng: Generator) -> Documents:
    lengths: list[int] = []
    parents: list[int] = []
    for group in fill(rng, draw_group, sum):
        parents += [-1] + [len(lengths)] * (len(group) - 1)
        lengths += group
    return _sum(PackedDocuments(lengths, parents=parents), None)


def _sum(packed: PackedDocuments, ahead: Ahead | None) -> Documents:
    documents = TokenBatch(1, sum(packed.lengths), packed).read_documents()
    return sum_documents(ahead, documents, None, CPU)


FORMS: dict[str, Callable[[Generator], Documents]] = {
    "causal": lambda rng: make_whole(rng, 32768, None),
    "images": lambda rng: make_blocks(rng, draw_images),
    "prefixes": lambda rng: make_blocks(rng, draw_prefix),
    "both ways, up to 8K": lambda rng: make_whole(rng, 8192, Ahead()),
    "both ways": lambda rng: make_whole(rng, 32768, Ahead()),
    "prompts with answers": make_groups,
}


def weigh(form: str, ranks: int, seed: int) -> dict[str, float]:
    """Compute slowest / mean for one micro-batch."""
    rng = np.random.default_rng([seed, ranks])
    rows = [Announcement(documents=[(FORMS[form](rng), 0)]).to_row() for _ in range(ranks)]
    (announced,) = Announcements.from_rows(rows).read_documents()
    layout = announced.build_layout()
    pairs = announced.header[:, 4] * MarginalCost.from_cost_model(CUDA).pair
    here = Ranks(per_node=8, fixed_seconds=tuple(pairs.tolist()) if pairs.any() else None)
    config = DistCAConfig(ping_pong=True)
    plans = {
        "before": Plan.make_local(layout),
        "not known": balance(layout, CUDA, config, replace(here, fixed_seconds=None)),
        "after": balance(layout, CUDA, config, here),
    }
    loads = {name: PlanLoad(plan, CUDA, ranks=here) for name, plan in plans.items()}
    found = {name: compute_imbalance(load.compute_seconds) for name, load in loads.items()}
    tokens = int(layout.query_tokens.sum())
    found["kB a token"] = float(loads["after"].exchange_bytes[0].sum()) / tokens / 1e3
    found["at home"] = float(pairs.sum() / loads["before"].compute_seconds.sum())
    return found


def measure(all_ranks: list[int], batches: int) -> dict[str, Any]:
    found = []
    for form, ranks in itertools.product(FORMS, all_ranks):
        drawn = [weigh(form, ranks, seed) for seed in range(batches)]
        means = {name: float(np.mean([one[name] for one in drawn])) for name in drawn[0]}
        found.append({"form": form, "ranks": ranks, **means})
    return {"forms": found}


def show(found: dict[str, Any]) -> None:
    names = "before", "not known", "after", "kB a token"
    rows = (
        (
            row["form"],
            str(row["ranks"]),
            *(f"{row[name]:.2f}" for name in names),
            f"{row['at home']:.0%}",
        )
        for row in found["forms"]
    )
    print_table("", ("form", "ranks", *names, "at home"), rows)


def main() -> None:
    parser = make_parser(__doc__)
    add_option(parser, "--ranks", [8, 64], "numbers of ranks, in nodes of 8")
    add_option(parser, "--batches", 4, "micro-batches of each form")
    arguments = parser.parse_args()
    output_result(arguments, measure(arguments.ranks, arguments.batches), show)


if __name__ == "__main__":
    main()
