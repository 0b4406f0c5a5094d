"""Global batches of document lengths, which come from a list or are drawn from a distribution."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hf_distca.errors import ConfigError, LayoutError
from hf_distca.schedule.layout import FloatArray, IntArray, require_integers

_PIECE = 1024
_MOST_PIECES = 2**15  # drawing so many takes about 10 s, and planning far longer
_LONGEST = 2**32  # tokens


@dataclass(frozen=True)
class DocumentSource:
    """A source of document lengths.

    Attributes:
        name: description of the documents.
        draw: function that draws some lengths with a generator. It may return fractions of tokens.
        longest: length at which longer documents are cut off.
        source: origin of the lengths, as a description.
        seed: seed of the generator.
    """

    name: str
    draw: Callable[[np.random.Generator], FloatArray | IntArray]
    longest: int
    source: str
    seed: int = 0

    def draw_batches(self, tokens: int, count: int) -> Iterator[IntArray]:
        """Yield `count` global batches of exactly `tokens` tokens. Documents stay in the order in
        which they were drawn, and the last document of a batch is cut.

        Raises:
            LayoutError: if a document is longer than a batch.
        """
        generator = np.random.default_rng(self.seed)
        rest = np.zeros(0, dtype=np.int64)
        for _ in range(count):
            pieces, total = [rest], int(rest.sum())
            while total < tokens:
                if len(pieces) > _MOST_PIECES:
                    raise LayoutError(
                        f"a global batch of {tokens} tokens would hold over {_MOST_PIECES * _PIECE}"
                        " documents: use fewer ranks, or fewer tokens per rank."
                    )
                piece = np.clip(self.draw(generator), 1, self.longest).astype(np.int64)
                if piece.max() > tokens:
                    raise LayoutError(
                        f"a document of {piece.max()} tokens is longer than a global batch of"
                        f" {tokens}: raise the tokens per rank or the number of ranks, or limit"
                        " lengths with --max-length."
                    )
                pieces.append(piece)
                total += int(piece.sum())
            rest = np.concatenate(pieces)
            ends = np.cumsum(rest)
            last = int(np.searchsorted(ends, tokens))
            batch = rest[: last + 1].copy()
            batch[-1] -= ends[last] - tokens
            yield batch
            rest = rest[last + 1 :]


def from_list(lengths: npt.ArrayLike, name: str, longest: int | None = None) -> DocumentSource:
    """Make a source from a list of lengths. The list is shuffled, and shuffled again each time all
    of it has been drawn.

    Documents longer than `longest` are cut off at this length.

    Raises:
        LayoutError: if the list is empty, or if a length is not a whole number of at least 1.
    """
    length = require_integers(lengths, f"document lengths of {name}")
    if not len(length):
        raise LayoutError(f"{name} holds no document lengths: there is nothing to estimate.")
    if (wrong := (length < 1) | (length > _LONGEST)).any():
        document = int(wrong.argmax())
        raise LayoutError(
            f"{name}: document {document} has length {length[document]}: every document must have"
            " from 1 to 2**32 tokens."
        )
    length = np.minimum(length, longest or _LONGEST)
    about = f"{len(length)} lengths, mean {length.mean():.0f}, longest {length.max()}, shuffled"
    return DocumentSource(name, lambda generator: generator.permutation(length), _LONGEST, about)


@dataclass(frozen=True, slots=True)
class _Mixture:
    """A mixture of short and long documents. Lengths of each kind have a lognormal distribution.

    Both distributions are fitted to document lengths in contexts of 65,536 tokens. In contexts
    of another length, the lengths of long documents are scaled in proportion.

    Attributes:
        name: name of the mixture.
        short, long: for each kind, mean and standard deviation of the logarithm of a length.
        boundary: largest length of short documents. Long documents are longer than this.
        odds: number of long documents per short document in a context of 65,536. It is chosen so
            that long documents have half of the tokens (pretrain) or 60 % of them (prolong).
        source: origin of the figures, as a description.
    """

    name: str
    short: tuple[float, float]
    long: tuple[float, float]
    boundary: int
    odds: float
    source: str

    def make_source(self, longest: int) -> DocumentSource:
        """Make a source of documents of at most `longest` tokens."""
        stretch = longest / 65536
        share = self.odds / (self.odds + stretch)  # the longer the long documents, the fewer

        def draw(generator: np.random.Generator) -> FloatArray:
            is_long = generator.random(_PIECE) < share
            mean, width = np.where(is_long[:, None], self.long, self.short).T
            logs = generator.normal(mean, width)
            while (wrong := (logs > math.log(self.boundary)) != is_long).any():
                logs[wrong] = generator.normal(mean[wrong], width[wrong])
            return np.asarray(np.exp(logs) * np.where(is_long, stretch, 1.0))

        return DocumentSource(f"{self.name} up to {longest}", draw, longest, self.source)


DISTRIBUTIONS = {
    "pretrain": _Mixture(  # web text with long documents kept more often
        "pretrain-like",
        *((7.747, 0.998), (10.128, 0.885), 8192, 0.06325347201),
        "two lognormal distributions, fitted to the documents below and above 8192 tokens in the"
        " list 'wlbllm' of hao-ai-lab/DistCA (commit 2afd219). Long documents are stretched with"
        " the context, and kept so often that they have half of the tokens. The half is"
        " assumed: arXiv 2510.18121 says that short documents are filtered out, but not how many",
    ),
    "prolong": _Mixture(  # long-context data
        "ProLong-like",
        *((7.657, 0.697), (10.162, 0.522), 16384, 0.1187843038),
        "two lognormal distributions, fitted to the documents below and above 16384 tokens in the"
        " list 'prolong' of hao-ai-lab/DistCA (commit 2afd219). Long documents are stretched with"
        " the context, and have 60 % of the tokens, as in the best mixture of arXiv 2410.02660",
    ),
}


def find_distribution(text: str, longest: int) -> DocumentSource:
    """Find a distribution by name: ``pretrain``, ``prolong``, ``equal:TOKENS`` or
    ``lognormal:MEDIAN:SIGMA``.

    Raises:
        ConfigError: if no distribution has this name, or its numbers are out of range.
    """
    if text in DISTRIBUTIONS:
        return DISTRIBUTIONS[text].make_source(longest)
    name, *numbers = text.split(":")
    try:
        median, width = map(float, numbers if name == "lognormal" else [*numbers, "0"])
    except ValueError:
        median = width = math.nan
    # If the text has no numbers, median and width are NaN, and no comparison with NaN is true.
    if name in ("equal", "lognormal") and 1 <= median <= _LONGEST and 0 <= width <= 10:
        return DocumentSource(
            *(text, lambda generator: median * generator.lognormal(0.0, width, _PIECE)),
            *(longest, "as given"),
        )
    raise ConfigError(
        f"lengths {text!r} are neither a file nor one of {', '.join(DISTRIBUTIONS)}, equal:TOKENS"
        " or lognormal:MEDIAN:SIGMA (with positive numbers)."
    )
