"""`simulate`: predicted seconds, waiting, communication and memory of a step, for each strategy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from hf_distca.errors import ConfigError
from hf_distca.schedule.cost import count_causal_pairs
from hf_distca.schedule.layout import FloatArray, IntArray
from hf_distca.tools.advise.document_lengths import DocumentSource
from simulator.loader_rules import draw_steps
from simulator.memory import RankMemory, compute_host_bytes, find_fullest_moment
from simulator.setting import Setting
from simulator.strategies import STRATEGIES, Strategy, find_strategy
from simulator.work import (
    Candidate,
    Directions,
    MicroBatchWork,
    estimate_head_seconds,
    estimate_layer_seconds,
    estimate_optimizer_seconds,
    estimate_tensor_seconds,
    estimate_weight_exchange,
)

# Strategies that skip more than this part of attention train on different documents: they are shown
# but not compared.
_SKIPPED = 0.01
_MOST_BATCHES = 100_000
_TIE = 1e-3  # strategies tie if their steps differ by at most this fraction


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted step of a strategy. Over several batches, figures are means, and memory is the
    largest.

    Attributes:
        strategy, title: name of the strategy, and its name in tables.
        step_seconds: seconds of a step.
        idle_share: part of the step in which the mean rank waits for others: stragglers and
            pipeline bubbles.
        exposed_share: part of the step in which the mean rank waits for messages of core attention.
        hidden_seconds, exposed_seconds: seconds of these messages on the mean rank, hidden behind
            compute and not hidden.
        peak_bytes: largest memory of a rank.
        memory: terms of this memory, and offloaded bytes.
        fits: whether the device and its host have enough memory.
        attention_share: computed query-key pairs, relative to those of whole documents.
        most_tokens: tokens of a micro-batch on the fullest rank.
        degree: most frequent number of ranks that share a row, if the strategy chooses it.
    """

    strategy: str
    title: str
    step_seconds: float
    idle_share: float
    exposed_share: float
    hidden_seconds: float
    exposed_seconds: float
    peak_bytes: float
    memory: RankMemory
    fits: bool
    attention_share: float
    most_tokens: int
    degree: int | None

    @property
    def comparable(self) -> bool:
        """Whether the step fits, and computes the attention of whole documents."""
        return self.fits and self.attention_share >= 1 - _SKIPPED


def predict_step(
    setting: Setting, batches: Sequence[IntArray], strategy: Strategy
) -> Prediction | None:
    """Predict the step of these micro-batches of the attention group, each given by its document
    lengths; return None if the strategy cannot run them.
    """
    # hf-distca keeps the outputs of attention.
    if strategy.disaggregated and setting.checkpointing == "full":
        setting = replace(setting, checkpointing="selective")
    return min(
        (
            _predict_candidate(setting, candidate, strategy, batches)
            for candidate in strategy.candidates(setting, batches)
        ),
        key=lambda step: (not step.fits, step.attention_share < 1 - _SKIPPED, step.step_seconds),
        default=None,
    )


def _predict_candidate(
    setting: Setting, candidate: Candidate, strategy: Strategy, batches: Sequence[IntArray]
) -> Prediction:
    works = candidate.works
    stages = setting.stages
    parts = [estimate_rank_seconds(setting, work) for work in works]
    timeline_of = (
        run_same_phase
        if candidate.ticks
        else run_one_forward_one_backward
        if stages > 1
        else run_data_parallel
    )
    timeline = timeline_of(setting, works, parts)
    forward, backward = (
        float(np.mean([part[direction].mean() for part in parts])) / stages for direction in (0, 1)
    )
    weights = estimate_weight_exchange(setting, forward, backward)
    step = timeline.seconds + weights + estimate_optimizer_seconds(setting)
    # Sums per rank: with ticks, each work has the ranks of all stages; otherwise each rank
    # represents a pipeline.
    exposed = sum(float(work.exposed.sum(axis=0).mean()) for work in works) / stages
    wire = sum(float(work.wire.mean()) for work in works) / stages
    tokens = np.max([work.tokens for work in works], axis=0)
    received, kept = (
        np.max([getattr(work, name) for work in works], axis=0) for name in ("received", "kept")
    )
    memory = find_fullest_moment(setting, tokens, received, kept, same_phase=candidate.ticks)
    peak = float(memory.total)
    whole = float(
        sum(
            count_causal_pairs(n, n, window).sum()
            for n in batches
            for window, _ in setting.model.kinds
        )
    )
    counted = stages if candidate.ticks else 1
    return Prediction(
        strategy=strategy.name,
        title=strategy.title,
        step_seconds=step,
        idle_share=(timeline.seconds - float(timeline.busy.mean())) / step,
        exposed_share=exposed / step,
        hidden_seconds=max(wire - exposed, 0.0),
        exposed_seconds=exposed,
        peak_bytes=peak,
        memory=memory,
        fits=peak <= setting.hardware.memory_bytes
        and float(memory.host) <= setting.hardware.host_bytes,
        attention_share=sum(work.pairs for work in works) / counted / whole,
        most_tokens=int(tokens.max()),
        degree=candidate.degree,
    )


