"""Attention in which tokens see later tokens (blocks, windows, whole documents), on one rank and on
several, against dense masks in float64.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import masking_utils as m
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import hf_distca
import tiny_runs
from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.dealt_share import Dealing
from hf_distca.agreement.documents import PackedDocuments, TokenBatch
from hf_distca.integration import seen_ahead
from hf_distca.integration.current_session import current_session
from hf_distca.integration.handle import MaskStandIn
from hf_distca.integration.hooks.attention import distca_attention
from hf_distca.integration.seen_ahead import Ahead, sum_documents
from hf_distca.schedule.cost import AttentionShape, CostModel
from ranks import RankPools

HEADS, KEY_HEADS, WIDTH = 4, 2, 8
FORMS = ("blocks", "blocks in a window", "blocks beside a window", "both ways", "two-way window")


@dataclass
class Case:
    """The documents of all ranks as (document, start, length) rows, and their masks.

    `ids` holds the block of each token, by document.
    """

    ranks: list[list[tuple[int, int, int]]]
    ids: list[torch.Tensor]
    form: str
    window: int

    @classmethod
    def draw(cls, seed: int, world: int, form: str, *, cut: bool = False) -> Case:
        """Draw a case; with `cut`, the first document lies on all ranks, without blocks."""
        rng = random.Random(seed)
        window = rng.randint(1, 40)
        ranks: list[list[tuple[int, int, int]]] = []
        ids: list[torch.Tensor] = []
        if cut:
            ids.append(torch.full((10 * world,), -1))
        for rank in range(world):
            ranks.append([(0, 10 * rank, 10)] if cut else [])
            for _ in range(rng.randint(1, 3)):
                length = rng.choice([1, 2, rng.randint(3, 30), rng.randint(30, 60)])
                length += 60 * (rank == 0)
                ranks[-1].append((len(ids), 0, length))
                ids.append(_draw_ids(rng, length, window if "beside" in form else length))
        return cls(ranks, ids, form, window)

    def make_mask(self, ids: torch.Tensor) -> Callable[..., Any]:
        """Compose the mask function like transformers."""
        overlay = m.blockwise_overlay(ids)
        past, window = m.causal_mask_function, self.window
        return {
            "blocks": m.or_masks(past, overlay),
            "blocks in a window": m.and_masks(
                m.or_masks(past, overlay), m.sliding_window_overlay(window)
            ),
            "blocks beside a window": m.or_masks(
                m.sliding_window_causal_mask_function(window), overlay
            ),
            "both ways": m.bidirectional_mask_function,
            "two-way window": m.sliding_window_bidirectional_mask_function(window),
        }[self.form]

    def render(self, document: int) -> torch.Tensor:
        """Render the dense mask of a document."""
        at = torch.arange(len(self.ids[document]))
        seen = self.make_mask(self.ids[document][None])(0, 0, at[:, None], at[None])
        return torch.broadcast_to(seen, (len(at), len(at)))


def _draw_ids(rng: random.Random, length: int, most: int) -> torch.Tensor:
    """Draw blocks of a document, none longer than `most`; some lie in several runs."""
    ids = torch.full((length,), -1)
    token, block = rng.randint(0, 5), 0
    while token < length:
        size = min(rng.choice([1, 2, rng.randint(2, 12), 60]), most, length - token)
        ids[token : token + size] = block
        # The next run belongs to the same block or to another one, and may follow at once.
        token += size + rng.choice([0, 1, rng.randint(1, 20)])
        block += most < length or rng.random() < 0.7
    return ids


def attend_densely(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, extra: dict[str, Any]
) -> torch.Tensor:
    """Compute attention over (tokens, heads, width) by its definition."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * WIDTH**-0.5
    if extra.get("softcap"):
        scores = extra["softcap"] * torch.tanh(scores / extra["softcap"])
    scores = scores.masked_fill(~seen, -torch.inf)
    if (sinks := extra.get("s_aux")) is not None:
        scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, len(q), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)


