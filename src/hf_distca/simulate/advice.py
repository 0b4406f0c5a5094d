"""What predictions mean for somebody who has these documents: what hf-distca would buy, and with which settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hf_distca.simulate.predict import Prediction, best_alternative, best_of
from hf_distca.simulate.setting import Setting
from hf_distca.simulate.strategies import OURS

__all__ = ["Advice", "advise"]

# Part of a step below which a gain is none: the scheduler moves nothing for less (DistCAConfig.min_gain).
_NOTHING = 0.02
# What needs nothing new, the simplest first.
_SIMPLE = ("plain", "batch-rebalance", "lpt")


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do.

    Attributes:
        worthwhile: whether hf-distca is faster by more than 2 % than anything else that fits and keeps documents whole, the
            published DistCA left aside.
        ours, other: the fastest of hf-distca's ways and of all others; None if none fits.
        gain: seconds of a step of the other over ours; None if there is no pair.
        text: why, in sentences.
        settings: what to set, a line each.
    """

    worthwhile: bool
    ours: str | None
    other: str | None
    gain: float | None
    text: str
    settings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The advice as a dictionary that `json` can write."""
        return asdict(self)


def advise(setting: Setting, predictions: Sequence[Prediction]) -> Advice:
    """Advise by the predictions of all strategies.

    Args:
        setting: what was simulated.
        found: predictions of `simulate`.
    """
    ours, other = best_of(predictions, OURS), best_alternative(predictions)
    by_name = {prediction.strategy: prediction for prediction in predictions}
    if ours is None:
        text = (
            f"hf-distca does not fit: every way needs more than the {setting.hardware.memory_bytes / 1e9:.0f} GB of a device. "
            "Use fewer tokens a rank, checkpointing, or tensor parallelism."
        )
        return Advice(False, None, other.strategy if other else None, None, text, ())
    sentences = [_documents(by_name)]
    if other is None:
        sentences.append(
            f"Only hf-distca fits and keeps these documents whole: {ours.title} takes {ours.step_seconds:.3g} s a step."
        )
        return Advice(True, ours.strategy, None, None, " ".join(filter(None, sentences)), _settings(ours))
    gain = other.step_seconds / ours.step_seconds
    if gain < 1 + _NOTHING:
        simple = [best_of(predictions, [name]) for name in _SIMPLE]
        enough = [
            prediction
            for prediction in simple
            if prediction is not None and prediction.step_seconds <= ours.step_seconds * (1 + _NOTHING)
        ]
        instead = enough[0] if enough else other
        sentences.append(
            f"hf-distca buys nothing here: {instead.title} takes {instead.step_seconds:.3g} s a step, {ours.title} "
            f"{ours.step_seconds:.3g} s. Use {instead.title}."
        )
        return Advice(False, ours.strategy, other.strategy, gain, " ".join(filter(None, sentences)), ())
    sentences.append(
        f"{ours.title} takes {ours.step_seconds:.3g} s a step; the best of the others, {_with_degree(other)}, takes "
        f"{other.step_seconds:.3g} s: {gain:.2f} times as long. {_why(setting, ours, other)}"
    )
    plain = by_name.get("plain")
    if plain is not None and not plain.comparable:
        lost = 1 - plain.attention_share
        sentences.append(f"Packed rows take {plain.step_seconds:.3g} s, and their ends cut {lost:.0%} of the attention off.")
    return Advice(True, ours.strategy, other.strategy, gain, " ".join(filter(None, sentences)), _settings(ours))


def _with_degree(prediction: Prediction) -> str:
    return (
        prediction.title
        if prediction.degree is None
        else f"{prediction.title} over {prediction.degree} rank{'s' if prediction.degree > 1 else ''}"
    )


def _documents(by_name: dict[str, Prediction]) -> str:
    """What documents do to a step that balances nothing."""
    loader = by_name.get("lpt")
    if loader is None:
        return ""
    if loader.idle_share > 0.5:
        return f"Some documents are longer than a fair share: balanced whole, ranks would wait {loader.idle_share:.0%} of a step."
    return f"Balanced whole in the loader, ranks wait {loader.idle_share:.0%} of a step for the slowest one."


def _why(setting: Setting, ours: Prediction, other: Prediction) -> str:
    parts = []
    if other.idle_share > ours.idle_share + _NOTHING:
        parts.append(f"ranks wait {other.idle_share:.0%} of a step for slower ones")
    if other.exposed_share > ours.exposed_share + _NOTHING:
        parts.append(f"{other.exposed_share:.0%} of a step goes to waiting for messages")
    if setting.checkpointing == "full":
        parts.append("checkpointing computes attention twice (hf-distca: once)")
    return f"There, {' and '.join(parts)}." if parts else "Nothing single makes the difference: ranks are more even in all."


def _settings(ours: Prediction) -> tuple[str, ...]:
    lines = ['attn_implementation="distca"']
    if ours.strategy.startswith("dealt"):
        lines.append("a data set of shares, hf_distca.document_shares: documents are dealt to ranks")
    if ours.strategy.endswith("ping-pong"):
        lines.append("hf_distca.configure(hf_distca.DistCAConfig(ping_pong=True))")
    return tuple(lines)
