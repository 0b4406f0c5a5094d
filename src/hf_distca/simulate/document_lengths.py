"""Document lengths: from a list, or drawn from a named distribution, cut into global batches."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hf_distca.errors import ConfigError, LayoutError
from hf_distca.schedule.layout import IntArray, as_integers

__all__ = ["DISTRIBUTIONS", "DocumentSource", "distribution", "from_list"]

_PIECE = 1024
_MOST_PIECES = 2**15  # 33 million documents take some 10 s to draw, and far longer to place
_LONGEST = 2**32  # tokens
_BASE = (
    65536  # tokens: named distributions are those of lists made for contexts of this length, and are stretched for longer ones
)


@dataclass(frozen=True)
class DocumentSource:
    """A source of document lengths.

    Attributes:
        name: what it is, in words.
        stream: lengths without end, in pieces, that a generator decides.
        source: where the figures come from.
    """

    name: str
    stream: Callable[[np.random.Generator], Iterator[IntArray]]
    source: str

    def batches(self, tokens: int, count: int, seed: int = 0) -> Iterator[IntArray]:
        """`count` global batches of exactly so many tokens, in the order in which documents were drawn; the last one is cut.

        Raises:
            LayoutError: if a document is longer than a batch.
        """
        stream = self.stream(np.random.default_rng(seed))
        rest = np.zeros(0, dtype=np.int64)
        for _ in range(count):
            pieces, total = [rest], int(rest.sum())
            while total < tokens:
                if len(pieces) > _MOST_PIECES:
                    raise LayoutError(
                        f"a global batch of {tokens} tokens would hold over {_MOST_PIECES * _PIECE} of these documents: use "
                        "fewer ranks, micro-batches, or tokens of a rank."
                    )
                pieces.append(next(stream))
                total += int(pieces[-1].sum())
                if pieces[-1].max() > tokens:
                    raise LayoutError(
                        f"a document of {pieces[-1].max()} tokens is longer than a global batch of {tokens}: raise the tokens of "
                        "a rank or the number of ranks, or bound lengths with --max-length."
                    )
            rest = np.concatenate(pieces)
            ends = np.cumsum(rest)
            last = int(np.searchsorted(ends, tokens))
            batch = rest[: last + 1].copy()
            batch[-1] -= ends[last] - tokens
            yield batch
            rest = rest[last + 1 :]

    def steps(self, tokens: int, micro_batches: int, count: int, seed: int = 0) -> Iterator[list[IntArray]]:
        """`count` steps of so many micro-batches of exactly so many tokens each.

        However many micro-batches share the tokens of a step, its documents are the same, but for short ones that are cut to
        fill them up.

        Raises:
            LayoutError: if a document is longer than a micro-batch.
        """
        for batch in self.batches(tokens * micro_batches, count, seed):
            if int(batch.max()) > tokens:
                raise LayoutError(
                    f"a document of {batch.max()} tokens is longer than a micro-batch of {tokens}: raise the tokens of a rank or "
                    "the number of ranks, or bound lengths with --max-length."
                )
            yield [batch] if micro_batches == 1 else _shared_out(batch, tokens, micro_batches)


def _shared_out(lengths: IntArray, tokens: int, count: int) -> list[IntArray]:
    """Documents in micro-batches of equal tokens: longest first, each where most room is left. What fits nowhere is cut."""
    batches: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    rooms, left = [(-tokens, number) for number in range(count)], []
    for document in np.argsort(-lengths, kind="stable").tolist():
        length, (room, number) = int(lengths[document]), rooms[0]
        if length > -room:
            left.append((document, length))
            continue
        batches[number].append((document, length))
        heapq.heapreplace(rooms, (room + length, number))
    for document, whole in left:
        length = whole
        while length:
            room, number = rooms[0]
            part = min(length, -room)
            batches[number].append((document, part))
            heapq.heapreplace(rooms, (room + part, number))
            length -= part
    return [np.array([length for _, length in sorted(batch)], dtype=np.int64) for batch in batches]


def from_list(lengths: npt.ArrayLike, name: str, longest: int | None = None) -> DocumentSource:
    """Documents of a list, shuffled, and again when it has ended. Longer ones than `longest` are cut off there.

    Raises:
        LayoutError: if they are not whole numbers of at least 1.
    """
    length = as_integers(lengths, f"document lengths of {name}")
    if not len(length):
        raise LayoutError(f"{name} holds no document lengths: there is nothing to simulate.")
    if length.min() < 1:
        document = int(np.flatnonzero(length < 1)[0])
        raise LayoutError(
            f"{name}: document {document} has length {length[document]}: every document must have at least 1 token."
        )
    if length.max() > _LONGEST:
        raise LayoutError(f"{name}: document {int(length.argmax())} has {length.max()} tokens: the limit is 2**32.")
    if longest is not None:
        length = np.minimum(length, _checked(longest))

    def stream(generator: np.random.Generator) -> Iterator[IntArray]:
        while True:
            yield from np.split(generator.permutation(length), range(_PIECE, len(length), _PIECE))

    return DocumentSource(name, stream, f"{len(length)} lengths, mean {length.mean():.0f}, longest {length.max()}, shuffled")


def _drawn(draw: Callable[[np.random.Generator], npt.NDArray[np.float64]], longest: int) -> Callable[..., Iterator[IntArray]]:
    def stream(generator: np.random.Generator) -> Iterator[IntArray]:
        while True:
            yield np.clip(draw(generator), 1, longest).astype(np.int64)

    return stream


@dataclass(frozen=True, slots=True)
class _Mixture:
    """Short and long documents, each lognormal: mean and standard deviation of the logarithm of a length.

    Attributes:
        short, long: both distributions.
        boundary: short documents are at most so long, and others longer, before they are stretched.
    """

    short: tuple[float, float]
    long: tuple[float, float]
    boundary: int

    def stream(self, tokens: float, stretch: float, longest: int) -> Callable[..., Iterator[IntArray]]:
        """Lengths of which long ones, `stretch` times as long, hold such a part of all tokens, before `longest` bounds them."""
        short, long = (_mean(*shape, self.boundary, above=above) for shape, above in ((self.short, False), (self.long, True)))
        share = tokens / (long * stretch) / (tokens / (long * stretch) + (1 - tokens) / short)

        def draw(generator: np.random.Generator) -> npt.NDArray[np.float64]:
            is_long = generator.random(_PIECE) < share
            mean, width = (
                np.where(is_long, long_value, short_value) for long_value, short_value in zip(self.long, self.short, strict=True)
            )
            logs = generator.normal(mean, width)
            while (wrong := (logs > math.log(self.boundary)) != is_long).any():
                logs[wrong] = generator.normal(mean[wrong], width[wrong])
            return np.asarray(np.exp(logs) * np.where(is_long, stretch, 1.0))

        return _drawn(draw, longest)


def _mean(mean: float, width: float, boundary: int, *, above: bool) -> float:
    """Mean of a lognormal distribution that is cut off at a boundary."""
    side = 1 if above else -1
    distance = side * (mean - math.log(boundary)) / width

    def below(value: float) -> float:
        return (1 + math.erf(value / math.sqrt(2))) / 2

    return math.exp(mean + width**2 / 2) * below(distance + side * width) / below(distance)


_PRETRAIN = _Mixture((7.747, 0.998), (10.128, 0.885), 8192)
_PROLONG = _Mixture((7.657, 0.697), (10.162, 0.522), 16384)


def pretrain(longest: int) -> DocumentSource:
    """Web text with long documents kept more often: half of the tokens are in long ones."""
    return DocumentSource(
        f"pretrain-like up to {longest}",
        _PRETRAIN.stream(0.5, longest / _BASE, longest),
        "two lognormal distributions fitted to the list 'wlbllm' of hao-ai-lab/DistCA (commit 2afd219) below and above 8192 "
        "tokens; long ones stretched with the context and kept more often, until they hold half of the tokens: assumed, as "
        "arXiv 2510.18121 says that short ones are filtered out and not how many",
    )


def prolong(longest: int) -> DocumentSource:
    """Long-context data: 60 % of the tokens are in long documents."""
    return DocumentSource(
        f"ProLong-like up to {longest}",
        _PROLONG.stream(0.6, longest / _BASE, longest),
        "two lognormal distributions fitted to the list 'prolong' of hao-ai-lab/DistCA (commit 2afd219) below and above 16384 "
        "tokens; long ones stretched with the context, with 60 % of the tokens, the best mixture of arXiv 2410.02660",
    )


DISTRIBUTIONS: dict[str, Callable[[int], DocumentSource]] = {"pretrain": pretrain, "prolong": prolong}


def distribution(text: str, longest: int) -> DocumentSource:
    """A distribution by name: ``pretrain``, ``prolong``, ``equal:TOKENS`` or ``lognormal:MEDIAN:SIGMA``.

    Raises:
        ConfigError: if there is none of this name, or its numbers are out of range.
    """
    _checked(longest)
    name, *numbers = text.split(":")
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        values = [math.nan]
    if name in DISTRIBUTIONS and not numbers:
        return DISTRIBUTIONS[name](longest)
    good = all(0 < value <= _LONGEST for value in values)  # no comparison with NaN is true
    if name == "equal" and len(values) == 1 and good and values[0] >= 1:
        return DocumentSource(text, _drawn(lambda _: np.full(_PIECE, values[0]), longest), "as given")
    if name == "lognormal" and len(values) == 2 and good and values[1] <= 10:
        logs = (math.log(values[0]), values[1])
        return DocumentSource(text, _drawn(lambda generator: generator.lognormal(*logs, _PIECE), longest), "as given")
    raise ConfigError(
        f"lengths {text!r} are neither a file nor one of {', '.join(DISTRIBUTIONS)}, equal:TOKENS, lognormal:MEDIAN:SIGMA with "
        "positive numbers."
    )


def _checked(longest: int) -> int:
    if type(longest) is not int or not 1 <= longest <= _LONGEST:
        raise ConfigError(f"max_length={longest!r} must be a whole number from 1 to 2**32.")
    return longest
