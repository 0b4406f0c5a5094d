"""Document lengths: from a list, or drawn from a named distribution, cut into global batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from hf_distca.errors import ConfigError, LayoutError
from hf_distca.schedule.layout import FloatArray, IntArray, require_integers
from hf_distca.simulate.loader_rules import distribute_documents

_PIECE = 1024
_MOST_PIECES = 2**15  # 33 million documents take some 10 s to draw, and far longer to place
_LONGEST = 2**32  # tokens


@dataclass(frozen=True)
class DocumentSource:
    """A source of document lengths.

    Attributes:
        name: description.
        stream: draws an endless sequence of lengths, in pieces, from a generator.
        source: source of the figures.
        seed: seed of the generator, from 0 to 2**63.
    """

    name: str
    stream: Callable[[np.random.Generator], Iterator[IntArray]]
    source: str
    seed: int = 0

    def __post_init__(self) -> None:
        if type(self.seed) is not int or not 0 <= self.seed <= 2**63:
            raise ConfigError(f"seed={self.seed!r} must be a whole number from 0 to {2**63}.")

    @classmethod
    def from_distribution(
        cls, name: str, draw: Callable[[np.random.Generator], FloatArray], longest: int, source: str
    ) -> DocumentSource:
        """Make a source from a distribution; lengths are rounded down to whole tokens from 1 to
        `longest`.
        """

        def draw_lengths(generator: np.random.Generator) -> Iterator[IntArray]:
            while True:
                yield np.clip(draw(generator), 1, longest).astype(np.int64)

        return cls(name, draw_lengths, source)

    def draw_batches(self, tokens: int, count: int) -> Iterator[IntArray]:
        """Yield `count` global batches of exactly so many tokens, in the order in
        which documents were drawn; the last one is cut.

        Raises:
            LayoutError: if a document is longer than a batch.
        """
        stream = self.stream(np.random.default_rng(self.seed))
        rest = np.zeros(0, dtype=np.int64)
        for _ in range(count):
            pieces = [rest]
            total = int(rest.sum())
            while total < tokens:
                if len(pieces) > _MOST_PIECES:
                    raise LayoutError(
                        f"a global batch of {tokens} tokens would hold over {_MOST_PIECES * _PIECE}"
                        " of these documents: use fewer ranks, micro-batches, or tokens of a rank."
                    )
                pieces.append(next(stream))
                total += int(pieces[-1].sum())
                _check_longest(pieces[-1], tokens, "global batch")
            rest = np.concatenate(pieces)
            ends = np.cumsum(rest)
            last = int(np.searchsorted(ends, tokens))
            batch = rest[: last + 1].copy()
            batch[-1] -= ends[last] - tokens
            yield batch
            rest = rest[last + 1 :]

    def draw_steps(self, tokens: int, micro_batches: int, count: int) -> Iterator[list[IntArray]]:
        """Yield `count` steps of so many micro-batches of exactly so many tokens each.

        For any number of micro-batches that share the tokens of a step, its documents are the same,
        except short ones that are cut to fill them up.

        Raises:
            LayoutError: if a document is longer than a micro-batch.
        """
        for batch in self.draw_batches(tokens * micro_batches, count):
            _check_longest(batch, tokens, "micro-batch")
            yield (
                [batch]
                if micro_batches == 1
                else distribute_documents(batch, micro_batches, tokens)
            )


def _check_longest(lengths: IntArray, tokens: int, what: str) -> None:
    if lengths.max() > tokens:
        raise LayoutError(
            f"a document of {lengths.max()} tokens is longer than a {what} of {tokens}: raise the"
            " tokens of a rank or the number of ranks, or bound lengths with --max-length."
        )


def from_list(lengths: npt.ArrayLike, name: str, longest: int | None = None) -> DocumentSource:
    """Make a source from a list, shuffled, and again when it has ended.

    Longer documents than `longest` are cut off there.

    Raises:
        LayoutError: if they are not whole numbers of at least 1.
    """
    length = require_integers(lengths, f"document lengths of {name}")
    if not len(length):
        raise LayoutError(f"{name} holds no document lengths: there is nothing to simulate.")
    if (wrong := (length < 1) | (length > _LONGEST)).any():
        document = int(wrong.argmax())
        raise LayoutError(
            f"{name}: document {document} has length {length[document]}: every document must have"
            " at least 1 token, and the limit is 2**32."
        )
    if longest is not None:
        length = np.minimum(length, _require_longest(longest))

    def draw_lengths(generator: np.random.Generator) -> Iterator[IntArray]:
        while True:
            yield from np.split(generator.permutation(length), range(_PIECE, len(length), _PIECE))

    return DocumentSource(
        name,
        draw_lengths,
        f"{len(length)} lengths, mean {length.mean():.0f}, longest {length.max()}, shuffled",
    )


@dataclass(frozen=True, slots=True)
class _Mixture:
    """Short and long documents, each lognormal: mean and standard deviation of the logarithm of a
    length.

    Both are fitted to a list made for contexts of 65,536 tokens. For longer ones, long documents
    are stretched.

    Attributes:
        name: name of documents like these.
        short, long: both distributions.
        boundary: short documents are at most so long, and others longer, before they are stretched.
        long_tokens: part of all tokens that long documents hold, before the longest are cut off.
        source: source of the figures.
    """

    name: str
    short: tuple[float, float]
    long: tuple[float, float]
    boundary: int
    long_tokens: float
    source: str

    def make_source(self, longest: int) -> DocumentSource:
        """Make a source of documents of at most `longest` tokens."""
        stretch = longest / 65536
        short = self._compute_mean(*self.short, side=-1)
        long = self._compute_mean(*self.long, side=1) * stretch
        share = self.long_tokens / long / (self.long_tokens / long + (1 - self.long_tokens) / short)

        def draw(generator: np.random.Generator) -> FloatArray:
            is_long = generator.random(_PIECE) < share
            mean, width = np.where(is_long[:, None], self.long, self.short).T
            logs = generator.normal(mean, width)
            while (wrong := (logs > math.log(self.boundary)) != is_long).any():
                logs[wrong] = generator.normal(mean[wrong], width[wrong])
            return np.asarray(np.exp(logs) * np.where(is_long, stretch, 1.0))

        return DocumentSource.from_distribution(
            f"{self.name} up to {longest}", draw, longest, self.source
        )

    def _compute_mean(self, mean: float, width: float, *, side: int) -> float:
        """Compute the mean of a distribution cut off at the boundary: with `side` 1 it lies above,
        with -1 below.
        """
        distance = side * (mean - math.log(self.boundary)) / width
        below = NormalDist().cdf
        return math.exp(mean + width**2 / 2) * below(distance + side * width) / below(distance)


DISTRIBUTIONS = {
    "pretrain": _Mixture(  # web text with long documents kept more often
        "pretrain-like",
        *((7.747, 0.998), (10.128, 0.885), 8192, 0.5),
        "two lognormal distributions fitted to the list 'wlbllm' of hao-ai-lab/DistCA (commit"
        " 2afd219) below and above 8192 tokens; long ones stretched with the context and kept more"
        " often, until they hold half of the tokens: assumed, as arXiv 2510.18121 says that short"
        " ones are filtered out and not how many",
    ),
    "prolong": _Mixture(  # long-context data
        "ProLong-like",
        *((7.657, 0.697), (10.162, 0.522), 16384, 0.6),
        "two lognormal distributions fitted to the list 'prolong' of hao-ai-lab/DistCA (commit"
        " 2afd219) below and above 16384 tokens; long ones stretched with the context, with 60 % of"
        " the tokens, the best mixture of arXiv 2410.02660",
    ),
}


def find_distribution(text: str, longest: int) -> DocumentSource:
    """Find a distribution by name: ``pretrain``, ``prolong``, ``equal:TOKENS`` or
    ``lognormal:MEDIAN:SIGMA``.

    Raises:
        ConfigError: if there is none of this name, or its numbers are out of range.
    """
    _require_longest(longest)
    if text in DISTRIBUTIONS:
        return DISTRIBUTIONS[text].make_source(longest)
    name, *numbers = text.split(":")
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        values = [math.nan]
    good = all(0 < value <= _LONGEST for value in values)  # no comparison with NaN is true
    if name == "equal" and len(values) == 1 and good and values[0] >= 1:
        return DocumentSource.from_distribution(
            text, lambda _: np.full(_PIECE, values[0]), longest, "as given"
        )
    if name == "lognormal" and len(values) == 2 and good and values[1] <= 10:
        logs = (math.log(values[0]), values[1])
        return DocumentSource.from_distribution(
            text, lambda generator: generator.lognormal(*logs, _PIECE), longest, "as given"
        )
    raise ConfigError(
        f"lengths {text!r} are neither a file nor one of {', '.join(DISTRIBUTIONS)}, equal:TOKENS,"
        " lognormal:MEDIAN:SIGMA with positive numbers."
    )


def _require_longest(longest: int) -> int:
    if type(longest) is not int or not 1 <= longest <= _LONGEST:
        raise ConfigError(f"max_length={longest!r} must be a whole number from 1 to 2**32.")
    return longest
