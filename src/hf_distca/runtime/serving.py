"""A call of core attention on a rank that has no rows in it: it runs tasks of others, and keeps
nothing between calls.

The steps are those of ranks that have rows, and are taken in the same order on all ranks: `begin`,
`serve`, `finish`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_distca.kernels.base import Grads, Operands, Outputs, Saved
from hf_distca.runtime.call import Call, split_head_groups
from hf_distca.runtime.messages import Pending
from hf_distca.schedule.cost import AttentionShape

__all__ = ["ServedCall", "make_empty_operands"]


def make_empty_operands(
    shape: AttentionShape, dtype: torch.dtype, device: torch.device
) -> Operands:
    """Make q, k and v of a layer without rows."""
    queries, keys = shape.query_heads, shape.key_value_heads
    widths = (queries, shape.head_dim), (keys, shape.head_dim), (keys, shape.value_head_dim)
    return Operands(*(torch.empty((0, *width), dtype=dtype, device=device) for width in widths))


@dataclass(frozen=True, eq=False)
class ServedCall:
    """A call, its inputs and results, which are empty, and its dispatch under way."""

    call: Call
    home: Operands | Saved
    results: Outputs | Grads
    dispatch: Pending | None

    @classmethod
    def begin(cls, call: Call, operands: Operands) -> ServedCall:
        """Launch the dispatch of a call, in the direction of `call.backward`; `operands` are
        `make_empty_operands` of its layer.
        """
        # Rows of head groups travel if documents are split by heads.
        q_THD, k_TKD, v_TKV = grouped = split_head_groups(operands, call.route.groups)
        # Kernels put log-sum-exps out in float32 at least.
        lse_TH = q_THD.new_empty(
            (0, q_THD.shape[1]), dtype=torch.promote_types(q_THD.dtype, torch.float32)
        )
        outputs = Outputs(q_THD.new_empty((0, q_THD.shape[1], v_TKV.shape[2])), lse_TH)
        home: Operands | Saved = grouped
        results: Outputs | Grads = outputs
        if call.backward:
            home = Saved(torch.empty_like(outputs.o_THV), q_THD, *outputs, k_TKD, v_TKV)
            results = Grads(*(torch.empty_like(tensor) for tensor in grouped))
        return cls(call, home, results, call.send_queries_and_keys(call.route.waves[0], home))

    def serve(self) -> None:
        """Run the tasks of the call, and send their results back."""
        call = self.call
        call.stash(
            *call.run_waves(self.home, self.results, call.forward_keys(self.home, self.dispatch))
        )

    def finish(self) -> None:
        """Wait until the results have left."""
        self.call.collect(self.call.route.waves[-1], *self.call.pop_stashed(type(self.results)))
