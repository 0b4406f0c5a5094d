"""Attention in which tokens see later tokens (of an image, a prefix or the whole document), or in
which documents share prefixes. Such attention is planned as a sum over causal documents
(`runtime.summed_documents`).
"""

from __future__ import annotations

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
from hf_distca.schedule.cost import count_causal_pairs
from hf_distca.schedule.layout import IntArray, Layout, enumerate_ranges, mark_changes

# The blocks of a rank are planned (so that other ranks can compute them) if the longest block has
# at least this fraction of the rank's tokens. Planning copies all tokens of the rank, which took 5
# to 12 % of a layer on a CPU. `benchmarks/schedule/masks.py` estimates the imbalance of 64 ranks.
# For prefixes, it is 1.03 if all blocks are planned, 1.04 with this fraction, and 1.47 if no blocks
# are planned. For documents whose tokens all see each other, it is 1.08, 1.08 and 2.31 in the same
# three cases.
LEAST_PART = 1 / 4


@dataclass(frozen=True, eq=False)
class Ahead:
    """Rule that tells which later tokens of its document a token sees.

    Attributes:
        ids: (rows, tokens) id of each token's block, negative outside blocks. A token sees all
            tokens of its block that lie in its document. None if a token sees its whole document.
        is_outside: whether a token also sees tokens of its block that a window would hide.
    """

    ids: torch.Tensor | None = None
    is_outside: bool = False

    def number_tokens(self, documents: Documents) -> IntArray:
        """Return the block id of each token of the documents, without padding. `ids` are copied
        from the device once, for all kinds of layers.
        """
        tokens = np.arange(documents.runs[:, 2].sum())
        if self.ids is None:
            return np.zeros_like(tokens)
        host: IntArray | None = getattr(self.ids, "distca_host_copy", None)
        if host is None:
            host = self.ids.reshape(-1).cpu().numpy()
            self.ids.distca_host_copy = host  # type: ignore[attr-defined]  # freed with the ids
        return host[documents.first_token + documents.find_indices(tokens)]

    def check_whole(self, documents: Documents, layout: Layout, rank: int) -> None:
        """Raise if a document with blocks is cut, because its parts could not see each other."""
        row = np.isin(layout.place, layout.place[layout.run_start > 0]) & (layout.rank == rank)
        _, tokens = enumerate_ranges(layout.token[row], layout.token[row] + layout.length[row])
        if (self.number_tokens(documents)[tokens] >= 0).any():
            raise UnsupportedError(
                f"a document lies in several parts, one of them on rank {rank}, but has tokens that"
                " see later tokens (of an image, a prefix or the whole document), which may be in"
                " another part. Give each such document to one rank, in one piece."
            )


def sum_documents(
    ahead: Ahead | None, documents: Documents, window: int | None, device: torch.device
) -> Documents:
    """Return documents whose attention can be planned as a sum. Their `make_exchange` adds up the
    attention of causal documents.

    Args:
        ahead: which later tokens a token sees; None for causal attention.
        documents: the documents of this rank, or of a nano-batch.
        window: maximum number of keys that a row of the layer sees, its own included.
        device: device of the layer.

    Raises:
        UnsupportedError: if tokens see keys of their block that the window hides, or see later
            tokens in documents that share prefixes.
    """
    copied = documents.copied_tokens
    if copied is None:
        return documents if ahead is None else _add_blocks(ahead, documents, window, device)
    if ahead is not None:
        raise UnsupportedError(
            "documents share prefixes, and tokens see later tokens (images, a prefix, or"
            " is_causal=False): distca computes only one of the two. Give each document its own"
            " prefix."
        )
    keys = to_device(torch.from_numpy(copied), device)
    prefixes = Retaken(keys[:0], keys, is_context=True)
    return replace(documents, make_exchange=partial(SumExchange, prefixes))


def _add_blocks(
    ahead: Ahead, documents: Documents, window: int | None, device: torch.device
) -> Documents:
    """Add the work of the blocks to the documents of this rank.

    Blocks are planned as further documents in layers without a window, if no document may span
    ranks and the longest block is long enough (`LEAST_PART`). Otherwise this rank computes all of
    its blocks.
    """
    if documents.dealt_share is not None and not documents.dealt_share.is_cut:
        # The plan in a share does not include blocks, so ranks make a new one.
        documents = replace(
            documents,
            runs=make_unknown_runs(documents.runs[:, 2]),
            span_ranks=False,
            dealt_share=None,
        )
    number = ahead.number_tokens(documents)
    document = np.repeat(np.arange(len(documents.runs)), documents.runs[:, 2])
    tokens = np.flatnonzero(number >= 0)[::-1]
    tokens = tokens[np.lexsort((number[tokens], document[tokens]))]
    begin = np.flatnonzero(mark_changes(document[tokens], number[tokens]))
    last = np.append(begin, len(tokens))[1:] - 1
    reach = int((tokens[begin] - tokens[last]).max(initial=0)) + 1
    if ahead.is_outside and window is not None and reach > window:
        raise UnsupportedError(
            f"a block of tokens that all see each other spans {reach} tokens, but the layer has a"
            f" window of {window}, which would hide some of them. Use blocks within the window, or"
            ' attn_implementation="sdpa".'
        )
    behind = None if ahead.ids is not None or window is None else window - 1
    length = (last - begin)[last > begin]
    if not len(length) or behind == 0:
        return documents
    places = np.delete(tokens, begin), np.delete(tokens, last)
    rows, keys = (to_device(torch.from_numpy(place), device) for place in places)
    if window is None and not documents.span_ranks and max(length) >= LEAST_PART * len(number):
        return replace(
            documents,
            runs=np.concatenate([documents.runs, make_unknown_runs(length)]),
            make_exchange=partial(SumExchange, Retaken(rows, keys)),
        )
    lengths = length.tolist()
    starts = list(accumulate(lengths, initial=0))[:-1]
    at_home = Retaken(rows, keys, False, TaskBatch(starts, lengths, starts, lengths), behind)
    return replace(
        documents,
        home_pairs=int(count_causal_pairs(length, length, behind).sum()),
        make_exchange=partial(SumExchange, at_home),
    )
