"""Compares documents that are cut over ranks with each document alone on one process.

The batch is like a share: positions, shifted labels, and the document of each run. Models with
recurrent layers have long memory, and compute in float64 throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from compare import (
    TOLERANCE,
    Outcome,
    alone,
    difference,
    documents,
    quiet,
    run,
    takes,
    without_table,
)
from measure import WORKING, Result
from tiny import build, lengthen_memory
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

import hf_distca
from float64 import Float64Throughout
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.integration.current_session import current_session
from hf_distca.integration.families import FAMILIES, WHOLE_DOCUMENT_REASONS
from hf_distca.integration.hooks.positions import find_first_position
from ranks import RankPool
from tiny_runs import settings

Parts = tuple[tuple[tuple[int, int, int], ...], ...]  # (document, start, end) on each rank
CUT: Parts = (((0, 0, 17), (0, 40, 61), (2, 0, 1), (3, 5, 14)), ((1, 0, 9), (0, 17, 40), (3, 0, 5)))
WHOLE: Parts = (((0, 0, 61),), ((1, 0, 9),))
# Documents of 150, 9, 1 and 32 tokens over four ranks; the first document is longer than two chunks
# of a delta rule.
OVER_FOUR: dict[str, Parts] = {
    "one-token pieces": (
        ((0, 0, 60), *((0, a, a + 1) for a in range(60, 84, 4)), (1, 0, 1), (1, 4, 5), (1, 8, 9)),
        ((0, 84, 150), *((0, a, a + 1) for a in range(61, 84, 4)), (1, 1, 2), (1, 5, 6)),
        ((2, 0, 1), *((0, a, a + 1) for a in range(62, 84, 4)), (1, 2, 3), (1, 6, 7)),
        ((3, 0, 32), *((0, a, a + 1) for a in range(63, 84, 4)), (1, 3, 4), (1, 7, 8)),
    ),
    "3, 2 and 1 pieces": (
        ((0, 0, 20), (0, 50, 70), (2, 0, 1), (0, 100, 120)),
        ((1, 0, 4), (0, 20, 50), (0, 120, 150)),
        ((0, 70, 100),),
        ((1, 4, 9), (3, 0, 32)),
    ),
}


@dataclass(frozen=True)
class Case:
    """A case that ranks run.

    Attributes:
        model_type, dtype: of the model.
        parts: the parts of documents on each rank.
        table: whether families.txt may refuse the model.
        numbered: whether the batch gives the document of each run; if not, only position ids
            separate documents.
        ping_pong: whether layers run as two nano-batches.
    """

    model_type: str
    dtype: torch.dtype
    parts: Parts
    table: bool = False
    numbered: bool = True
    ping_pong: bool = False

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document."""
        parts = [part for held in self.parts for part in held]
        return tuple(
            max(end for number, _, end in parts if number == document)
            for document in sorted({d for d, *_ in parts})
        )


@dataclass(frozen=True)
class Share:
    """The results of a rank.

    Attributes:
        outcome: the loss and logits of its parts, and gradients summed over ranks.
        own_loss: the part of the loss that the model computes itself.
        sent_bytes, calls: of attention.
        state_exchanges: of recurrent layers.
    """

    outcome: Outcome
    own_loss: float
    sent_bytes: int
    state_exchanges: int
    calls: int


def share(rank: int, case: Case) -> Share | str:
    """Run the parts of documents on this rank, and return the results or the error."""
    hf_distca.configure(settings(ping_pong=case.ping_pong, timeout_seconds=120.0))
    docs, parts = documents(case.lengths), case.parts[rank]
    numbers, starts, ends = zip(*parts, strict=True)
    sizes = [end - start for start, end in zip(starts, ends, strict=True)]
    targets = [torch.cat([one[1:], torch.tensor([-100])]) for one in docs]
    try:
        with (
            quiet(),
            nullcontext() if case.table else without_table(),
            _set_precision(case.model_type),
        ):
            model = lengthen_memory(build(case.model_type, "distca", case.dtype))
            shifted = torch.cat([targets[d][start:end] for d, start, end in parts])[None]
            # Positions with distca_documents count from 0, and distca shifts them.
            first = 0 if case.numbered else find_first_position(model)
            batch: dict[str, Any] = {
                "input_ids": torch.cat([docs[d][start:end] for d, start, end in parts])[None],
                "position_ids": torch.cat([torch.arange(a, b) + first for _, a, b in parts])[None],
                "labels": torch.full_like(shifted, -100),
                "shift_labels": shifted,
                "num_items_in_batch": torch.tensor(_count_targets(case)),
            }
            if case.numbered:
                batch["distca_documents"] = PackedDocuments(sizes, starts, numbers)
            if takes(model, "use_cache"):
                batch["use_cache"] = False
            if case.model_type in ("musicgen", "musicgen_melody"):
                batch["labels"] = batch["labels"][..., None]  # labels of the only codebook
            out = model(**batch)
            loss = cross_entropy(out.logits[0].double(), shifted[0], reduction="sum")
            loss.backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    grads = {name: p.grad for name, p in model.named_parameters()}
    for grad in grads.values():
        if grad is not None and dist.get_world_size() > 1:
            dist.all_reduce(grad)
    logits = [piece.detach() for piece in out.logits[0].split(sizes)]
    meter = current_session().meter
    outcome = Outcome(float(loss.detach()), logits, grads)
    return Share(
        outcome, float(out.loss.detach()), meter.sent_bytes, meter.state_exchanges, meter.calls
    )


