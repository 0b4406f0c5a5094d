"""The attention function in every dtype, head layout and padding, compared with sdpa."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

import hf_distca
from handles import make_handle
from hf_distca.integration.current_session import current_session
from ranks import RankPools
from tiny_runs import settings
from turns import in_turn

SCALING = 0.11  # the default scale of no head dim below
# Lengths of documents by rank and row: packed, and by the side of the padding.
PACKED = {0: [(301,)], 1: [(40, 1, 77, 13)]}
PADDED = {
    "left": {0: [(290,), (33,)], 1: [(17,), (60,)]},
    "right": {0: [(33,), (290,)], 1: [(60,), (17,)]},
}


@dataclass(frozen=True)
class Case:
    """The arguments of one call of the attention function."""

    dtype: torch.dtype = torch.float32
    autocast: bool = False
    heads: tuple[int, int] = (4, 2)
    width: int = 64
    padding: str | None = None
    scaling: float | None = SCALING


def draw_leaves(case: Case, batch: int, length: int, rank: int) -> list[torch.Tensor]:
    """Draw a fused projection (batch, length, heads of q, k, v and one more, width), and dO (batch,
    length, heads, width).

    q, k and v are views of the projection, as in models; with gaps between rows, no view is
    contiguous.
    """
    generator = torch.Generator().manual_seed(rank)
    heads, key_heads = case.heads
    fused = torch.randn(
        batch,
        length,
        heads + 2 * key_heads + 1,
        case.width,
        generator=generator,
        dtype=torch.float64,
    )
    d_out = torch.randn(batch, length, heads, case.width, generator=generator, dtype=torch.float64)
    return [fused.to(case.dtype), d_out.to(case.dtype)]


def split_heads(fused: torch.Tensor, case: Case) -> tuple[torch.Tensor, ...]:
    heads, key_heads = case.heads
    return fused.transpose(1, 2)[:, :-1].split([heads, key_heads, key_heads], 1)


def locate(rows: list[tuple[int, ...]], side: str | None) -> tuple[int, list[tuple[int, int, int]]]:
    """Return the length of the batch, and (row, start, tokens) of each document."""
    length = max(map(sum, rows))
    found = []
    for number, row in enumerate(rows):
        start = length - sum(row) if side == "left" else 0
        for tokens in row:
            found.append((number, start, tokens))
            start += tokens
    return length, found


def run_sdpa(
    fused: torch.Tensor, d_out: torch.Tensor, case: Case, documents: list[tuple[int, int, int]]
) -> list[torch.Tensor]:
    """Compute output and gradient of the projection with sdpa, one document at a time."""
    leaf = fused.detach().clone().requires_grad_()
    q, k, v = split_heads(leaf, case)
    out = torch.zeros_like(d_out)
    for row, start, tokens in documents:
        cut = [t[row : row + 1, :, start : start + tokens] for t in (q, k, v)]
        o = scaled_dot_product_attention(*cut, is_causal=True, scale=case.scaling, enable_gqa=True)
        piece = o[0].transpose(0, 1)
        torch.autograd.backward(
            piece, d_out[row, start : start + tokens].to(piece.dtype), retain_graph=True
        )
        out[row, start : start + tokens] = piece.detach()
    return [out, leaf.grad]


def run_distca(
    fused: torch.Tensor, d_out: torch.Tensor, case: Case, documents: list[tuple[int, int, int]]
) -> list[torch.Tensor]:
    """Compute output and gradient of the projection with distca, the whole batch at once."""
    leaf = fused.detach().clone().requires_grad_()
    batch, length = fused.shape[:2]
    positions, padding = (
        torch.zeros(batch, length, dtype=torch.long),
        torch.zeros(batch, length, dtype=torch.bool),
    )
    for row, start, tokens in documents:
        positions[row, start : start + tokens] = torch.arange(tokens)
        padding[row, start : start + tokens] = True
    handle = make_handle(batch, length, padding=None if case.padding is None else padding)
    attention = AttentionInterface()["distca"]
    module = torch.nn.Module().train()
    out, _ = attention(
        module, *split_heads(leaf, case), handle, scaling=case.scaling, position_ids=positions
    )
    out.backward(d_out.to(out.dtype))
    return [out.detach(), leaf.grad]


def measure_errors(rank: int, case: Case) -> tuple[dict[str, tuple[float, float]], bool, int]:
    """Return errors of (distca, sdpa) by tensor, whether padding is zero, and the sent bytes."""
    hf_distca.configure(settings())
    rows = PACKED[rank] if case.padding is None else PADDED[case.padding][rank]
    length, documents = locate(rows, case.padding)
    fused, d_out = draw_leaves(case, len(rows), length, rank)
    exact = run_sdpa(fused.double(), d_out.double(), case, documents)
    with torch.autocast("cpu", torch.bfloat16) if case.autocast else nullcontext():
        stock, got = (run(fused, d_out, case, documents) for run in (run_sdpa, run_distca))
    real = torch.zeros(len(rows), length, dtype=torch.bool)
    for row, start, tokens in documents:
        real[row, start : start + tokens] = True
    found = {}
    for name, mine, theirs, want in (
        ("output", got[0], stock[0], exact[0]),
        *(
            (name, *(split_heads(t[1], case)[i] for t in (got, stock, exact)))
            for i, name in enumerate(("dq", "dk", "dv"))
        ),
    ):
        norm = want.norm()
        found[name] = (float((mine - want).norm() / norm), float((theirs - want).norm() / norm))
    clean = not got[0][~real].any() and not got[1][~real].any()
    return found, clean, current_session().meter.sent_bytes


DTYPES = {
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
    "fp32": {"dtype": torch.float32},
    "autocast": {"dtype": torch.float32, "autocast": True},
}
CASES = {
    **{
        f"{name}, {h}/{k} heads": Case(**dtype, heads=(h, k))
        for name, dtype in DTYPES.items()
        for h, k in ((4, 4), (4, 2), (4, 1))
    },
    **{
        f"{name}, width {d}": Case(**DTYPES[name], width=d)
        for name in ("bf16", "fp32")
        for d in (16, 32, 96, 128, 192, 256)
    },
    **{
        f"{name}, padded {side}": Case(**DTYPES[name], padding=side)
        for name in ("bf16", "fp32")
        for side in PADDED
    },
    "own scale left out": Case(scaling=None),
}


def check(found: dict[str, tuple[float, float]], clean: bool) -> None:
    assert clean, "padding got output or gradient"
    for name, (mine, theirs) in found.items():
        assert mine <= 2 * theirs, f"{name}: error {mine:.2e} where sdpa has {theirs:.2e}"


@pytest.mark.parametrize("name", in_turn(CASES, 4))
def test_error_on_one_rank_is_at_most_twice_that_of_sdpa(name: str) -> None:
    for rank in (0, 1):
        found, clean, _ = measure_errors(rank, CASES[name])
        check(found, clean)


@pytest.mark.parametrize("name", in_turn(CASES, 4))
def test_error_on_two_ranks_is_at_most_twice_that_of_sdpa(name: str, rank_pool: RankPools) -> None:
    for found, clean, sent in rank_pool(2)(measure_errors, CASES[name]):
        assert sent, "nothing was exchanged, so nothing was tested"
        check(found, clean)
