"""Attention that is not causal, as a sum of causal documents over tokens that are taken again.

**Blocks.** Of tokens t[0], ..., t[m-1] that all see each other, causal attention leaves out the
keys after each row: a strict upper triangle. Read backwards it is causal: rows t[m-2], ..., t[0]
with keys t[m-1], ..., t[1]. So any kernel computes it as a document of m - 1 tokens.

**Shared prefixes.** A document that continues another one's tokens has copies of their keys in
front: context, whose queries are computed where they come from.

Outputs are merged by their log-sum-exps, in float32 or wider. Backward of all parts takes the
merged output and log-sum-exp, and the gradients add. Nothing more is saved for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from hf_distca.kernels.base import Grads, Operands, Outputs, Saved, TaskBatch, Tensors
from hf_distca.runtime.call import LayerExchange, merge_head_groups, split_head_groups

Handed = TypeVar("Handed", bound=Operands | Saved)
Results = TypeVar("Results", bound=Outputs | Grads)


@dataclass(frozen=True, eq=False)
class Retaken:
    """Tokens of this rank that are taken again.

    Attributes:
        rows, keys: int64 indices of the tokens whose queries, and whose keys and values, are taken.
        is_context: whether they lie in front of this rank's tokens, in the pools of a plan; else
            behind.
        tasks: causal documents of them that run at home; None if they are in the plan.
        window: keys that a row of `tasks` sees at most.
    """

    rows: torch.Tensor
    keys: torch.Tensor
    is_context: bool = False
    tasks: TaskBatch | None = None
    window: int | None = None

    def list_places(self, tensors: Tensors) -> list[torch.Tensor]:
        """List the indices for each tensor: rows of keys come last, and outputs have none."""
        keys = 0 if isinstance(tensors, Outputs) else 2
        return [self.rows] * (len(tensors) - keys) + [self.keys] * keys

    def take(self, home: Handed) -> Handed:
        """Take rows and keys from this rank's tokens."""
        pairs = zip(home, self.list_places(home), strict=True)
        return type(home)(*(tensor.index_select(0, place) for tensor, place in pairs))

    def join(self, home: Handed) -> Handed:
        """Join this rank's tokens with those taken again."""
        order = -1 if self.is_context else 1
        pairs = zip(home, self.take(home), strict=True)
        return type(home)(
            *(torch.cat(pair[::order]) if len(pair[1]) else pair[0] for pair in pairs)
        )

    def split(self, results: Results) -> tuple[Results, Results]:
        """Split the results of what `join` returned."""
        order = -1 if self.is_context else 1
        parts = [
            torch.split(tensor, [len(tensor) - len(place), len(place)][::order])[::order]
            for tensor, place in zip(results, self.list_places(results), strict=True)
        ]
        whole, part = zip(*parts, strict=True)
        return type(results)(*whole), type(results)(*part)

    def add(self, results: Any, part: Any) -> Any:
        """Add the results of tokens taken again to those of this rank's tokens."""
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
    """Add rows in float32 or wider, rounded once."""
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    return wide.index_add(0, rows, part.to(wide.dtype)).to(total.dtype)


class SumExchange(LayerExchange):
    """An exchange whose attention is a sum of causal documents, some over tokens taken again.

    Args:
        retaken: the tokens taken again.
        arguments: of `LayerExchange`.
    """

    def __init__(self, retaken: Retaken, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.retaken = retaken
        self._part: Outputs | Grads | None = None

    def begin(self, tokens: Operands | Saved) -> None:
        """Launch the first dispatch, with the tokens taken again if they are in the plan."""
        super().begin(self.retaken.join(tokens) if self.retaken.tasks is None else tokens)

    def run_local(self, home: Operands | Saved) -> Outputs | Grads:
        """Run this rank's own tasks, and those at home.

        Without an exchange `home` comes from no `begin`, and the results go to no `finish`.
        """
        tasks = self.retaken.tasks
        if tasks is None and not self.exchanges:
            home = self.retaken.join(home)
        results = super().run_local(home)
        if tasks is not None:
            scores = replace(self.server.scores, window=self.retaken.window)
            # Rates are learned from planned work only: count this for the process, not the plan.
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
