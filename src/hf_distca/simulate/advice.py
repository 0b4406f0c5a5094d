"""Advice from predictions: the gain of hf-distca on given documents, and the assumptions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hf_distca.model_shape import ModelShape
from hf_distca.simulate.document_lengths import DocumentSource
from hf_distca.simulate.predict import Prediction, find_best, find_best_alternative
from hf_distca.simulate.setting import Setting
from hf_distca.simulate.strategies import OURS, STRATEGIES, Strategy, find_strategy

# Part of a step below which a gain is none: the scheduler moves nothing for less
# (DistCAConfig.min_gain).
_NOTHING = 0.02
# Of predicted steps that were measured, the median (benchmarks/simulated/simulator_validation.py).
_ERROR = 0.06
# How to have the others with Hugging Face, the simplest first. Of the rest no library for it has
# them with packed documents.
_HOW = {
    "plain": "transformers' DataCollatorWithFlattening, or TRL's packing=True",
    "batch-rebalance": 'TrainingArguments(train_sampling_strategy="batch_rebalance")',
    "ulysses": "accelerate's ParallelismConfig(sp_size=...)",
}

_SHARDING = {
    "fsdp": (
        "weights, gradients and optimizer are sharded over the attention group; weights are"
        " gathered for both directions of every micro-batch, a layer ahead (FSDP2, ZeRO-3)"
    ),
    "zero1": (
        "the optimizer is sharded over the attention group; gradients are reduced in float32 beside"
        " backward, weights are gathered beside forward, once a step (ZeRO-1, Megatron's"
        " distributed optimizer)"
    ),
    "ddp": "nothing is sharded; gradients are reduced in float32 beside backward, once a step",
}
_CHECKPOINTING = {
    "none": "no activation checkpointing",
    "selective": "linear layers are repeated in backward, attention is not",
    "full": (
        "layers are repeated in backward, attention and its messages included; hf-distca keeps"
        " attention's output"
    ),
}


@dataclass(frozen=True, slots=True)
class Advice:
    """Advice for a user.

    Attributes:
        worthwhile: whether hf-distca is faster than anything else that fits and keeps documents
            whole, by more than the error of predictions.
        ours, other: the fastest of hf-distca's ways and of all others; None if none fits.
        gain: seconds of a step of the other over ours; None if there is no pair.
        text: the reasons, in sentences.
        settings: the settings to use, a line each.
    """

    worthwhile: bool
    ours: str | None
    other: str | None
    gain: float | None
    text: str
    settings: tuple[str, ...]


def advise(setting: Setting, predictions: Sequence[Prediction]) -> Advice:
    """Advise by the predictions of all strategies, made by `simulate` for this setting."""
    ours = find_best(predictions, OURS)
    other = find_best_alternative(predictions)
    names = ours.strategy if ours else None, other.strategy if other else None
    if ours is None:
        return Advice(
            False,
            *names,
            None,
            "hf-distca does not fit: every way needs more than the"
            f" {setting.hardware.memory_bytes / 1e9:.0f} GB of a device. Use fewer tokens a rank,"
            " checkpointing, or tensor parallelism.",
            (),
        )
    by_name = {prediction.strategy: prediction for prediction in predictions}
    about = _describe_loader(by_name["lpt"]) + " " if "lpt" in by_name else ""
    if other is None:
        return Advice(
            True,
            *names,
            None,
            f"{about}Only hf-distca fits and keeps these documents whole: {ours.title} takes"
            f" {ours.step_seconds:.3g} s a step.",
            _format_settings(setting, ours),
        )
    gain = other.step_seconds / ours.step_seconds
    if gain < 1 + _NOTHING:
        text, settings = _name_alternative(setting, ours, other, predictions)
        return Advice(False, *names, gain, about + text, settings)
    ranks = (
        ""
        if other.degree is None
        else f" over {other.degree} rank{'s' if other.degree > 1 else ''}"
    )
    text = (
        f"{ours.title} takes {ours.step_seconds:.3g} s a step; the best of the others,"
        f" {other.title}{ranks}, takes {other.step_seconds:.3g} s: {gain:.2f} times as long."
        f" {_explain_choice(setting, ours, other)}"
    )
    text += _describe_node_traffic(setting, ours, predictions)
    plain = by_name.get("plain")
    if plain is not None and not plain.comparable:
        text += (
            f" Packed rows take {plain.step_seconds:.3g} s, and their ends cut"
            f" {1 - plain.attention_share:.0%} of the attention off."
        )
    if gain < 1 + _ERROR:
        text += (
            f" Predictions are that far off ({_ERROR:.0%} in the median of the steps that were"
            " measured): try it first."
        )
    return Advice(gain >= 1 + _ERROR, *names, gain, about + text, _format_settings(setting, ours))


def _describe_node_traffic(
    setting: Setting, ours: Prediction, predictions: Sequence[Prediction]
) -> str:
    """Say what crosses between nodes, and which way of ours sends far less and is nearly as
    fast.
    """
    if setting.ranks <= setting.ranks_per_node:
        return ""

    def format_gigabytes(step: Prediction) -> float:
        return (step.between_bytes or 0.0) / setting.ranks / 1e9

    text = (
        f" Of hf-distca's messages, {format_gigabytes(ours):.2g} GB a rank and step go to other"
        " nodes"
    )
    near = [
        step
        for step in predictions
        if step.strategy in OURS
        and step.comparable
        and step.step_seconds < ours.step_seconds * (1 + _NOTHING)
    ]
    least = min(near, key=format_gigabytes)
    if 2 * format_gigabytes(least) < format_gigabytes(ours):
        text += (
            f"; {least.title} would take {least.step_seconds / ours.step_seconds - 1:.1%} longer"
            f" and send {format_gigabytes(least):.2g} GB there"
        )
    return text + "."


def _name_alternative(
    setting: Setting, ours: Prediction, other: Prediction, predictions: Sequence[Prediction]
) -> tuple[str, tuple[str, ...]]:
    """Name another way that is as fast, and its settings."""
    took = f"takes {{:.3g}} s a step, {ours.title} {ours.step_seconds:.3g} s"
    ready = [step for name in _HOW if (step := find_best(predictions, [name])) is not None]
    for step in ready:
        if step.step_seconds <= ours.step_seconds * (1 + _ERROR):
            return (
                f"hf-distca gains nothing here: {step.title} {took.format(step.step_seconds)}. Use"
                f" {step.title}: {_HOW[step.strategy]}.",
                (),
            )
    text = (
        f"hf-distca gains nothing over {other.title}: that {took.format(other.step_seconds)}. But"
        " no library for Hugging Face has it"
    )
    if ready:
        best = min(ready, key=lambda step: step.step_seconds)
        text += (
            f"; the fastest that one has, {best.title}, takes {best.step_seconds:.3g} s:"
            f" {best.step_seconds / ours.step_seconds:.2f} times as long."
        )
    else:
        text += ", nor another way that fits and keeps documents whole."
    return text, _format_settings(setting, ours)


def _describe_loader(loader: Prediction) -> str:
    """Describe a step in which a loader balances whole documents."""
    if loader.idle_share > 0.5:
        return (
            "Some documents are longer than a fair share: balanced whole, ranks would wait"
            f" {loader.idle_share:.0%} of a step."
        )
    return (
        f"Balanced whole in the loader, ranks wait {loader.idle_share:.0%} of a step for the"
        " slowest one."
    )


def _explain_choice(setting: Setting, ours: Prediction, other: Prediction) -> str:
    reasons = {
        f"ranks wait {other.idle_share:.0%} of a step for slower ones": (
            other.idle_share > ours.idle_share + _NOTHING
        ),
        f"{other.exposed_share:.0%} of a step goes to waiting for messages": (
            other.exposed_share > ours.exposed_share + _NOTHING
        ),
        "checkpointing computes attention twice (hf-distca: once)": (
            setting.checkpointing == "full"
        ),
    }
    if not any(reasons.values()):
        return "Nothing single makes the difference: ranks are more even in all."
    return f"There, {' and '.join(reason for reason, holds in reasons.items() if holds)}."


def _format_settings(setting: Setting, ours: Prediction) -> tuple[str, ...]:
    """Return lines to paste into a script; if the Trainer supports it, also the command for an
    unchanged script.
    """
    tokens, changes = setting.tokens_per_rank, ""
    lines = ['model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="distca")']
    if ours.strategy.endswith("ping-pong"):
        lines.append("hf_distca.configure(hf_distca.DistCAConfig(ping_pong=True))")
        changes = " --set ping_pong=true"
    if setting.tensor * setting.stages > 1:  # what the Trainer does not do
        if ours.strategy.startswith("dealt"):
            lines.append(
                f"shares = hf_distca.document_shares(documents, tokens_per_rank={tokens},"
                " model=model)"
            )
        return tuple(lines)
    if ours.strategy.startswith("dealt"):
        lines.append(f"hf_distca.deal(trainer, tokens_per_rank={tokens})")
        changes += f" --tokens-per-rank {tokens}"
    return (
        *lines,
        f"# or: hf-distca run --attn-implementation distca{changes} accelerate launch train.py",
    )


def list_assumptions(
    setting: Setting, documents: DocumentSource, strategies: Iterable[str | Strategy] = STRATEGIES
) -> list[tuple[str, str]]:
    """List the assumptions of predictions, with sources: pairs of subject and text."""
    facts = [
        ("lengths", f"{documents.name}: {documents.source}"),
        ("model", _describe_model(setting.model)),
        *((f"hardware, {what}", text) for what, text in setting.hardware.sources),
        ("exchange", _describe_exchange(setting)),
        (
            "linear layers",
            (
                "the longer of arithmetic and memory traffic for each product (roofline), norms,"
                " rotary embedding and activation by memory traffic; backward twice as long"
            ),
        ),
        ("weights", _SHARDING[setting.sharding]),
        ("checkpointing", _CHECKPOINTING[setting.checkpointing]),
        ("memory", _describe_memory(setting)),
    ]
    if setting.profile is not None:
        facts.append(
            (
                "profile",
                (
                    f"attention and exchange by the cost model {setting.profile.name!r}, not by the"
                    " hardware's figures"
                ),
            )
        )
    if setting.tensor > 1:
        facts.append(
            (
                "tensor parallelism",
                (
                    "with sequence parallelism, four exchanges a layer and direction, hidden by"
                    " nothing"
                ),
            )
        )
    if setting.stages > 1:
        facts.append(
            (
                "pipeline",
                (
                    f"{setting.stages} stages of equally many layers, 1F1B; hf-distca runs the same"
                    " phase on all stages, 2 (m + p - 1) ticks for m micro-batches and p stages,"
                    " of which the first holds 2 p - 1 micro-batches; stages without a micro-batch"
                    " compute attention"
                ),
            )
        )
    return [
        *facts,
        (
            "all",
            (
                "nothing but what is said here takes time: no host overhead, no fragmentation, no"
                " noise, no data loading"
            ),
        ),
        *((strategy.title, strategy.about) for strategy in map(find_strategy, strategies)),
    ]


def _describe_model(model: ModelShape) -> str:
    text = (
        f"{model.name}: {model.parameters / 1e9:.1f} billion weights, {model.layers} layers, bf16"
    )
    if model.active is not None:
        text += (
            f"; {model.attending} times core attention, of which {model.windowed_layers} with a"
            f" window; a token meets {model.active / 1e9:.1f} billion weights of the layers,"
            " counted in the model of transformers. What layers have instead of attention is taken"
            " for linear layers; where heads differ, those of layers without a window count;"
            " experts are evenly used, and every rank has all of them"
        )
    return text


def _describe_memory(setting: Setting) -> str:
    loss = "of all tokens" if setting.loss_tokens is None else f"of {setting.loss_tokens} tokens"
    layers = "fused" if setting.fused else "transformers'"
    return (
        f"what autograd saves, with {layers} norms and gated activations; logits {loss} at a time;"
        " Adam in float32; nothing for fragmentation, libraries and communicators"
    )


def _describe_exchange(setting: Setting) -> str:
    cost = setting.make_cost_model()
    inside = setting.nodes.without_irrelevant_nodes(cost).per_node
    rates = f"{cost.exchange_bytes_per_second / 1e9:.0f} GB/s from each rank"
    if inside is not None and cost.node_bytes_per_second is not None:
        rates += (
            f" to other nodes, {cost.node_bytes_per_second / 1e9:.0f} GB/s to the {inside} of its"
            " own, both at once; documents are dealt to nodes first, and work is moved inside them"
            " first"
        )
    groups = setting.group // setting.shared
    apart = f", {groups} groups of hf-distca have documents of their own" if groups > 1 else ""
    return f"{rates}; {setting.shared} ranks share attention{apart}"
