"""Loss curves of the same training in four ways, two under sdpa and two under distca, on two ranks
of this machine.

    python benchmarks/steps/loss_curve.py

Every step has the same documents in all ways: bytes of Python's own library. One document is longer
than a rank. Under sdpa, each document is a separate forward. The second run under sdpa takes the
documents in another order, which changes only the rounding of sums. Rounding grows from step to
step, so the default dtype is float64, where other differences stand out. transformers still
computes norms, rotary embeddings and the loss in float32.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

import hf_distca
from batches import draw_lengths, make_share
from curves_picture import draw
from hf_distca.agreement.dealt_share import Dealing
from hf_distca.integration.current_session import current_session
from hf_distca.integration.layer_kinds import list_layer_keys, make_initial_cost
from models import make_plain_model
from processes import add_model_options, iterate_rounds, run_on_ranks
from script import add_option, make_parser, output_result, print_table

RANKS = 2
WAYS = ("sdpa", "sdpa, other order", "distca, in order", "distca, dealt")


@cache
def read_corpus() -> torch.Tensor:
    """Return the bytes of the library's modules in order."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return torch.frombuffer(
        bytearray(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))),
        dtype=torch.uint8,
    ).long()


def pick_documents(step: int, tokens: int) -> list[torch.Tensor]:
    """Return the documents of a step, each from a different place."""
    lengths = np.random.default_rng(step).permutation(draw_lengths(tokens, RANKS))
    starts = np.random.default_rng(1000 + step).integers(
        0, len(read_corpus()) - 2 * tokens, len(lengths)
    )
    return [
        read_corpus()[start : start + length]
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
    ]


class Training:
    """A model, its optimizer, and the way its batches reach the ranks."""

    def __init__(self, way: str, rank: int, arguments: argparse.Namespace) -> None:
        self.way, self.rank = way, rank
        self.model = make_plain_model(arguments, way.split(",")[0]).to(
            getattr(torch, arguments.dtype)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=arguments.rate)
        config = hf_distca.configure(hf_distca.DistCAConfig(tile=16, min_gain=0.0))
        costs = {
            key: make_initial_cost(key, config) for key in list_layer_keys(self.model, None, "cpu")
        }
        placement = "in order" if way.endswith("in order") else "dealt"
        self.dealing = Dealing(RANKS, arguments.tokens, costs, config, placement=placement)

    def batches(self, documents: list[torch.Tensor]) -> list[dict[str, Any]]:
        """Make this rank's batches of a step, one per forward."""
        if self.way.startswith("distca"):
            lengths = np.array([len(document) for document in documents])
            return [make_share(documents, self.dealing.make_share(lengths, (0, 0), self.rank))]
        mine = documents[self.rank :: RANKS]
        alone = [{"input_ids": one[None], "labels": one[None]} for one in mine if len(one) > 1]
        return alone[::-1] if self.way.endswith("other order") else alone

    def step(self, documents: list[torch.Tensor]) -> float:
        """Train a step; return the mean loss over its tokens on all ranks."""
        targets = sum(len(document) - 1 for document in documents)
        total = torch.zeros((), dtype=torch.float64)
        for batch in self.batches(documents):
            loss = self.model(**batch, use_cache=False, num_items_in_batch=targets).loss
            loss.backward()
            total += loss.detach().double()
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return float(total)


def measure(rank: int, ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train in all ways; return the losses, and the distance of the others from the first."""
    trainings = {way: Training(way, rank, arguments) for way in WAYS}
    losses: dict[str, list[float]] = {way: [] for way in WAYS}
    for step in iterate_rounds(rank, arguments.steps):
        documents = pick_documents(step, arguments.tokens)
        for way, training in trainings.items():
            losses[way].append(training.step(documents))
    apart = {
        way: float(np.abs(np.array(losses[way]) - np.array(losses[WAYS[0]])).max())
        for way in WAYS[1:]
    }
    return {
        "exchanges": current_session().meter.dispatches,
        "apart": apart,
        "end": {way: float(np.mean(losses[way][-10:])) for way in WAYS},
        "losses": losses,
    }


def show(result: dict[str, Any]) -> None:
    rows = (
        (way, f"{result['end'][way]:.6f}", f"{result['apart'].get(way, 0.0):.1e}") for way in WAYS
    )
    columns = "way", "loss of the last ten steps", "largest difference from sdpa"
    print_table("", columns, rows)
    print(f"{result['exchanges']} dispatches on each rank under distca")


def main() -> None:
    parser = make_parser(__doc__)
    add_option(parser, "--steps", 300, "optimizer steps")
    add_model_options(parser, tokens=256, layers=2, heads=2)
    add_option(parser, "--rate", 1e-3, "learning rate")
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    parser.add_argument("--picture", type=Path, help="draw the curves to this file")
    arguments = parser.parse_args()
    result = run_on_ranks(measure, RANKS, arguments)
    if arguments.picture is not None:
        draw(result["losses"], arguments.picture)
    output_result(arguments, result, show, ranks=RANKS)


if __name__ == "__main__":
    main()