def run_case(
    rank: int, case: Case, dtype: torch.dtype = torch.float64, extra: dict[str, Any] | None = None
) -> float:
    """Run a case; return the largest error of outputs and gradients on a rank.

    Errors are relative to the largest entry, or to 1.
    """
    extra = extra or {}
    rows = case.ranks[rank]
    tensors = []
    for document, ids in enumerate(case.ids):
        generator = torch.Generator().manual_seed(document)
        tensors.append(
            [
                torch.randn(len(ids), h, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
                for h in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
            ]
        )
    mine = [torch.cat([tensors[d][i][a : a + n] for d, a, n in rows]) for i in range(4)]
    leaves = [t.clone().requires_grad_() for t in mine[:3]]
    ids = torch.cat([case.ids[d][a : a + n] for d, a, n in rows])[None]
    documents, starts, lengths = zip(*rows, strict=True)
    spans = any(len(case.ids[d]) != n for row in case.ranks for d, _, n in row)
    packed = PackedDocuments(lengths, *((starts, documents) if spans else ()))
    mask = ALL_MASK_ATTENTION_FUNCTIONS["distca"](
        batch_size=1,
        q_length=ids.shape[1],
        kv_length=ids.shape[1],
        mask_function=case.make_mask(ids),
        local_size=case.window if "window" in case.form else None,
        use_vmap="in a window" in case.form,
    )
    assert isinstance(mask, MaskStandIn)
    module = torch.nn.Linear(1, 1)
    module.is_causal = not mask.batch.context.ahead
    found = distca_attention(
        module, *(t.transpose(0, 1)[None] for t in leaves), mask, distca_documents=packed, **extra
    )[0]
    found.backward(mine[3][None])
    worst = 0.0
    whole: dict[int, list[torch.Tensor]] = {}
    for document in {d for d, *_ in rows}:
        inputs = [t.double().requires_grad_() for t in tensors[document][:3]]
        output = attend_densely(*inputs, case.render(document), extra)
        output.backward(tensors[document][3].double())
        whole[document] = [output.detach(), *(t.grad for t in inputs)]
    for i, got in enumerate([found[0], *(t.grad for t in leaves)]):
        want = torch.cat([whole[d][i][a : a + n] for d, a, n in rows])
        error = (got.detach() - want).abs().max() / want.abs().max().clamp_min(1.0)
        worst = max(worst, float(error))
    return worst


@dataclass
class Tree:
    """Parts of a row; each continues an earlier part, or begins a document."""

    lengths: list[int]
    parents: list[int]

    @property
    def packed(self) -> PackedDocuments:
        return PackedDocuments(self.lengths, parents=self.parents)


def draw_tree(seed: int, parts: int) -> Tree:
    rng = random.Random(seed)
    lengths = [rng.choice([1, 2, rng.randint(2, 9), rng.randint(9, 40)]) for _ in range(parts)]
    parents = [rng.choice([-1, part - 1, rng.randint(-1, part - 1)]) for part in range(parts)]
    return Tree(lengths, parents)


def render_tree(tree: Tree, window: int | None) -> torch.Tensor:
    """Render the dense mask of a row."""
    ends = torch.tensor(tree.lengths).cumsum(0).tolist()
    seen = torch.zeros(ends[-1], ends[-1], dtype=torch.bool)
    for part, length in enumerate(tree.lengths):
        rows, above = torch.arange(ends[part] - length, ends[part]), part
        while above >= 0:
            keys = torch.arange(ends[above] - tree.lengths[above], ends[above])
            seen[rows[:, None], keys[None]] = keys[None] <= rows[:, None]
            above = tree.parents[above]
    depth = torch.from_numpy(tree.packed.positions)
    return seen & (True if window is None else depth[:, None] - depth[None] < window)


def run_tree(tree: Tree, window: int | None = None, dtype: torch.dtype = torch.float64) -> float:
    """Run a tree; return the largest relative error of outputs and gradients."""
    seen = render_tree(tree, window)
    generator = torch.Generator().manual_seed(len(seen))
    *tensors, grad = (
        torch.randn(len(seen), h, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        for h in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    )
    leaves = [t.clone().requires_grad_() for t in tensors]
    mask = ALL_MASK_ATTENTION_FUNCTIONS["distca"](
        batch_size=1, q_length=len(seen), kv_length=len(seen)
    )
    states = (t.transpose(0, 1)[None] for t in leaves)
    found = distca_attention(
        torch.nn.Linear(1, 1), *states, mask, distca_documents=tree.packed, sliding_window=window
    )[0]
    found.backward(grad[None])
    exact = [t.double().requires_grad_() for t in tensors]
    output = attend_densely(*exact, seen, {})
    output.backward(grad.double())
    pairs = zip(
        [found[0], *(t.grad for t in leaves)], [output, *(t.grad for t in exact)], strict=True
    )
    return max(
        float((got - want).detach().abs().max() / want.detach().abs().max().clamp_min(1.0))
        for got, want in pairs
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 12), st.none() | st.integers(1, 50))
def test_documents_with_shared_prefixes_equal_dense_masks(
    seed: int, parts: int, window: int | None
) -> None:
    hf_distca.configure()
    assert run_tree(draw_tree(seed, parts), window) <= 1e-12


def run_trees(rank: int) -> list[tuple[str, float, int]]:
    """Run several trees; return the error and the sent bytes of each."""
    trees = [
        # A prompt with answers, one of which forks.
        Tree([40, 30, 25, 20, 9, 3], [-1, 0, 0, 0, 3, 3]),
        Tree([30, 50, 1, 60], [-1, 0, 1, 2]),
        draw_tree(3, 10),
    ]
    small = Tree([5, 3, 4], [-1, 0, 0])
    found = []
    for number, tree in enumerate(trees):
        for window in (None, 20):
            for dtype in (torch.float64, torch.float32):
                configure()
                error = run_tree(tree if rank == 0 else small, window, dtype)
                sent = current_session().meter.sent_bytes
                found.append((f"tree {number}, window {window}, {dtype}", error, sent))
    return found


def configure() -> None:
    hf_distca.configure(tiny_runs.settings(tolerance=0.0))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from(FORMS), st.sampled_from([0, 2]))
