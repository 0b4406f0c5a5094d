"""Tokens that see tokens behind them: images, prefixes, whole documents. Their attention is made a
sum of causal documents (`runtime.summed_documents`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import numpy as np
import torch

from hf_distca.agreement.documents import Documents, make_unknown_runs
from hf_distca.errors import UnsupportedError
from hf_distca.kernels.base import TaskBatch
from hf_distca.kernels.varlen import to_device
from hf_distca.runtime.summed_documents import Retaken, SumExchange
from hf_distca.runtime.call import LayerExchange
from hf_distca.schedule.layout import IntArray, Layout, mark_changes

# Blocks are planned from so many tokens on. Shorter ones stay at home: images are a few hundredths
# of the work.
LEAST_PLANNED = 2048


def sum_documents(
    ahead: Ahead | None, documents: Documents, window: int | None, device: torch.device
) -> tuple[Documents, Callable[..., LayerExchange]]:
    """Make the documents to plan, and the maker of exchanges, of layers with a window or None; see
    `Ahead.sum_documents`.
    """
    copied = documents.copied_tokens
    if ahead is None and copied is None:
        return documents, LayerExchange
    if ahead is None and copied is not None:
        keys = to_device(torch.from_numpy(copied), device)
        return documents, partial(SumExchange, Retaken(keys[:0], keys, is_context=True), None)
    if ahead is None or copied is not None:
        raise UnsupportedError(
            "documents share prefixes, and tokens see others behind them (images, a prefix, or"
            " is_causal=False): distca computes one of both. Give each document its own prefix."
        )
    return ahead.sum_documents(documents, window, device)


@dataclass(frozen=True, eq=False)
class Ahead:
    """View of tokens on the tokens behind them in their document.

    Attributes:
        ids: (rows, tokens) block of each token, below 0 outside of blocks: tokens see all of their
            block in their document. None if they see all of their document.
        is_outside: whether they see it also where a window would hide it.
    """

    ids: torch.Tensor | None = None
    is_outside: bool = False

    def number_tokens(self, documents: Documents) -> IntArray:
        """Return the block of each token that is not padding, with one read of the device at most
        for all kinds of layers.
        """
        if self.ids is None:
            return np.zeros(int(documents.runs[:, 2].sum()), dtype=np.int64)
        host: IntArray | None = getattr(self.ids, "distca_host_copy", None)
        if host is None:
            host = self.ids.reshape(-1).cpu().numpy()
            self.ids.distca_host_copy = host  # type: ignore[attr-defined]  # lives as long as they
        return host if documents.token_indices is None else host[documents.token_indices]

    def sum_documents(
        self, documents: Documents, window: int | None, device: torch.device
    ) -> tuple[Documents, Callable[..., LayerExchange]]:
        """Make the documents to plan, and the maker of exchanges.

        Args:
            documents: the documents of this rank.
            window: keys that a row of the layer sees at most, its own included.
            device: device of the layer.

        Raises:
            UnsupportedError: if tokens see keys of their block that the window hides.
        """
        number = self.number_tokens(documents)
        document = np.repeat(np.arange(len(documents.runs)), documents.runs[:, 2])
        tokens = np.flatnonzero(number >= 0)[::-1]
        tokens = tokens[np.lexsort((number[tokens], document[tokens]))]
        first = np.flatnonzero(mark_changes(document[tokens], number[tokens]))
        last = np.append(first, len(tokens))[1:] - 1
        reach = int((tokens[first] - tokens[last]).max(initial=0)) + 1
        if self.is_outside and window is not None and reach > window:
            raise UnsupportedError(
                f"tokens of a block that reaches over {reach} tokens see each other both ways, and"
                f" the layer has a window of {window}, which would hide keys from them. Use blocks"
                ' within the window, or attn_implementation="sdpa".'
            )
        rows, keys, length = np.delete(tokens, first), np.delete(tokens, last), last - first
        behind = None if self.ids is not None or window is None else window - 1
        if not len(rows) or behind == 0:
            return documents, LayerExchange
        is_planned = (length >= LEAST_PLANNED) & (window is None and not documents.span_ranks)
        runs = make_unknown_runs(length[is_planned])
        parts: list[Retaken | None] = [None, None]
        for at_home, which in enumerate((is_planned, ~is_planned & (length > 0))):
            chosen = np.repeat(which, length)
            if chosen.any():
                indices = (to_device(torch.from_numpy(i[chosen]), device) for i in (rows, keys))
                lengths = length[which].tolist()
                starts = list(accumulate(lengths, initial=0))[:-1]
                tasks = TaskBatch(starts, lengths, starts, lengths) if at_home else None
                parts[at_home] = Retaken(*indices, tasks=tasks, window=behind)
        runs = np.concatenate([documents.runs, runs])
        return replace(documents, runs=runs), partial(SumExchange, *parts)

    def check_whole(self, documents: Documents, layout: Layout, rank: int) -> None:
        """Raise if a document with blocks lies in several parts: no part could see the others."""
        number = self.number_tokens(documents)
        is_cut = np.zeros(len(layout.documents), dtype=np.bool_)
        is_cut[layout.place[layout.run_start > 0]] = True
        for row in range(layout.offsets[rank], layout.offsets[rank + 1]):
            begin, end = layout.token[row], layout.token[row] + layout.length[row]
            if is_cut[layout.place[row]] and (number[begin:end] >= 0).any():
                raise UnsupportedError(
                    f"tokens [{begin}, {end}) of this rank are a part of a document in which tokens"
                    " see others behind them (an image, a prefix, or all of it), and the other"
                    " parts lie elsewhere. Give each such document to one rank, in one piece."
                )
