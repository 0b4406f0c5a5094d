"""A model under distca on several ranks equals the same model, one document at a time, under sdpa
in float64.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import hf_distca
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.integration.current_session import current_session
from ranks import RankPool, RankPools
from tiny_runs import SIZES, settings
from turns import in_turn

Parts = list[tuple[int, int, int]]  # (document, start, end)

# Documents of 1 token, of odd lengths, and of equal and very unequal lengths.
LENGTHS = [150, 1, 33, 7, 64, 1, 129]


def make_placements(world: int) -> dict[str, list[Parts]]:
    """Return placements of parts of documents on ranks, by name."""
    whole = [(d, 0, n) for d, n in enumerate(LENGTHS)]
    skewed = [whole[r::world] for r in range(world)]
    if world == 1:
        return {"skewed": skewed}
    cut = [150 * r // world for r in range(world + 1)]
    return {
        "skewed": skewed,
        "empty-handed": [whole if r == 1 else [] for r in range(world)],
        "one document over all ranks": [[(0, cut[r], cut[r + 1])] for r in range(world)],
        "continued": [
            [*whole[1:4], (0, 0, 101)],
            [(0, 101, 150), *whole[4:]],
            *([] for _ in range(world - 2)),
        ],
        "head and tail": [
            [(0, 0, 37), (0, 113, 150), whole[2]],
            [(0, 37, 113), *whole[3:5]],
            *([] for _ in range(world - 2)),
        ],
    }


def draw_tokens(document: int, length: int) -> torch.Tensor:
    return torch.randint(0, 61, (length,), generator=torch.Generator().manual_seed(document + 1))


def build_model(key_value_heads: int, implementation: str, dtype: torch.dtype) -> LlamaForCausalLM:
    sizes = {**SIZES, "num_key_value_heads": key_value_heads}
    config = LlamaConfig(**sizes, attn_implementation=implementation)
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(dtype).train()


def sum_losses(logits: torch.Tensor, tokens: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Sum the next-token losses of positions [start, end) of a document.

    The last position of a document has no target.
    """
    last = min(end, len(tokens) - 1)
    return cross_entropy(logits[: last - start], tokens[start + 1 : last + 1], reduction="sum")


@cache
def run_alone(
    documents: tuple[int, ...], key_value_heads: int, dtype: torch.dtype
) -> tuple[float, dict, dict]:
    """Return loss, logits by document and gradients by parameter, with each document alone.

    The model runs under sdpa, because eager attention rounds its softmax to float32.
    """
    model = build_model(key_value_heads, "sdpa", dtype)
    total, logits = 0.0, {}
    for document in documents:
        tokens = draw_tokens(document, LENGTHS[document])
        out = model(input_ids=tokens[None], use_cache=False).logits[0]
        loss = sum_losses(out, tokens, 0, len(tokens))
        if len(tokens) > 1:
            loss.backward()
        total += float(loss.detach())
        logits[document] = out.detach()
    return total, logits, {name: p.grad for name, p in model.named_parameters()}


def run_balanced(
    rank: int, parts: list[Parts], key_value_heads: int, dtype: torch.dtype, kernel: str
) -> tuple:
    """Run one rank; return loss and gradients summed over ranks, this rank's logits by part, and
    sent bytes.
    """
    hf_distca.configure(settings(kernel=kernel, documents_span_ranks=True))
    session = current_session()
    model = build_model(key_value_heads, "distca", dtype)
    if parts[rank]:
        batch = {
            "input_ids": torch.cat([draw_tokens(d, LENGTHS[d])[a:b] for d, a, b in parts[rank]])[
                None
            ],
            "position_ids": torch.cat([torch.arange(a, b) for _, a, b in parts[rank]])[None],
            "distca_documents": PackedDocuments(
                tuple(b - a for _, a, b in parts[rank]),
                tuple(a for _, a, _ in parts[rank]),
                tuple(d for d, _, _ in parts[rank]),
            ),
        }
    else:  # transformers needs tokens, so the batch is only padding
        padding = torch.zeros(1, 3, dtype=torch.long)
        batch = {"input_ids": padding, "position_ids": padding, "attention_mask": padding}
    out = model(**batch, use_cache=False).logits[0]
    pieces = list(out.split([b - a for _, a, b in parts[rank]])) if parts[rank] else []
    losses = [
        sum_losses(o, draw_tokens(d, LENGTHS[d]), a, b)
        for o, (d, a, b) in zip(pieces, parts[rank], strict=True)
    ]
    loss = torch.stack([out.sum() * 0, *losses]).sum()
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    total = loss.detach().double()
    for tensor in (total, *grads.values()):
        dist.all_reduce(tensor)
    return float(total), [piece.detach() for piece in pieces], grads, session.meter.sent_bytes


def measure_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-12))


def check(
    pool: RankPool,
    parts: list[Parts],
    heads: int,
    dtype: torch.dtype,
    kernel: str,
    tolerance: float,
) -> None:
    documents = tuple(sorted({d for rank in parts for d, _, _ in rank}))
    loss, logits, grads = run_alone(documents, heads, torch.float64)
    results = pool(run_balanced, parts, heads, dtype, kernel)
    for rank, (total, pieces, rank_grads, _) in enumerate(results):
        assert total == pytest.approx(loss, rel=tolerance)
        for piece, (d, a, b) in zip(pieces, parts[rank], strict=True):
            assert measure_error(piece, logits[d][a:b]) <= tolerance
        for name, grad in rank_grads.items():
            assert measure_error(grad, grads[name]) <= tolerance, name
    if pool.world_size > 1:
        assert sum(sent for *_, sent in results) > 0, "nothing was exchanged, so nothing was tested"


@pytest.mark.parametrize(
    ("world", "placement"),
    [
        # Cases of three ranks add little to those of two and four, so they are slow tests.
        pytest.param(n, name, marks=[pytest.mark.slow] * (n == 3))
        for n in (1, 2, 3, 4)
        for name in make_placements(n)
    ],
)
def test_model_in_float64_equals_sdpa(rank_pool: RankPools, world: int, placement: str) -> None:
    check(rank_pool(world), make_placements(world)[placement], 2, torch.float64, "reference", 1e-9)


@pytest.mark.parametrize(
    ("world", "heads"),
    in_turn([(n, heads) for n in (1, 2, 3, 4) for heads in (1, 2, 4)], 6, [(2, 2)]),
)
def test_model_in_float32_equals_sdpa(rank_pool: RankPools, world: int, heads: int) -> None:
    for parts in make_placements(world).values():
        check(rank_pool(world), parts, heads, torch.float32, "cpu", 1e-5)
