"""Attention that is not causal, computed as a sum of causal documents.

Tokens that are used twice in the sum are called retaken.

**Blocks.** Let all tokens t[0], ..., t[m-1] of a block see each other. Causal attention omits the
scores of the keys after each query, a strict upper triangle. In reverse order this triangle is
causal: queries t[m-2], ..., t[0] with keys t[m-1], ..., t[1]. Any kernel can therefore compute it
as a document of m - 1 tokens.

**Shared prefixes.** A document B may continue a prefix that is part of a document A. Copies of the
prefix's keys then lie in front of B's own keys, as context. The prefix's queries are computed only
in A.

Outputs are merged by their log-sum-exps, in float32 or wider. Backward of each part uses the merged
output and log-sum-exp, and the gradients are added. No further tensors are saved for backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from hf_distca.kernels.base import BackwardInputs, Grads, Operands, Outputs, TaskBatch, Tensors
from hf_distca.runtime.call import LayerExchange, merge_head_groups, split_head_groups

Handed = TypeVar("Handed", bound=Operands | BackwardInputs)
Results = TypeVar("Results", bound=Outputs | Grads)


@dataclass(frozen=True, eq=False)
class Retaken:
    """Tokens of this rank that are used a second time.

    Attributes:
        rows: int64 indices of the tokens whose queries are used again.
        keys: int64 indices of the tokens whose keys and values are used again.
        is_context: True if the retaken tokens lie in front of this rank's tokens in the plan, False
            if they lie behind them.
        tasks: causal documents of the retaken tokens, which run at home; None if the plan contains
            these documents.
        window: the most keys that a query of `tasks` sees; None for all keys of its document.
    """

    rows: torch.Tensor
    keys: torch.Tensor
    is_context: bool = False
    tasks: TaskBatch | None = None
    window: int | None = None

    def list_places(self, tensors: Tensors) -> list[torch.Tensor]:
        """List the indices of the retaken rows of each tensor.

        Tensors with one row per key, if there are any, come last.
        """
        keys = 0 if isinstance(tensors, Outputs) else 2
        return [self.rows] * (len(tensors) - keys) + [self.keys] * keys

    def take(self, home: Handed) -> Handed:
        """Take the rows of retaken tokens from this rank's tensors."""
        pairs = zip(home, self.list_places(home), strict=True)
        return type(home)(*(tensor.index_select(0, place) for tensor, place in pairs))

    def join(self, home: Handed) -> Handed:
        """Append the rows that are used again to the rows of this rank's tokens, or put them in
        front if `is_context` is true.
        """
        order = -1 if self.is_context else 1
        pairs = zip(home, self.take(home), strict=True)
        return type(home)(
            *(torch.cat(pair[::order]) if len(pair[1]) else pair[0] for pair in pairs)
        )

    def split(self, results: Results) -> tuple[Results, Results]:
        """Split results of joined tokens into results of own tokens and of retaken tokens."""
        order = -1 if self.is_context else 1
        parts = [
            torch.split(tensor, [len(tensor) - len(place), len(place)][::order])[::order]
            for tensor, place in zip(results, self.list_places(results), strict=True)
        ]
        whole, part = zip(*parts, strict=True)
        return type(results)(*whole), type(results)(*part)

    def add(self, results: Any, part: Any) -> Any:
        """Add the results of retaken tokens to the results of this rank's tokens."""
        if isinstance(results, Grads):
            return Grads(*map(_add_rows, results, self.list_places(results), part))
        if not len(self.rows):
            return results
        (o_THV, lse_TH), (part_THV, part_TH) = results, part
        lse = lse_TH.index_select(0, self.rows)
        merged = torch.logaddexp(lse, part_TH)
        o = o_THV.index_select(0, self.rows) * (lse - merged).exp().unsqueeze(-1)
        o = o + part_THV * (part_TH - merged).exp().unsqueeze(-1)
        return Outputs(
            o_THV.index_copy(0, self.rows, o.to(o_THV.dtype)),
            lse_TH.index_copy(0, self.rows, merged),
        )


def _add_rows(total: torch.Tensor, rows: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Add rows in float32 or wider, and round the sums once."""
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    return wide.index_add(0, rows, part.to(wide.dtype)).to(total.dtype)


class SumExchange(LayerExchange):
    """An exchange for attention that is a sum of causal documents. Some of these documents use
    retaken tokens.

    Args:
        retaken: the retaken tokens.
        arguments: arguments of `LayerExchange`.
    """

    def __init__(self, retaken: Retaken, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.retaken = retaken
        self._part: Outputs | Grads | None = None

    def begin(self, tokens: Operands | BackwardInputs) -> None:
        """Launch the first dispatch, with the retaken tokens if the plan contains them."""
        super().begin(self.retaken.join(tokens) if self.retaken.tasks is None else tokens)

    def run_local(self, home: Operands | BackwardInputs) -> Outputs | Grads:
        """Run this rank's own tasks, and the documents in `Retaken.tasks`.

        If the route exchanges nothing, `begin` and `finish` are not called, so this method does
        their work.
        """
        tasks = self.retaken.tasks
        if tasks is None and not self.exchanges:
            home = self.retaken.join(home)
        results = super().run_local(home)
        if tasks is not None:
            scores = replace(self.server.scores, window=self.retaken.window)
            # This work is counted by the meter of the process, and not by the meter of the plan,
            # because rates are learned only from planned work.
            meter = self.server.meter.parent or self.server.meter
            server = replace(self.server, scores=scores, meter=meter)
            self._part = server.run(self.retaken.take(home), tasks)
        return results if self.exchanges else self._sum(results)

    def finish(self, kind: type[Results]) -> Results:
        """Wait for the results of this rank's own rows, and return the sums."""
        return self._sum(super().finish(kind))

    def _sum(self, results: Results) -> Results:
        whole: Any = merge_head_groups(results, self.route.groups)
        part, self._part = self._part, None
        if part is None:
            whole, part = self.retaken.split(whole)
        summed: Results = self.retaken.add(whole, part)
        return split_head_groups(summed, self.route.groups)
