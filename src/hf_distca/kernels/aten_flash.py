"""The flash attention that torch's CUDA wheels have inside."""

from __future__ import annotations

from functools import cache

import torch

from hf_distca.borrowed import cuda_attention, cuda_attention_backward
from hf_distca.kernels.base import Grads, Operands, Outputs, Saved, Scores
from hf_distca.kernels.varlen import Sequences

__all__ = ["AtenFlash"]


@cache
def _placeholder_random_state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Placeholders for the random state on a device.

    They are never read, so no stream waits for them.
    """
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(
        0, dtype=torch.uint64, device=device
    )


class AtenFlash:
    """`VarlenOp` over ``aten::_flash_attention_forward`` and ``aten::_flash_attention_backward``.

    The forward returns the output, the log-sum-exp and then, in a number that differs between
    releases, what backward needs to repeat dropout. Without dropout backward ignores these, so
    placeholders of the right dtype take their place and nothing needs to be kept from forward.
    """

    takes_gaps = torch.version.hip is None

    def forward(self, pools: Operands, sequences: Sequences, scores: Scores) -> Outputs:
        """See `VarlenOp.forward`."""
        o_THD, lse_HT, *_ = cuda_attention(
            *pools,
            *sequences,
            dropout_p=0.0,
            is_causal=True,
            return_debug_mask=False,
            scale=scores.scale,
            **self._window(scores),
        )
        return Outputs(o_THD, lse_HT.T)

    def backward(self, pools: Saved, sequences: Sequences, scores: Scores) -> Grads:
        """See `VarlenOp.backward`."""
        do_THD, q_THD, o_THD, lse_TH, k_TKD, v_TKD = pools
        return Grads(
            *cuda_attention_backward(
                do_THD,
                q_THD,
                k_TKD,
                v_TKD,
                o_THD,
                lse_TH.T.contiguous(),
                *sequences,
                0.0,
                True,
                *_placeholder_random_state(q_THD.device),
                scale=scores.scale,
                **self._window(scores),
            )
        )

    def _window(self, scores: Scores) -> dict[str, int]:
        """Return the window arguments: the op counts keys to the left of a row's own, and without
        arguments it hides none.
        """
        return (
            {}
            if scores.window is None
            else {"window_size_left": scores.window - 1, "window_size_right": 0}
        )
