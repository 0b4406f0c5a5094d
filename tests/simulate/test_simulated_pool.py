"""A pool of servers: who holds what, who waits for whom, and what it can never be faster than."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from benchmark_modules import import_benchmark
from hf_distca.model_shape import find_model
from hf_distca.schedule.layout import FloatArray, IntArray
from hf_distca.simulate.document_lengths import find_distribution, from_list
from hf_distca.simulate.memory import find_fullest_moment
from hf_distca.simulate.predict import (
    Prediction,
    estimate_linear_seconds,
    predict_step,
    run_data_parallel,
    simulate,
)
from hf_distca.simulate.setting import Setting
from hf_distca.simulate.strategies import STRATEGIES, Strategy
from hf_distca.simulate.work import MicroBatchWork, estimate_optimizer_seconds

simulated_pool = import_benchmark("simulated_pool")
COUNTED, Devices, Servers = simulated_pool.COUNTED, simulated_pool.Devices, simulated_pool.Servers
Turn, in_turns, pooled = simulated_pool.Turn, simulated_pool.in_turns, simulated_pool.pooled
ideal_seconds = import_benchmark("ideal").ideal_seconds

DOCUMENTS = np.array([65536, 32768, *[2048] * 16, *[1024] * 31, 1000, 24], dtype=np.int64)


@pytest.fixture
def narrow(setting: Setting) -> Setting:
    """Eight devices of a node, which hold `DOCUMENTS`."""
    return replace(setting, tokens_per_rank=int(DOCUMENTS.sum()) // 8, checkpointing="selective")


def work_of(
    setting: Setting, lengths: IntArray, *, ping_pong: bool, counted: float = 0.0
) -> MicroBatchWork:
    """Two of the devices serve."""
    (candidate,) = pooled(
        partial(Devices.with_servers, Servers(2)), ping_pong, setting, [lengths], (counted,)
    )
    work: MicroBatchWork = candidate.works[0]
    return work


def strategy(devices_of: Callable[[Setting], Any], *, ping_pong: bool) -> Strategy:
    name = "ping-pong" if ping_pong else "one stream"
    return Strategy(name, name, partial(pooled, devices_of, ping_pong), "", disaggregated=True)


def pools(servers: int, *, each_node: bool = False) -> list[Strategy]:
    """A pool in one stream, and in ping-pong."""
    devices_of = partial(Devices.with_servers, Servers(servers, each_node))
    return [strategy(devices_of, ping_pong=ping_pong) for ping_pong in (False, True)]


def predicted(devices: Any, setting: Setting, lengths: IntArray, *, ping_pong: bool) -> Prediction:
    found = predict_step(setting, [lengths], strategy(lambda _: devices, ping_pong=ping_pong))
    assert found is not None
    return found


@pytest.mark.parametrize("ping_pong", [False, True])
def test_trainers_hold_all_tokens_and_every_pair_is_computed(
    narrow: Setting, ping_pong: bool
) -> None:
    work = work_of(narrow, DOCUMENTS, ping_pong=ping_pong)
    assert work.tokens[-2:].tolist() == [0, 0]
    assert work.tokens.sum() == DOCUMENTS.sum()
    assert np.ptp(work.tokens[:-2]) <= 1
    whole = pooled(Devices.all_training, ping_pong, narrow, [DOCUMENTS])[0].works[0]
    assert work.pairs == pytest.approx(whole.pairs)


def test_in_one_stream_servers_end_with_the_others(narrow: Setting) -> None:
    attention = work_of(narrow, DOCUMENTS, ping_pong=False).attention.sum(axis=0)
    assert attention[-2:].min() > 0.8 * attention.mean()
    assert attention.max() < 1.2 * attention.mean()


def test_a_plan_that_counts_linear_layers_leaves_more_to_servers(narrow: Setting) -> None:
    shares = []
    for counted in COUNTED:
        attention = work_of(narrow, DOCUMENTS, ping_pong=True, counted=counted).attention.sum(
            axis=0
        )
        shares.append(float(attention[-2:].sum() / attention.sum()))
    assert shares == sorted(shares)
    assert shares[0] == pytest.approx(2 / 8, rel=0.15)
    assert shares[-1] > 1.2 * shares[0]


def turn(linear: list[float], attention: list[float], message: float) -> Any:
    seconds = np.full(len(linear), message)
    nothing = np.zeros(len(linear))
    return Turn(np.array(linear), np.array(attention), nothing, seconds, seconds)


def seconds_of_layer(*turns: Any) -> float:
    """Of one of many, without what the first and the last wait for."""
    return (in_turns(turns, 1001) - in_turns(turns, 1)) / 1000


@pytest.mark.parametrize(
    ("turns", "seconds"),
    [
        # A trainer with one second of linear layers, then messages, and a server with two of
        # attention.
        ([turn([1.0, 0.0], [0.0, 2.0], 0.25)], 1 + 0.25 + 2 + 0.25),
        # All train: linear layers and attention follow each other, and messages hide.
        ([turn([1.0, 1.0], [2.0, 2.0], 0.25)] * 2, 6.0),
        # In turns, a server that has as much to do as the trainer is busy all the time.
        ([turn([1.0, 0.0], [0.0, 1.0], 1e-9)] * 2, 2.0),
        # The slower of both counts, whichever it is.
        ([turn([1.0, 0.0], [0.0, 2.0], 1e-9)] * 2, 4.0),
        ([turn([3.0, 0.0], [0.0, 1.0], 1e-9)] * 2, 6.0),
        # Messages go one after another: a server's next rows come after its last outputs have left,
        # and nothing hides either.
        ([turn([1.0, 0.0], [0.0, 1.0], 0.25)] * 2, 2 + 0.25 + 0.25),
        ([turn([1.0, 0.0], [0.5, 1.5], 0.25)] * 2, 3 + 0.25 + 0.25),
        # With less to do, it waits anyway, and the trainer is busy all the time.
        ([turn([1.0, 0.0], [0.5, 1.25], 0.25)] * 2, 3.0),
    ],
)
def test_ranks_take_turns(turns: list[Any], seconds: float) -> None:
    assert seconds_of_layer(*turns) == pytest.approx(seconds, rel=1e-3)


def test_who_sends_nothing_waits_for_nobody() -> None:
    assert in_turns([turn([1.0, 3.0], [2.0, 1.0], 0.0)], 10) == 40


@pytest.mark.parametrize("name", ["dealt", "dealt-ping-pong"])
def test_in_place_layer_by_layer_is_what_sums_of_ranks_say(setting: Setting, name: str) -> None:
    wide = replace(setting, ranks=16, tokens_per_rank=32768, checkpointing="selective")
    (lengths,) = find_distribution("pretrain", 131072).draw_batches(wide.tokens, 1)
    summed = predict_step(wide, [lengths], STRATEGIES[name])
    followed = predicted(
        Devices.all_training(wide), wide, lengths, ping_pong=name.endswith("ping-pong")
    )
    assert summed is not None
    # One waits for the last rank of each message, the other for the last rank of all seconds.
    assert followed.step_seconds == pytest.approx(summed.step_seconds, rel=0.025)
    assert followed.step_seconds >= 0.999 * summed.step_seconds


@pytest.mark.parametrize(
    ("servers", "each_node", "change"),
    [
        (1, False, {}),
        (7, False, {}),
        (8, False, {"ranks": 16}),
        (4, True, {"ranks": 16}),
        (
            4,
            False,
            {
                "ranks": 16,
                "tensor": 2,
                "ranks_per_node": 4,
                "sharding": "zero1",
                "micro_batches": 2,
            },
        ),
        (
            2,
            False,
            {
                "checkpointing": "full",
                "model": replace(find_model("llama-3-8b"), window=2048, windowed_layers=16),
            },
        ),
        (2, False, {"model": replace(find_model("llama-3-8b"), window=64, windowed_layers=32)}),
    ],
)
def test_no_pool_is_faster_than_the_ideal(
    setting: Setting, servers: int, each_node: bool, change: dict[str, Any]
) -> None:
    arranged = replace(setting, **change)
    documents = replace(find_distribution("prolong", 65536), seed=3)
    found = simulate(arranged, documents, pools(servers, each_node=each_node), batches=2)
    assert len(found) == 2
    ideal = np.mean(
        [
            ideal_seconds(arranged, step)
            for step in documents.draw_steps(arranged.tokens, arranged.micro_batches, 2)
        ]
    )
    for step in found:
        assert step.step_seconds >= 0.999 * ideal
        assert 0 < step.idle_share < 1
        assert step.exposed_share >= 0
        assert step.attention_share == pytest.approx(1)
        assert step.between_bytes is not None


@pytest.mark.parametrize("lengths", [[131072], [131071, 1], [1] * 64])
def test_few_documents_and_few_tokens(setting: Setting, lengths: list[int]) -> None:
    arranged = replace(setting, tokens_per_rank=sum(lengths) // 8)
    for step in simulate(arranged, from_list(lengths, "few"), pools(6), batches=1):
        assert np.isfinite(step.step_seconds)
        assert step.most_tokens >= sum(lengths) / 2


def test_what_servers_do_not_train_others_do(setting: Setting) -> None:
    """Documents without much attention: half of the devices stand still, and the others have twice
    the linear layers.
    """
    half = replace(setting, sharding="ddp")
    (step,) = simulate(half, find_distribution("equal:256", 256), pools(4)[:1], batches=1)
    assert step.step_seconds == pytest.approx(2 * ideal_seconds(half, [np.full(512, 256)]), rel=0.1)
    assert step.idle_share == pytest.approx(0.5, abs=0.1)
    (place,) = simulate(half, find_distribution("equal:256", 256), ["dealt"], batches=1)
    assert step.most_tokens == 2 * place.most_tokens
    assert step.peak_bytes > 1.2 * place.peak_bytes


def test_weights_are_sharded_over_those_that_train(setting: Setting) -> None:
    (step,) = simulate(setting, find_distribution("equal:256", 256), pools(4)[:1], batches=1)
    half = replace(setting, ranks=4, tokens_per_rank=2 * setting.tokens_per_rank)
    assert step.peak_bytes == find_fullest_moment(half, half.tokens_per_rank).total


def test_seconds_without_work_make_a_step_longer_and_nobody_busy(setting: Setting) -> None:
    nothing, idle = np.zeros((2, 2)), np.array([[1.0, 0.0], [0.0, 5.0]])
    work = MicroBatchWork(
        nothing[0], nothing, nothing, nothing[0], nothing[0], 0.0, meeting=2, idle=idle
    )
    timeline = run_data_parallel(setting, [work], [np.array([[1.0, 3.0], [4.0, 1.0]])])
    assert timeline.seconds == 3 + 6
    assert timeline.busy.tolist() == [5, 4]


def test_servers_have_nodes_of_their_own_or_places_in_each(setting: Setting) -> None:
    wide = replace(setting, ranks=32)
    assert np.flatnonzero(~Servers(8).training(wide)).tolist() == list(range(24, 32))
    assert np.flatnonzero(~Servers(8, each_node=True).training(wide)).tolist() == [
        6,
        7,
        14,
        15,
        22,
        23,
        30,
        31,
    ]
    assert np.flatnonzero(~Servers(8).training(replace(wide, tensor=8))).tolist() == [3]
    assert np.flatnonzero(
        ~Servers(8, each_node=True).training(replace(wide, tensor=2))
    ).tolist() == [3, 7, 11, 15]


@pytest.mark.parametrize(
    ("servers", "change", "message"),
    [
        (Servers(8), {}, "somebody has to train"),
        (Servers(-1), {}, "somebody has to train"),
        (Servers(3), {"tensor": 2}, "must be a multiple of 2"),
        (Servers(4), {"ranks": 32}, "must be a multiple of 8"),
        (Servers(6, each_node=True), {"ranks": 32}, "must be a multiple of 4"),
        (Servers(2), {"stages": 2}, "without stages"),
        (Servers(8), {"ranks": 1024}, "of at most 512 ranks"),
    ],
)
def test_pools_that_cannot_be_laid_out_are_refused(
    setting: Setting, servers: Any, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        servers.training(replace(setting, **change))


def unlike(setting: Setting, tokens: FloatArray, speed: float) -> Any:
    speeds = np.where(np.arange(setting.group) < setting.group // 2, 1.0, speed)
    return Devices(tokens, speeds, speeds)


def test_slow_devices_delay_steps_unless_given_fewer_tokens(setting: Setting) -> None:
    """Slow devices hold a step up unless they hold fewer tokens."""
    wide = replace(setting, checkpointing="selective", sharding="ddp")
    (lengths,) = find_distribution("pretrain", 8192).draw_batches(wide.tokens, 1)
    ones, slower = np.ones(8), np.where(np.arange(8) < 4, 1.0, 0.5)
    even = predicted(Devices.all_training(wide), wide, lengths, ping_pong=True).step_seconds
    equal, by_speed = (
        predicted(unlike(wide, tokens, 0.5), wide, lengths, ping_pong=True)
        for tokens in (ones, slower)
    )
    assert 0.97 * even / 0.75 < by_speed.step_seconds < 0.85 * equal.step_seconds
    linear = estimate_linear_seconds(wide, np.full(1, float(wide.tokens_per_rank))).sum()
    assert equal.step_seconds > 2 * linear, "that is what the linear layers of the slow ones take"
    assert by_speed.idle_share < 0.1 < equal.idle_share


def test_devices_half_as_fast_take_twice_as_long(setting: Setting) -> None:
    wide = replace(setting, checkpointing="selective")
    (lengths,) = find_distribution("pretrain", 16384).draw_batches(wide.tokens, 1)
    ones = np.ones(8)
    even, slow = (
        predicted(Devices(ones, ones * speed, ones * speed), wide, lengths, ping_pong=True)
        for speed in (1.0, 0.5)
    )
    rest = estimate_optimizer_seconds(wide)
    assert even.exposed_seconds == pytest.approx(0, abs=0.01 * even.step_seconds)
    assert slow.step_seconds - slow.weight_exposed_seconds - rest == pytest.approx(
        2 * (even.step_seconds - even.weight_exposed_seconds - rest), rel=0.01
    )