def simulate(
    setting: Setting,
    documents: DocumentSource,
    strategies: Iterable[str | Strategy] = tuple(STRATEGIES),
    *,
    batches: int = 10,
    told: Callable[[], object] = lambda: None,
) -> list[Prediction]:
    """Predict steps of several global batches under each strategy.

    Args:
        setting: the simulated setting.
        documents: source of lengths.
        strategies: names of `STRATEGIES`, or strategies.
        batches: number of global batches.
        told: function that is called after each strategy of each batch.

    Raises:
        ConfigError: if a strategy is not known, none can run, or `batches` is out of range.
        LayoutError: if a document is longer than a global batch.
    """
    chosen = list({strategy.name: strategy for strategy in map(find_strategy, strategies)}.values())
    if type(batches) is not int or not 1 <= batches <= _MOST_BATCHES:
        raise ConfigError(f"{batches=} must be a whole number from 1 to {_MOST_BATCHES}.")
    predicted: dict[str, list[Prediction]] = {strategy.name: [] for strategy in chosen}
    for lengths in draw_steps(documents, setting.tokens, setting.micro_batches, batches):
        for strategy in chosen:
            step = predict_step(setting, lengths, strategy)
            told()
            if step is not None:
                predicted[step.strategy].append(step)
    able = [_average_steps(steps) for steps in predicted.values() if len(steps) == batches]
    if not able:
        raise ConfigError(
            f"none of {', '.join(predicted) or 'no strategies'} can run {batches} such"
            f" batch{'es' if batches > 1 else ''}: name another one of the strategies."
        )
    return able


def _average_steps(steps: list[Prediction]) -> Prediction:
    degrees = [step.degree for step in steps]
    fullest_step = max(steps, key=lambda step: step.peak_bytes)
    means: dict[str, Any] = {
        field.name: float(np.mean([getattr(step, field.name) for step in steps]))
        for field in fields(Prediction)
        if field.name.endswith(("_seconds", "_share"))
    }
    return replace(
        steps[0],
        **means,
        peak_bytes=fullest_step.peak_bytes,
        memory=fullest_step.memory,
        fits=all(step.fits for step in steps),
        most_tokens=max(step.most_tokens for step in steps),
        degree=max(set(degrees), key=degrees.count),
    )


def find_best(predictions: Iterable[Prediction], names: Collection[str]) -> Prediction | None:
    """Return the fastest of the named strategies that fits and computes the attention of whole
    documents; None if none does.
    """
    return min(
        (step for step in predictions if step.strategy in names and step.comparable),
        key=lambda step: step.step_seconds,
        default=None,
    )


def find_best_alternative(predictions: Iterable[Prediction]) -> Prediction | None:
    """Return the fastest strategy that does not disaggregate attention, the simplest of equals."""
    names = [name for name, strategy in STRATEGIES.items() if not strategy.disaggregated]
    steps = {step.strategy: step for step in predictions}
    best = find_best(steps.values(), names)
    if best is None:
        return None
    most = best.step_seconds * (1 + _TIE)
    ties = (step for name in names if (step := find_best(steps.values(), [name])) is not None)
    return next(step for step in ties if step.step_seconds <= most)


class Timeline(NamedTuple):
    """A step, without exchanges of weights.

    Attributes:
        seconds: seconds until the last rank is done.
        busy: seconds for which each rank computes or exchanges.
    """

    seconds: float
    busy: FloatArray


def estimate_linear_seconds(setting: Setting, tokens: FloatArray) -> Directions:
    """Return the seconds of all linear layers for the tokens of each rank, shape (ranks,).

    With checkpointing, backward also runs their forward.
    """
    forward, backward = setting.model.layers * (
        estimate_layer_seconds(setting, tokens) + estimate_tensor_seconds(setting, tokens)
    )
    return np.stack([forward, backward if setting.checkpointing == "none" else backward + forward])


