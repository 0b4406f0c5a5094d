"""One tiny model on two ranks, which balance, against each document alone on one."""

from __future__ import annotations

import torch
import torch.distributed as dist
from compare import TOLERANCE, Outcome, alone, difference, documents, packed, quiet, run
from measure import measure
from mutations import mutated
from tiny import build

import hf_distca
from hf_distca.integration.current_session import current_session
from hf_distca.integration.families import FAMILIES
from hf_distca.schedule.cost import AttentionShape, CostModel
from ranks import RankPool


def share(
    rank: int, model_type: str, dtype: torch.dtype, mutation: str | None, ping_pong: bool
) -> tuple[Outcome, int, int]:
    """This rank's documents under distca with gradients summed over ranks, bytes sent, and calls of
    attention.
    """
    pairs = CostModel.make_of_pairs(AttentionShape(4, 2, 16, 16, 8))
    hf_distca.configure(
        hf_distca.DistCAConfig(tile=8, min_gain=0.0, cost_model=pairs, ping_pong=ping_pong)
    )
    docs = documents(lengths_of(model_type))
    with quiet(), mutated(mutation):
        outcome = packed(build(model_type, "distca", dtype), docs[:1] if rank == 0 else docs[1:])
    for grad in outcome.grads.values():
        if grad is not None:
            dist.all_reduce(grad)
    meter = current_session().meter
    return outcome, meter.sent_bytes, meter.calls


def lengths_of(model_type: str) -> tuple[int, ...]:
    """One long document for rank 0; for rank 1 short ones, or a single one where packed documents
    leak.
    """
    return (70, 9, 1, 7) if FAMILIES[model_type] in ("PROVEN", "PACKED") else (70, 9)


def check_two_ranks(
    pool: RankPool, model_type: str, mutation: str | None = None, *, ping_pong: bool = False
) -> None:
    """Fail unless two ranks give what each document alone gives, and exchanged something; in halves
    if told so.

    Raises:
        AssertionError: says what differs.
    """
    measured = measure(model_type)
    dtype = torch.float64 if measured.dtype == "float64" else torch.float32
    with quiet():
        want, _ = run(model_type, measured.oracle, dtype, alone, lengths_of(model_type))
    (first, sent, calls), (second, *_) = pool(share, model_type, dtype, mutation, ping_pong)
    assert sent, "nothing was exchanged, so nothing was tested"
    assert not ping_pong or calls > measured.expected_calls, "no layer ran as halves"
    got = Outcome(first.loss + second.loss, first.logits + second.logits, first.grads)
    value, what = difference(got, want)
    assert value <= TOLERANCE[dtype], f"{what} differs by {value:.1e}"
