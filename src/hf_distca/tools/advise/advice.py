"""`advise`: describes in sentences what hf-distca would gain, and returns the lines to paste."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hf_distca.tools.advise.ways import Run, Way

# Ratios of the seconds of two steps. Below _EQUAL, the steps count as equally fast, because the
# scheduler moves nothing for a smaller gain (DistCAConfig.min_gain). Below _CLOSE, the estimate may
# be wrong about which step is faster.
_EQUAL, _CLOSE = 1.02, 1.06
# The advice adds one of these texts to the title of another way, if the title contains the key. The
# text names the setting of Hugging Face, if there is one.
_HOW = {
    "samples": ': TrainingArguments(train_sampling_strategy="batch_rebalance") does nearly that',
    "Ulysses": ": accelerate's ParallelismConfig(sp_size=...)",
    "ring": ", which no library for Hugging Face has for packed documents",
}


class Advice(NamedTuple):
    """Advice for a user.

    Attributes:
        worthwhile: whether hf-distca is clearly faster than other ways that keep documents whole.
        ours, other: titles of the fastest way with hf-distca and the fastest way without.
        gain: seconds of a step with `other`, divided by the seconds of a step with `ours`.
        text: the reasons, in sentences.
        settings: the lines to paste; empty if there is nothing to gain.
    """

    worthwhile: bool
    ours: str
    other: str
    gain: float
    text: str
    settings: tuple[str, ...]


def advise(run: Run, ways: Sequence[Way]) -> Advice:
    """Compare the ways to run a step that `estimate_ways` returned, and give advice."""
    as_it_is, *_, given, dealt = ways
    ours = min((given, dealt), key=lambda way: (not way.keeps_documents, way.seconds))
    other = min(ways[:-2], key=lambda way: (not way.keeps_documents, way.seconds))
    gain = other.seconds / ours.seconds
    text = (
        f"As it is, the slowest rank has {as_it_is.attention:.2f} times the mean attention, and"
        f" ranks wait {as_it_is.waiting:.0%} of a step on average."
    )
    if not as_it_is.keeps_documents:
        text += (
            f" Ends of rows cut documents, which then lose {1 - as_it_is.kept:.0%} of their"
            f" attention. The same rows take {given.seconds:.3g} s a step under hf-distca, and"
            f" {as_it_is.seconds:.3g} s without: {as_it_is.seconds / given.seconds:.2f} times as"
            " long. With whole documents:"
        )
    text += (
        f' "{ours.title}" takes {ours.seconds:.3g} s a step. The best way without hf-distca,'
        f' "{other.title}", takes {other.seconds:.3g} s, {gain:.2f} times as long.'
    )
    if gain < _EQUAL:
        how = next((how for name, how in _HOW.items() if name in other.title), "")
        text += f' hf-distca gains nothing over "{other.title}"{how}.'
        return Advice(False, ours.title, other.title, gain, text, ())
    if gain < _CLOSE:
        text += " The estimate may be wrong about so small a difference: try both."
    lines = ['model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="distca")']
    options = "--attn-implementation distca"
    if ours is dealt:
        lines.append(f"hf_distca.deal(trainer, tokens_per_rank={run.tokens})")
        options += f" --tokens-per-rank {run.tokens}"
    return Advice(
        gain >= _CLOSE,
        ours.title,
        other.title,
        gain,
        text,
        (*lines, f"# or: hf-distca run {options} accelerate launch train.py"),
    )
