"""One tiny model whose documents are cut over two ranks, with their heads and tails, against each document alone on one.

The batch is what a data set of shares gives: document positions, labels that are shifted already, and the documents of each run.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from compare import TOLERANCE, Outcome, alone, difference, documents, quiet, run, takes, without_table
from measure import WORKING, Result
from mutations import mutated
from tiny import build
from torch.nn.functional import cross_entropy

import hf_distca
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.integration.families import WHOLE_REASONS
from hf_distca.integration.session import current_session
from hf_distca.schedule.cost import AttentionShape, CostModel
from ranks import RankPool

LENGTHS = (61, 9, 1, 14)
TARGETS = sum(LENGTHS) - len(LENGTHS)
Parts = tuple[tuple[tuple[int, int, int], ...], ...]  # (document, start, end) on each rank
CUT: Parts = (((0, 0, 17), (0, 40, 61), (2, 0, 1), (3, 5, 14)), ((1, 0, 9), (0, 17, 40), (3, 0, 5)))
WHOLE: Parts = (((0, 0, 61),), ((1, 0, 9),))

# Loss of the logits, logits of the parts, gradients summed over ranks, this rank's part of the model's own loss, bytes sent.
Share = tuple[float, list[torch.Tensor], dict[str, Any], float, int]


def share(
    rank: int, model_type: str, dtype: torch.dtype, all_parts: Parts, table: bool, mutation: str | None = None
) -> Share | str:
    """What a rank gets of its parts of documents; the error, if there is one."""
    pairs = CostModel.pairs(AttentionShape(4, 2, 16, 16, 8))
    hf_distca.configure(hf_distca.DistCAConfig(tile=8, min_gain=0.0, cost_model=pairs, timeout_seconds=20))
    docs, parts = documents(LENGTHS), all_parts[rank]
    numbers, starts, ends = zip(*parts, strict=True)
    sizes = [end - start for start, end in zip(starts, ends, strict=True)]
    targets = [torch.cat([one[1:], torch.tensor([-100])]) for one in docs]
    try:
        with quiet(), mutated(mutation), nullcontext() if table else without_table():
            model = build(model_type, "distca", dtype)
            shifted = torch.cat([targets[d][start:end] for d, start, end in parts])[None]
            batch = {
                "input_ids": torch.cat([docs[d][start:end] for d, start, end in parts])[None],
                "position_ids": torch.cat([torch.arange(start, end) for _, start, end in parts])[None],
                "labels": torch.full_like(shifted, -100),
                "shift_labels": shifted,
                "num_items_in_batch": torch.tensor(TARGETS),
                "distca_documents": PackedDocuments(sizes, starts, numbers),
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


def over_ranks(pool: RankPool, measured: Result, mutation: str | None = None) -> str:
    """What the table is to say of documents over ranks, with a fault in the library or without: "OVER_RANKS" if that is exact.

    Returns:
        That, or the reason why it is not.

    Raises:
        AssertionError: if it is not and no reason is known.
    """
    dtype = torch.float64 if measured.dtype == "float64" else torch.float32
    with quiet():
        want, _ = run(measured.model_type, measured.oracle, dtype, alone, LENGTHS)
    ranks = pool(share, measured.model_type, dtype, CUT, False, mutation)
    errors = {rank for rank in ranks if isinstance(rank, str)}
    states, what = (float("inf"), str(errors)) if errors else difference(_joined(ranks), want)
    # Recurrent layers compute in float32, and a part of a document in other chunks than the whole. Between float32 and float64
    # alone, the same gradients differ by 4e-5.
    tolerance = TOLERANCE[torch.float32 if measured.status == "packed" else dtype]
    if states <= tolerance:
        assert any(rank[4] for rank in ranks), "nothing was exchanged, so nothing was tested"
        own = sum(rank[3] for rank in ranks) * TARGETS / want.loss
        return "OVER_RANKS" if abs(own - 1) <= tolerance else "OWN_LOSS"
    if "attention chunks" in what:
        return "CHUNKS"
    reason = WORKING[measured.status]
    assert reason in WHOLE_REASONS, f"{what} differs by {states:.1e}"
    return reason


def _joined(ranks: list[Share]) -> Outcome:
    """The outcome of whole documents."""
    pieces = {part: piece for parts, rank in zip(CUT, ranks, strict=True) for part, piece in zip(parts, rank[1], strict=True)}
    logits = [torch.cat([pieces[part] for part in sorted(pieces) if part[0] == d]) for d in range(len(LENGTHS))]
    return Outcome(sum(rank[0] for rank in ranks), logits, ranks[0][2])