def compare(
    pool: RankPool, case: Case, want: Outcome, work: Callable[[int, Case], Share | str] = share
) -> tuple[float, str, list[Share]]:
    """Return the largest relative difference (infinite after an error), its tensor, and shares."""
    ranks: list[Share | str] = pool(work, case, timeout=240)
    if errors := {rank for rank in ranks if isinstance(rank, str)}:
        return float("inf"), str(errors), []
    shares = [rank for rank in ranks if isinstance(rank, Share)]
    return *difference(_join(case, shares), want), shares


def _run_with_long_memory(model: PreTrainedModel, docs: list[torch.Tensor]) -> Outcome:
    return alone(lengthen_memory(model), docs)


@cache
def run_whole(
    model_type: str, oracle: str, dtype: torch.dtype, lengths: tuple[int, ...]
) -> Outcome:
    """Run each document alone, under transformers' own attention, on this process."""
    with quiet(), _set_precision(model_type):
        return run(model_type, oracle, dtype, _run_with_long_memory, lengths)[0]


def over_ranks(pool: RankPool, measured: Result) -> str:
    """Return "OVER_RANKS" if documents over ranks are exact, and otherwise the reason.

    Raises:
        AssertionError: no reason is known.
    """
    dtype = torch.float64 if measured.dtype == "float64" else torch.float32
    case = Case(measured.model_type, dtype, CUT)
    whole = run_whole(measured.model_type, measured.oracle, dtype, case.lengths)
    states, what, shares = compare(pool, case, whole)
    if states <= TOLERANCE[dtype]:
        assert any(rank.sent_bytes for rank in shares), (
            "nothing was exchanged, so nothing was tested"
        )
        own = sum(rank.own_loss for rank in shares) * _count_targets(case) / whole.loss
        return "OVER_RANKS" if abs(own - 1) <= TOLERANCE[dtype] else "OWN_LOSS"
    if "attention chunks" in what:
        return "CHUNKS"
    reason = WORKING[measured.status]
    assert reason in WHOLE_DOCUMENT_REASONS, f"{what} differs by {states:.1e}"
    return reason


def check_two_ranks(pool: RankPool, measured: Result, *, ping_pong: bool = False) -> None:
    """Check that a rank with a long document and a rank with short ones give the results of each
    document alone.

    Raises:
        AssertionError: names the tensor that differs.
    """
    dtype = torch.float64 if measured.dtype == "float64" else torch.float32
    packs = FAMILIES[measured.model_type] in ("PROVEN", "PACKED")
    short = ((1, 0, 9), (2, 0, 1), (3, 0, 7)) if packs else ((1, 0, 9),)
    parts = (((0, 0, 70),), short)
    case = Case(measured.model_type, dtype, parts, numbered=False, ping_pong=ping_pong)
    whole = run_whole(measured.model_type, measured.oracle, dtype, case.lengths)
    value, what, shares = compare(pool, case, whole)
    assert value <= TOLERANCE[dtype], f"{what} differs by {value:.1e}"
    assert shares[0].sent_bytes, "nothing was exchanged, so nothing was tested"
    assert not ping_pong or shares[0].calls > measured.expected_calls, "no layer ran as halves"


def _set_precision(model_type: str) -> AbstractContextManager[Any]:
    return Float64Throughout() if FAMILIES[model_type] == "PACKED" else nullcontext()


def _count_targets(case: Case) -> int:
    return sum(case.lengths) - len(case.lengths)


def _join(case: Case, shares: list[Share]) -> Outcome:
    """Join the parts to the outcome of whole documents."""
    held = zip(case.parts, shares, strict=True)
    pieces = {
        part: piece
        for parts, rank in held
        for part, piece in zip(parts, rank.outcome.logits, strict=True)
    }
    whole = [
        torch.cat([pieces[part] for part in sorted(pieces) if part[0] == d])
        for d in range(len(case.lengths))
    ]
    return Outcome(sum(rank.outcome.loss for rank in shares), whole, shares[0].outcome.grads)
