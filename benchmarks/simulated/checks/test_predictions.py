"""Predicted steps: properties of every prediction, and pipelines compared with known results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hf_distca.errors import ConfigError
from hf_distca.schedule.cost import count_causal_pairs
from hf_distca.schedule.layout import IntArray
from hf_distca.tools.advise.document_lengths import find_distribution, from_list
from simulator.hardware import DEVICES, find_hardware
from simulator.loader_rules import draw_steps
from simulator.memory import compute_activation_bytes, find_fullest_moment
from simulator.model_shape import KNOWN_MODELS, find_model
from simulator.predict import (
    estimate_linear_seconds,
    estimate_rank_seconds,
    find_best,
    find_best_alternative,
    predict_step,
    run_data_parallel,
    run_one_forward_one_backward,
    run_same_phase,
    simulate,
)
from simulator.setting import Setting
from simulator.strategies import OURS, STRATEGIES, Strategy
from simulator.work import MicroBatchWork, estimate_head_seconds
from turns import in_turn

# Attention in a quarter of the layers, and experts of which a token uses a few.
HYBRID = replace(find_model("llama-3-8b"), attention_layers=8, weights=40 * 10**9, active=5 * 10**9)
SINGLE = [name for name in STRATEGIES if name not in ("given-ping-pong", "dealt-ping-pong")]


def compute_ideal_seconds(setting: Setting, batches: Sequence[IntArray]) -> float:
    """Return the seconds of a step in which every device has an equal part of all work and never
    waits: a lower bound.
    """
    total = 0.0
    for lengths in batches:
        tokens = np.full(1, float(lengths.sum()) / setting.group)
        linear = estimate_linear_seconds(setting, tokens).sum()
        total += float(linear + estimate_head_seconds(setting, tokens)[0])
        for window, layers in setting.model.kinds:
            seconds = setting.make_cost_model(window).estimate_seconds(lengths, lengths)
            total += layers * float(seconds.sum()) / setting.group
    return total / setting.stages


def test_equal_documents_leave_nothing_to_gain(setting: Setting) -> None:
    found = {
        one.strategy: one
        for one in simulate(setting, find_distribution("equal:2048", 16384), SINGLE, batches=1)
    }
    assert len(found) == len(SINGLE)
    for one in found.values():
        assert one.step_seconds == pytest.approx(found["plain"].step_seconds, rel=0.02), (
            one.strategy
        )
        assert one.idle_share == pytest.approx(0, abs=0.02)
        assert one.exposed_seconds == 0
        assert one.attention_share == 1


@pytest.mark.parametrize(
    ("lengths", "ranks", "tokens"),
    [([8192], 8, 8192), (range(1, 101), 8, 4096), (range(1, 101), 16, 16384)],
)
def test_best_alternative_is_packed_rows_if_strategies_tie(
    setting: Setting, lengths: Sequence[int], ranks: int, tokens: int
) -> None:
    even = replace(setting, ranks=ranks, tokens_per_rank=tokens, checkpointing="full")
    other = find_best_alternative(
        simulate(even, from_list([*lengths] * 9, "even", None), batches=1)
    )
    assert other is not None
    assert other.strategy == "plain"


def test_only_shared_attention_speeds_up_a_long_document(setting: Setting) -> None:
    documents = from_list([131072, *[1024] * 128], "one long", None)
    wide = replace(setting, tokens_per_rank=32768, checkpointing="selective")
    found = {one.strategy: one for one in simulate(wide, documents, batches=1)}
    assert found["dealt"].step_seconds < 0.5 * found["lpt"].step_seconds
    assert found["dealt"].idle_share < 0.1
    assert found["lpt"].idle_share > 0.5
    assert found["plain"].attention_share < 0.5
    assert not found["plain"].comparable
    other = find_best_alternative(found.values())
    assert other is not None
    assert other.strategy not in {"plain", *OURS}
    ours = find_best(found.values(), OURS)
    assert ours is not None
    assert ours.strategy.startswith("dealt")


@pytest.mark.parametrize(
    "change",
    in_turn(
        [
            {},
            {"tensor": 2, "sharding": "zero1"},
            {"checkpointing": "full"},
            {"ranks": 16, "stages": 2, "micro_batches": 3, "sharding": "zero1"},
            {"model": replace(find_model("llama-3-8b"), window=2048, windowed_layers=16)},
            {"model": HYBRID},
        ],
        3,
        [{"model": HYBRID}],
    ),
)
def test_no_strategy_is_faster_than_the_ideal(setting: Setting, change: dict[str, object]) -> None:
    arranged = replace(setting, **change)
    documents = replace(find_distribution("prolong", 65536), seed=3)
    found = simulate(arranged, documents, batches=2)
    assert {one.strategy for one in found} >= {*OURS, "plain", "lpt", "wlb", "all-gather"}
    ideal = [
        compute_ideal_seconds(arranged, step)
        for step in draw_steps(documents, arranged.tokens, arranged.micro_batches, 2)
    ]
    for one in found:
        assert math.isfinite(one.step_seconds)
        assert 0 <= one.idle_share < 1
        assert one.exposed_seconds >= 0
        assert one.hidden_seconds >= 0
        assert 0 < one.attention_share <= 1 + 1e-9
        if one.attention_share > 1 - 1e-9:
            assert one.step_seconds >= 0.999 * np.mean(ideal), one.strategy
    assert found == simulate(arranged, documents, batches=2)


def draw_setting(generator: np.random.Generator) -> Setting:
    """Draw any model, devices and arrangement, with attention groups of 1 to 9 ranks: small groups
    reveal most errors.
    """

    def one_of(values: Iterable[Any]) -> Any:
        options = list(values)
        return options[generator.integers(len(options))]

    model = one_of(KNOWN_MODELS.values())
    if generator.random() < 0.3:
        model = replace(
            model,
            window=int(generator.integers(1, 9000)),
            windowed_layers=int(generator.integers(model.layers)),
        )
    tensor, stages = one_of([1, 1, 2, 8]), one_of([1, 1, 2, 4])
    return Setting(
        model,
        find_hardware(one_of(DEVICES)),
        int(generator.integers(1, 10)) * tensor * stages,
        int(2 ** generator.uniform(4, 17)),
        tensor,
        stages,
        micro_batches=int(generator.integers(1, 4)),
        ranks_per_node=one_of([1, 4, 8]),
        sharding=one_of(["fsdp", "zero1", "ddp"]),
        checkpointing=one_of(["none", "selective", "full"]),
    )


@pytest.mark.parametrize("seed", in_turn(range(4), 4))
def test_no_strategy_is_faster_than_the_ideal_in_random_settings(seed: int) -> None:
    generator = np.random.default_rng(seed)
    for _ in range(8):
        arranged = draw_setting(generator)
        documents = from_list(
            generator.lognormal(7, generator.uniform(0.1, 2), 99).astype(int) + 1,
            "any",
            arranged.tokens,
        )
        seeded = replace(documents, seed=seed)
        (step,) = draw_steps(seeded, arranged.tokens, arranged.micro_batches, 1)
        ideal = compute_ideal_seconds(arranged, step)
        for name, strategy in STRATEGIES.items():
            found = predict_step(arranged, step, strategy)
            if found is not None and found.attention_share > 1 - 1e-9:
                assert found.step_seconds >= 0.999 * ideal, (
                    name,
                    arranged,
                    [lengths.tolist() for lengths in step],
                )


def test_dealing_gives_every_rank_equally_many_tokens(setting: Setting) -> None:
    found = simulate(
        setting, find_distribution("prolong", 32768), ["dealt", "lpt", "wlb"], batches=2
    )
    assert [one.most_tokens > 16384 for one in found] == [False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("ping_pong", [False, True])
def test_second_attention_group_computes_only_its_own_documents(
    setting: Setting, ping_pong: bool
) -> None:
    whole = replace(setting, ranks=1024, tokens_per_rank=1024)
    lengths = np.array([32768, *[512] * 1984], dtype=np.int64)
    strategy = STRATEGIES["dealt-ping-pong" if ping_pong else "dealt"]
    (found,) = (one.works[0] for one in strategy.candidates(whole, [lengths]))
    alone = strategy.candidates(
        replace(whole, ranks=512), [np.array([512] * 1024, dtype=np.int64)]
    )[0].works[0]
    first, second = np.split(found.attention[1], 2)
    # Every call takes a least time; ping-pong has two calls.
    assert first.sum() > (1.5 if ping_pong else 2) * second.sum(), (
        "no rank of the other group computes a part of the long document"
    )
    assert second.tolist() == alone.attention[1].tolist()
    assert (found.tokens == 1024).all()
    assert found.pairs == pytest.approx(float(count_causal_pairs(lengths, lengths).sum()))


def test_messages_of_a_document_inside_a_node_use_its_fast_links(setting: Setting) -> None:
    one = replace(setting, ranks=16, tokens_per_rank=8192)
    lengths = np.array([32768, *[1024] * 96], dtype=np.int64)
    strategy = STRATEGIES["dealt"]
    within, across = (
        strategy.candidates(replace(one, ranks_per_node=n), [lengths])[0].works[0].wire
        for n in (8, 1)
    )
    assert 0 < within.max() < 0.7 * across.max()


def test_progress_callback_runs_once_per_strategy_and_batch(setting: Setting) -> None:
    told: list[int] = []
    simulate(
        setting,
        find_distribution("equal:64", 64),
        ["plain", "lpt"],
        batches=3,
        told=lambda: told.append(1),
    )
    assert len(told) == 6


def test_unknown_strategies_and_invalid_batch_counts_are_refused(setting: Setting) -> None:
    documents = find_distribution("equal:64", 64)
    with pytest.raises(ConfigError, match="strategy 'magic' is not known"):
        simulate(setting, documents, ["magic"])
    for batches in (0, -1, 10**9):
        with pytest.raises(ConfigError, match=f"batches={batches}"):
            simulate(setting, documents, ["plain"], batches=batches)


def make_micro_batch(ranks: int, forward: float = 0.0) -> MicroBatchWork:
    nothing = np.zeros((2, ranks))
    both = np.repeat([[forward], [2 * forward]], ranks, axis=1)
    return MicroBatchWork(np.full(ranks, 4096.0), both, nothing, nothing[0], nothing[0], 1.0)


def make_pipeline(setting: Setting, stages: int) -> Setting:
    """Return the setting with pipeline stages whose messages take no time."""
    hardware = replace(setting.hardware, link_gbps=1e12, exchange_seconds=0.0)
    return replace(setting, ranks=8 * stages, stages=stages, hardware=hardware)


@pytest.mark.parametrize(("meeting", "seconds"), [(1, 6.0), (2, 7.0), (4, 8.0)])
def test_exchanging_ranks_wait_for_each_other_in_each_direction(
    setting: Setting, meeting: int, seconds: float
) -> None:
    nothing = np.zeros((2, 4))
    work = MicroBatchWork(nothing[0], nothing, nothing, nothing[0], nothing[0], 0.0, meeting)
    part = np.array([[1.0, 2.0, 1.0, 0.0], [2.0, 1.0, 0.0, 6.0]])
    timeline = run_data_parallel(setting, [work], [part])
    assert timeline.seconds == seconds
    assert timeline.busy.tolist() == [3.0, 3.0, 1.0, 6.0]


@pytest.mark.parametrize(("stages", "count"), [(1, 3), (2, 1), (4, 8), (4, 2)])
def test_equal_micro_batches_leave_only_the_1f1b_bubble(
    setting: Setting, stages: int, count: int
) -> None:
    arranged = make_pipeline(setting, stages)
    works = [make_micro_batch(8, 1.0)] * count
    parts = estimate_rank_seconds(arranged, works[0])
    each = parts[:, 0].sum() / stages
    head = estimate_head_seconds(arranged, works[0].tokens)[0]
    found = run_one_forward_one_backward(arranged, works, [parts] * count)
    assert (count + stages - 1) * each <= found.seconds + 1e-9
    assert found.seconds <= (count + stages - 1) * (each + head)
    assert found.busy.sum() == pytest.approx(8 * count * (stages * each + head))


def test_all_stages_are_busy_in_every_shared_tick(setting: Setting) -> None:
    arranged = make_pipeline(setting, 2)
    tick = replace(make_micro_batch(16, 1.0), tokens=np.zeros(16))
    found = run_same_phase(arranged, [tick] * 3, [estimate_rank_seconds(arranged, tick)] * 3)
    assert found.seconds == pytest.approx(3 * 3.0 / 2)
    assert found.busy.tolist() == pytest.approx([4.5] * 16)


def test_simulated_stages_hold_as_many_micro_batches_as_real_ones(setting: Setting) -> None:
    staged = replace(setting, ranks=16, stages=4, micro_batches=8, sharding="zero1")
    documents = find_distribution("equal:2048", 16384)
    found = {one.strategy: one for one in simulate(staged, documents, ("plain", *OURS), batches=1)}
    assert set(found) == {"plain", *OURS}
    least = find_fullest_moment(staged, staged.tokens_per_rank).total
    assert found["plain"].peak_bytes == least
    each = compute_activation_bytes(staged) * staged.tokens_per_rank
    assert found["dealt"].peak_bytes - least >= 3 * each, (
        "the first of four stages holds seven micro-batches, not four"
    )


def test_ping_pong_hides_messages_in_pipeline_stages(setting: Setting) -> None:
    staged = replace(setting, ranks=16, stages=2, micro_batches=4, sharding="zero1")
    one_stream, in_turns = simulate(
        staged, find_distribution("prolong", 65536), ("dealt", "dealt-ping-pong"), batches=1
    )
    assert in_turns.exposed_seconds < 0.5 * one_stream.exposed_seconds
    assert in_turns.step_seconds < one_stream.step_seconds


def test_strategies_that_cannot_run_the_batches_are_refused(setting: Setting) -> None:
    never = Strategy("never", "runs nothing", lambda *_: [])
    with pytest.raises(ConfigError, match="none of never can run 1 such batch: name another"):
        simulate(setting, find_distribution("equal:2048", 16384), (never,), batches=1)


@pytest.mark.parametrize("lengths", [[131072], [131071, 1], [65536, 65533, 3]])
def test_one_document_may_fill_a_batch_and_leave_a_nano_batch_empty(
    setting: Setting, lengths: list[int]
) -> None:
    found = {
        one.strategy: one for one in simulate(setting, from_list(lengths, "few"), OURS, batches=2)
    }
    assert set(found) == set(OURS)
    for one in found.values():
        assert math.isfinite(one.step_seconds)
        assert one.attention_share <= 1 + 1e-9
