"""One tiny model whose documents are cut over two ranks, with their heads and tails, against each document alone on one.

The batch is what a data set of shares gives: document positions, labels that are shifted already, and the documents of each run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from compare import TOLERANCE, Outcome, alone, difference, documents, quiet, run, takes, takes_positions, without_table
from tiny import build
from torch.nn.functional import cross_entropy

import hf_distca
from hf_distca.integration.session import current_session
from hf_distca.schedule.cost import AttentionShape, CostModel
from ranks import RankPool

LENGTHS = (61, 9, 1, 14)
# (document, start, end) on each rank. No two runs end alike, so positions alone would tell the parts apart as well.
PARTS = (
    ((0, 0, 17), (0, 40, 61), (2, 0, 1), (3, 5, 14)),
    ((1, 0, 9), (0, 17, 40), (3, 0, 5)),
)


@dataclass
class Cut:
    """What was found out: `states` is the largest difference of logits and gradients, `loss` that of the model's own loss."""

    states: float = float("inf")
    loss: float = float("inf")
    reason: str = ""


def share(rank: int, model_type: str, dtype: torch.dtype) -> tuple[float, list[torch.Tensor], dict[str, Any], float, int] | str:
    """This rank's loss of the logits and the logits, gradients summed over ranks, its part of the model's own loss, bytes sent."""
    pairs = CostModel.pairs(AttentionShape(4, 2, 16, 16, 8))
    hf_distca.configure(hf_distca.DistCAConfig(tile=8, min_gain=0.0, cost_model=pairs, timeout_seconds=20))
    docs, parts = documents(LENGTHS), PARTS[rank]
    targets = [torch.cat([one[1:], torch.tensor([-100])]) for one in docs]
    sizes = [end - start for _, start, end in parts]
    try:
        with quiet(), without_table():
            model = build(model_type, "distca", dtype)
            shifted = torch.cat([targets[d][start:end] for d, start, end in parts])[None]
            batch = {
                "input_ids": torch.cat([docs[d][start:end] for d, start, end in parts])[None],
                "position_ids": torch.cat([torch.arange(start, end) for _, start, end in parts])[None],
                "labels": shifted,
                "shift_labels": shifted,
                "num_items_in_batch": torch.tensor(sum(LENGTHS) - len(LENGTHS)),
                "distca_documents": hf_distca.PackedDocuments(sizes, [start for _, start, _ in parts], [d for d, _, _ in parts]),
            }
            if takes(model, "use_cache"):
                batch["use_cache"] = False
            out = model(**batch)
            loss = cross_entropy(out.logits[0].double(), shifted[0], reduction="sum")
            loss.backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    grads = {name: p.grad for name, p in model.named_parameters()}
    for grad in grads.values():
        if grad is not None:
            dist.all_reduce(grad)
    logits = [piece.detach() for piece in out.logits[0].split(sizes)]
    return float(loss.detach()), logits, grads, float(out.loss.detach()), current_session().meter.sent_bytes


def cut(pool: RankPool, model_type: str, oracle: str, dtype: torch.dtype) -> Cut:
    """Run the type."""
    with quiet():
        want, _ = run(model_type, oracle, dtype, alone, LENGTHS)
    ranks = pool(share, model_type, dtype)
    for rank in ranks:
        if isinstance(rank, str):
            return Cut(reason=rank)
    assert any(rank[4] for rank in ranks), "nothing was exchanged, so nothing was tested"
    pieces = {part: piece for parts, rank in zip(PARTS, ranks, strict=True) for part, piece in zip(parts, rank[1], strict=True)}
    logits = [torch.cat([pieces[part] for part in sorted(pieces) if part[0] == d]) for d in range(len(LENGTHS))]
    got = Outcome(ranks[0][0] + ranks[1][0], logits, ranks[0][2])
    states, what = difference(got, want)
    tokens = sum(LENGTHS) - len(LENGTHS)
    own = ranks[0][3] + ranks[1][3]
    return Cut(states, abs(own - want.loss / tokens) * tokens / want.loss, what)
