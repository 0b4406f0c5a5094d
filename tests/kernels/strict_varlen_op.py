"""A varlen op on the CPU that checks the inputs that real ops trust, and records its calls."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hf_distca.kernels import ScoreOptions
from hf_distca.kernels.base import BackwardInputs, Grads, Operands, Outputs
from hf_distca.kernels.varlen import Sequences


class StrictVarlenOp:
    """Leave NaN in outputs of rows without keys, as some ops leave any value there.

    With `window_from_first_key`, backward aligns windows with the first key, but the causal mask
    with the last key.
    """

    width_multiple = 8

    def __init__(self, *, takes_gaps: bool = False, window_from_first_key: bool = False) -> None:
        self.takes_gaps, self.window_from_first_key = takes_gaps, window_from_first_key
        self.calls: list[dict[str, torch.Tensor]] = []
        self.windows: list[int | None] = []

    def forward(self, pools: Operands, sequences: Sequences, scores: ScoreOptions) -> Outputs:
        q, k, v = pools
        self._check(pools, sequences, scores)
        self.calls.append({"q": q, "k": k, "v": v})
        self.windows.append(scores.window)
        o = torch.full_like(q, float("nan"))
        lse = q.new_full(
            q.shape[:2], float("nan"), dtype=torch.promote_types(q.dtype, torch.float32)
        )
        for rows, keys in _list_pieces(sequences):
            logits, _ = _compute_logits(q[rows], k[keys], scores)
            o[rows] = torch.einsum("hqk,khd->qhd", logits.softmax(-1), _widen(v[keys], q)).to(
                q.dtype
            )
            lse[rows] = logits.logsumexp(-1).T
        return Outputs(o, lse)

    def backward(self, pools: BackwardInputs, sequences: Sequences, scores: ScoreOptions) -> Grads:
        do, q, o, lse, k, v = pools
        self._check(pools.operands, sequences, scores)
        assert do.shape == o.shape == q.shape
        assert lse.shape == q.shape[:2]
        assert do.is_contiguous()
        assert o.is_contiguous()
        self.calls.append({"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse})
        self.windows.append(scores.window)
        dq, dk, dv = (torch.full_like(x, float("nan")) for x in (q, k, v))
        for rows, keys in _list_pieces(sequences, empty=True):
            dq[rows], dk[keys], dv[keys] = 0, 0, 0
        for rows, keys in _list_pieces(sequences):
            logits, slope = _compute_logits(
                q[rows], k[keys], scores, window_from_first_key=self.window_from_first_key
            )
            p = (logits - lse[rows].T[:, :, None]).exp()
            do_rows = do[rows].to(p.dtype)
            dp = torch.einsum("qhd,khd->hqk", do_rows, _widen(v[keys], q))
            ds = p * (dp - (do_rows * o[rows].to(p.dtype)).sum(-1).T[:, :, None]) * slope
            dq[rows] = torch.einsum("hqk,khd->qhd", ds, _widen(k[keys], q)).to(q.dtype)
            dk[keys] = _sum_groups(torch.einsum("hqk,qhd->khd", ds, q[rows].to(p.dtype)), k)
            dv[keys] = _sum_groups(torch.einsum("hqk,qhd->khd", p, do_rows), v)
        return Grads(dq, dk, dv)

    def _check(self, pools: Operands, sequences: Sequences, scores: ScoreOptions) -> None:
        q, k, v = pools
        assert q.shape[2] == k.shape[2] == v.shape[2]
        assert q.shape[2] % 8 == 0
        assert q.shape[1] % k.shape[1] == 0
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        assert len(sequences.cu_rows) == len(sequences.cu_keys) >= 2
        for cu, pool, longest in (
            (sequences.cu_rows, q, sequences.max_rows),
            (sequences.cu_keys, k, sequences.max_keys),
            (sequences.cu_keys, v, sequences.max_keys),
        ):
            assert cu.dtype == torch.int32
            assert cu.is_contiguous()
            assert cu[0] == 0
            assert cu[-1] == pool.shape[0]
            assert cu.diff().min() >= (0 if self.takes_gaps else 1)
            assert type(longest) is int
            assert longest == cu.diff().max()
        assert scores.window is None or 1 <= scores.window < sequences.max_keys
        rows, keys = sequences.cu_rows.diff(), sequences.cu_keys.diff()
        assert ((rows <= keys) | (keys == 0)).all()
        assert (rows + keys > 0).all()


def _list_pieces(sequences: Sequences, *, empty: bool = False) -> Iterator[tuple[slice, slice]]:
    """Yield rows and keys of sequences that have both; with `empty`, of all others."""
    rows, keys = sequences.cu_rows.tolist(), sequences.cu_keys.tolist()
    for i in range(len(rows) - 1):
        if (rows[i] == rows[i + 1] or keys[i] == keys[i + 1]) == empty:
            yield slice(rows[i], rows[i + 1]), slice(keys[i], keys[i + 1])


def _widen(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1).to(
        torch.promote_types(q.dtype, torch.float32)
    )


def _compute_logits(
    q: torch.Tensor, k: torch.Tensor, scores: ScoreOptions, *, window_from_first_key: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits and their derivative by the product of q and k."""
    logits = torch.einsum("qhd,khd->hqk", _widen(q, q), _widen(k, q)) * scores.scale
    slope = torch.full_like(logits, scores.scale)
    if scores.softcap is not None:
        logits = torch.tanh(logits / scores.softcap)
        slope *= 1 - logits**2
        logits = logits * scores.softcap
    rows, keys = logits.shape[1:]
    age = torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)
    hidden = age < 0
    if scores.window is not None:
        hidden |= age - (keys - rows if window_from_first_key else 0) > scores.window - 1
    return logits.masked_fill(hidden, float("-inf")), slope


def _sum_groups(dx: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return dx.unflatten(1, (like.shape[1], -1)).sum(2).to(like.dtype)