def estimate_rank_seconds(setting: Setting, work: MicroBatchWork) -> Directions:
    """Return the seconds of each rank for a micro-batch, all layers, without the output layer.

    Nothing hides the copies of offloading, as in transformers (`activation_checkpointing_kwargs`).
    """
    copies = setting.stages * compute_host_bytes(setting) * work.tokens / setting.hardware.host_rate
    seconds = estimate_linear_seconds(setting, work.tokens) + work.attention + work.exposed + copies
    if setting.checkpointing == "full":
        seconds[1] += work.attention[0] + work.exposed[0]
    return seconds


def run_data_parallel(
    setting: Setting, works: Sequence[MicroBatchWork], parts: Sequence[Directions]
) -> Timeline:
    """Run the micro-batches of every rank, with `parts` from `estimate_rank_seconds`; at the end,
    all ranks wait for the last one.

    Ranks that exchange in every layer also wait for each other in each direction of a micro-batch.
    """
    busy, ends = np.zeros((2, len(works[0].tokens)))
    for work, (forward, backward) in zip(works, parts, strict=True):
        for seconds in (forward, estimate_head_seconds(setting, work.tokens), backward):
            busy = busy + seconds
            ends = ends + seconds
            if work.meeting > 1:
                ends = np.repeat(ends.reshape(-1, work.meeting).max(axis=1), work.meeting)
    return Timeline(float(ends.max()), busy)


def _estimate_hop_seconds(setting: Setting, tokens: FloatArray) -> FloatArray:
    """Return the seconds in which a stage's outputs travel to the next stage."""
    bytes_ = tokens * setting.model.hidden * setting.hardware.element_bytes / setting.tensor
    return np.asarray(bytes_ / setting.hardware.link_rate + setting.hardware.exchange_seconds)


def run_one_forward_one_backward(
    setting: Setting, works: Sequence[MicroBatchWork], parts: Sequence[Directions]
) -> Timeline:
    """Run 1F1B: each rank of the group represents a pipeline with equally many layers per stage.

    If all calls took one tick, stage s of p would run the forward of micro-batch m in tick 2 m + s
    or earlier, and its backward in tick 2 (m + p) - 1 - s. In the order of these ticks, every call
    follows the calls for which it waits.
    """
    stages = setting.stages
    count = len(works)
    calls = [(2 * m + s, m, s, 0) for m in range(count) for s in range(stages)]
    calls += [(2 * (m + stages) - 1 - s, m, s, 1) for m in range(count) for s in range(stages)]
    heads = [estimate_head_seconds(setting, work.tokens) for work in works]
    hops = [_estimate_hop_seconds(setting, work.tokens) for work in works]
    free, busy = np.zeros((2, stages, len(works[0].tokens)))
    ready = [np.zeros_like(hop) for hop in hops]  # when a micro-batch arrives at its next call
    for _, number, stage, direction in sorted(calls):
        seconds = parts[number][direction] / stages
        last = stage == stages - 1
        if last:
            seconds = seconds + heads[number] * (2 / 3 if direction else 1 / 3)
        free[stage] = np.maximum(free[stage], ready[number]) + seconds
        busy[stage] += seconds
        ready[number] = free[stage] + (0.0 if last and not direction else hops[number])
    return Timeline(float(free.max()), busy.ravel())


def run_same_phase(
    setting: Setting, ticks: Sequence[MicroBatchWork], parts: Sequence[Directions]
) -> Timeline:
    """Run ticks: all stages run forward or all run backward; stages without a micro-batch serve.

    Each item of `ticks` is the work of all stages' ranks in one tick of one direction, stage by
    stage, in all layers of the model. The ticks of the other direction are the same.
    """
    seconds = 0.0
    busy = np.zeros(len(ticks[0].tokens))
    last = np.arange(len(busy)) >= len(busy) - setting.group
    for tick, both in zip(ticks, parts, strict=True):
        head = np.where(last, estimate_head_seconds(setting, tick.tokens), 0.0)
        hop = _estimate_hop_seconds(setting, tick.tokens).max()
        for part, share in zip(both, (1 / 3, 2 / 3), strict=True):
            taken = part / setting.stages + head * share
            busy += taken
            seconds += float(taken.max() + hop)
    return Timeline(seconds, busy)
