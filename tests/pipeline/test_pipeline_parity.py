"""Stages that share attention have the loss and the gradients of the model in one process."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from some_relays import draw_relays
from staged import Case, Found, check_equal, run_in_one_process, run_in_stages

from hf_distca.pipeline import ticks
from hf_distca.runtime.channel import Channel
from hf_distca.runtime.route import Route
from hf_distca.schedule.balance import balance
from hf_distca.schedule.plan import Plan
from ranks import RankPools
from tiny_runs import PAIRS

# float64 rounds near 1e-16. A gradient that is summed twice, missing or of another micro-batch is
# off by far more.
EXACT = 1e-9
IN_FLOAT32 = 1e-5

# Most families compute norms in float32 in any dtype. If a sum rounds differently, a gradient is
# off by 1e-7.
NORMS_IN_FLOAT32 = 1e-6

build = Route.build
IN_TWO = (("ping_pong", True),)

# Families with special attention, its implementation in one process (sdpa if possible), and the
# tolerance.
SPECIAL = {
    "gemma2": ("distca", NORMS_IN_FLOAT32),  # windows in every other layer, softcap
    "gpt_oss": ("distca", NORMS_IN_FLOAT32),  # sinks, windows
    "deepseek_v3": ("sdpa", NORMS_IN_FLOAT32),  # latent attention, experts
    "starcoder2": ("sdpa", EXACT),  # a window in every layer
    "llama4_text": ("distca", NORMS_IN_FLOAT32),  # chunks
    "gpt2": ("sdpa", EXACT),  # positions as an embedding
    "cohere2": ("sdpa", NORMS_IN_FLOAT32),  # windows in most layers, tied embeddings
}


def test_two_stages_equal_one_process(rank_pool: RankPools) -> None:
    """Checkpointing repeats no attention, and a stage without a micro-batch serves others."""
    case = Case(steps=2, tied=True)
    reference = run_in_one_process(case, "sdpa")
    plain = rank_pool(2)(run_in_stages, case)
    check_equal(plain, *reference, EXACT)
    assert all(one.served > 0 and one.sent_bytes > 0 for one in plain)
    checkpointed = rank_pool(2)(run_in_stages, case._replace(checkpointing=False))
    check_equal(checkpointed, *reference, EXACT)
    for one, other in zip(plain, checkpointed, strict=True):
        assert (other.kernel_calls, other.calls) == (one.kernel_calls, one.calls)
        assert other.recomputed_calls == 2 * 2 * case.micro_batches  # layers of a stage, steps


def run_with_exchanges(rank: int, case: Case) -> tuple[Found, int]:
    """Run a case; also return the most exchanges of attention that were under way at once."""
    start, counts = Channel.start, [0]

    class Counted:
        def __init__(self, transfer: Any) -> None:
            self.transfer = transfer
            counts.append(counts[-1] + 1)

        def wait(self) -> None:
            counts.append(counts[-1] - 1)
            self.transfer.wait()

    with patch.object(Channel, "start", lambda *arguments: Counted(start(*arguments))):
        found = run_in_stages(rank, case)
    return found, max(counts)


def test_two_nano_batches_equal_one_process(rank_pool: RankPools) -> None:
    """Calls have two nano-batches with a dispatch and a return each; recomputes repeat neither."""
    case = Case(micro_batches=3)
    reference = run_in_one_process(case, "sdpa")
    whole = rank_pool(2)(run_with_exchanges, case)
    for checkpointing in (None, False):
        found = rank_pool(2)(
            run_with_exchanges, case._replace(settings=IN_TWO, checkpointing=checkpointing)
        )
        check_equal([one for one, _ in found], *reference, EXACT)
        for (one, under_way), (other, under_way_whole) in zip(found, whole, strict=True):
            # One nano-batch computes while the messages of the other travel.
            assert (under_way, under_way_whole) == (2, 1)
            assert one.sent_bytes > 0
            assert one.served > 0
            assert one.calls == 2 * other.calls
            assert one.dispatches == one.returns == 2 * other.dispatches
            # Nano-batches times layers of a stage.
            assert one.recomputed_calls == (
                0 if checkpointing is None else 2 * 2 * case.micro_batches
            )


def run_with_relays(rank: int, case: Case) -> tuple[Found, int]:
    """Run a case with random relays; also return the number of plans with relays."""
    relayed = []

    def balanced(*arguments: Any) -> Plan:
        plan = balance(*arguments)
        relays = draw_relays(random.Random(plan.digest), plan)
        relayed.append(relays is not None)
        return replace(plan, relays=relays)

    with patch.object(ticks, "balance", balanced):
        found = run_in_stages(rank, case)
    return found, sum(relayed)


@pytest.mark.parametrize("settings", [(), IN_TWO], ids=["whole", "nano-batches"])
def test_stages_with_relays_equal_one_process(rank_pool: RankPools, settings: Any) -> None:
    case = Case(micro_batches=3, settings=settings)
    found = rank_pool(2)(run_with_relays, case)
    assert all(relayed > 0 for _, relayed in found)
    check_equal([one for one, _ in found], *run_in_one_process(case, "sdpa"), EXACT)


def run_with_head_groups(rank: int, case: Case) -> tuple[Found, int]:
    """Run a case; also return the most head groups of its plans."""
    groups = []
    with patch.object(
        Route,
        "build",
        side_effect=lambda plan, *more: groups.append(plan.layout.groups) or build(plan, *more),
    ):
        found = run_in_stages(rank, case)
    return found, max(groups)


def test_documents_split_by_heads_equal_one_process(rank_pool: RankPools) -> None:
    """Rows of head groups travel, also to stages that have no micro-batch and only serve."""
    # Documents are split only if bytes cost something; work moves only if they cost little.
    case = Case(
        micro_batches=3, settings=(("cost_model", replace(PAIRS, exchange_bytes_per_second=1e12)),)
    )
    found = rank_pool(2)(run_with_head_groups, case)
    assert [groups for _, groups in found] == [2, 2]
    check_equal([one for one, _ in found], *run_in_one_process(case, "sdpa"), EXACT)


def test_stages_with_different_layers_equal_one_process(rank_pool: RankPools) -> None:
    """The stages have three layers and one; they share attention only in layers of one kind."""
    case = Case("gemma2", micro_batches=3, per_stage=(3, 1), steps=3)
    check_equal(
        rank_pool(2)(run_in_stages, case), *run_in_one_process(case, "distca"), NORMS_IN_FLOAT32
    )


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
@pytest.mark.parametrize(("stages", "copies"), [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize(
    "checkpointing", [None, False, True], ids=["plain", "checkpointed", "reentrant"]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_stages_equal_one_process(
    rank_pool: RankPools,
    stages: int,
    copies: int,
    micro_batches: int,
    checkpointing: bool | None,
    dtype: torch.dtype,
) -> None:
    case = Case(
        stages=stages,
        copies=copies,
        micro_batches=micro_batches,
        dtype=dtype,
        checkpointing=checkpointing,
        layers=5,
    )
    reference = run_in_one_process(case._replace(dtype=torch.float64), "sdpa")
    found = rank_pool(stages * copies)(run_in_stages, case)
    check_equal(found, *reference, EXACT if dtype == torch.float64 else IN_FLOAT32)


IN_NANO_BATCHES = [
    Case(checkpointing=True, tied=True, steps=2),
    Case(copies=2, micro_batches=3),
    Case(stages=4, micro_batches=5, layers=5),
    Case("gemma2", micro_batches=3, per_stage=(3, 1)),
    Case("gpt_oss", micro_batches=5),
    Case("llama4_text", micro_batches=5),
    Case("longcat_flash"),  # two calls of attention in a layer
    Case("beam"),  # its layers are not cut into nano-batches
    Case(settings=(("max_transient_bytes", 60_000),)),
    Case(tokens=2),
    Case(tokens=3, micro_batches=1),
]
MANY_STEPS = Case(stages=4, micro_batches=5, layers=5, steps=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        *[
            Case(family, stages=stages, copies=copies, micro_batches=5)
            for stages, copies in ((2, 1), (4, 1), (2, 2))
            for family in SPECIAL
        ],
        MANY_STEPS,
        MANY_STEPS._replace(per_stage=(2, 1, 1, 1)),
        MANY_STEPS._replace(stages=2, copies=2, per_stage=(3, 2)),
        *[case._replace(settings=(*case.settings, *IN_TWO)) for case in IN_NANO_BATCHES],
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_special_cases_equal_one_process(rank_pool: RankPools, case: Case) -> None:
    found = rank_pool(case.stages * case.copies)(run_in_stages, case)
    implementation, tolerance = {"llama": ("sdpa", EXACT), **SPECIAL}.get(
        case.family, ("distca", NORMS_IN_FLOAT32)
    )
    check_equal(found, *run_in_one_process(case, implementation), tolerance)
    assert case.family not in SPECIAL or all(one.sent_bytes > 0 for one in found)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
def test_stages_in_bfloat16_are_as_exact_as_one_process(rank_pool: RankPools, stages: int) -> None:
    case = Case(stages=stages, dtype=torch.bfloat16, steps=3)
    loss, wanted = run_in_one_process(case._replace(dtype=torch.float64), "sdpa")
    _, alone = run_in_one_process(case, "sdpa")

    def error(gradients: dict[str, torch.Tensor]) -> float:
        return float(
            sum((gradients[name].double() - grad).norm() ** 2 for name, grad in wanted.items())
            ** 0.5
        )

    found = rank_pool(stages)(run_in_stages, case)
    together = {name: gradient for one in found for name, gradient in one.gradients.items()}
    assert all(abs(one.loss - loss) <= 0.01 * loss and one.sent_bytes > 0 for one in found)
    assert error(together) <= 1.2 * error(alone)