def test_every_mask_form_equals_its_dense_mask(seed: int, form: str, least_part: int) -> None:
    """`LEAST_PART` decides whether attention to later tokens is planned or stays at home."""
    hf_distca.configure()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seen_ahead, "LEAST_PART", least_part)
        assert run_case(0, Case.draw(seed, 1, form)) <= 1e-12


@pytest.mark.parametrize("form", ["blocks", "both ways", "two-way window"])
@pytest.mark.parametrize("least_part", [0, 2])
def test_mask_forms_are_exact_with_sinks_softcaps_and_low_precision(
    form: str, least_part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seen_ahead, "LEAST_PART", least_part)
    hf_distca.configure()
    for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)):
        assert run_case(0, Case.draw(5, 1, form), dtype) <= bound
    case = Case.draw(6, 1, form)
    assert run_case(0, case, extra={"s_aux": torch.linspace(-1, 2, HEADS).double()}) <= 1e-12
    assert run_case(0, case, extra={"softcap": 3.0}) <= 1e-12


def run_cases(rank: int, world: int) -> list[tuple[str, float, int]]:
    """Run a few cases of all forms; return the error and the sent bytes of each."""
    found = []
    for form in FORMS:
        for seed, cut in ((1, False), (2, False), (3, True)):
            if cut and "way" in form:
                continue
            for dtype in (torch.float64, torch.float32):
                configure()
                error = run_case(rank, Case.draw(seed, world, form, cut=cut), dtype)
                sent = current_session().meter.sent_bytes
                found.append((f"{form}, {seed}, {dtype}", error, sent))
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_mask_forms_and_trees_on_several_ranks_are_exact(world: int, rank_pool: RankPools) -> None:
    pool = rank_pool(world)
    found = zip(*pool(run_cases, world), strict=True)
    found = [*found, *zip(*pool(run_trees), strict=True)]
    for of_ranks in found:
        for name, error, _ in of_ranks:
            assert error <= (1e-12 if "64" in name else 2e-6), name
    # A rank with little causal work has nothing to move.
    still = [name for (name, _, sent), *_ in found if not sent]
    assert len(still) <= 2, still


def run_cut_block(rank: int) -> str:
    """Return the error on a rank if a document of both ranks is cut inside a block."""
    configure()
    case = Case.draw(3, 2, "blocks", cut=True)
    case.ids[0][8:12] = 0
    try:
        run_case(rank, case)
    except hf_distca.DistCAError as error:
        return str(error)
    return ""


def test_a_document_cut_inside_a_block_is_refused(rank_pool: RankPools) -> None:
    for error in rank_pool(2)(run_cut_block):
        assert "lies in several parts" in error


def test_blocks_of_whole_dealt_documents_count_as_work_of_the_home_rank() -> None:
    """The plan of a dealt share does not know of blocks."""
    pairs = CostModel.make_of_pairs(AttentionShape(HEADS, KEY_HEADS, WIDTH, WIDTH, 8))
    key, config = PlanKey(pairs.shape, "cpu"), hf_distca.DistCAConfig(tile=8, cost_model=pairs)
    share = Dealing(2, 96, {key: pairs}, config).make_share(np.array([12] * 16), (0, 0), 0)
    documents = TokenBatch(1, sum(share.lengths), share).read_documents(span_ranks=True)
    assert documents.dealt_share is not None
    ids = torch.full((1, sum(share.lengths)), -1)
    ids[0, 3:6] = ids[0, 14:16] = 0  # of two documents
    found = sum_documents(Ahead(ids), documents, None, torch.device("cpu"))
    assert found.dealt_share is None
    assert found.home_pairs == 3 + 1
    assert found.runs[:, 2].tolist() == documents.runs[:, 2].tolist()
