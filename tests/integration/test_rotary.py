"""Rotary embeddings that depend on the longest document: two ranks with parts of documents equal
one process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_masks import build_model
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import hf_distca
from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.dealt_share import Dealing
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.integration.hooks.positions import extend_rotary
from ranks import RankPool, RankPools
from tiny_runs import PAIRS, SIZES, settings, tiny_llama
from turns import in_turn

TRAINED = 64  # positions that the models were trained with
TOKENS = 64  # on a rank
# By batch, the longest document is longer than TRAINED, shorter, the longest of all, as long as
# TRAINED, and longer again. So frequencies grow, and are reset.
BATCHES = ((67, 33, 28), (40, 48, 37, 3), (100, 28), (64, 60, 4), (65, 63))

_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
_FACTORS = {
    "short_factor": [1.0 + 0.1 * n for n in range(8)],
    "long_factor": [2.0 + n for n in range(8)],
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": TRAINED,
    **_FACTORS,
}
_MIXED = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": _DYNAMIC,
}
ROPES: dict[tuple[str, str], dict[str, Any]] = {
    ("llama", "dynamic"): {"rope_parameters": _DYNAMIC},
    ("llama", "longrope"): {"rope_parameters": {**_LONGROPE, "factor": 4.0}},
    ("phi3", "longrope"): {
        "rope_parameters": _LONGROPE,
        "original_max_position_embeddings": TRAINED,
    },
    ("phimoe", "longrope"): {
        "rope_parameters": {**_LONGROPE, "short_mscale": 1.1, "long_mscale": 1.4},
        "num_local_experts": 4,
        "router_jitter_noise": 0.0,
    },
    ("gemma3_text", "dynamic"): {
        "rope_parameters": _MIXED,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
        "head_dim": 16,
    },
}
CHOSEN = in_turn([pytest.param(kind) for kind in ROPES], 3, [("llama", "dynamic")])
_SIZES = {
    **SIZES,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}


def build_tiny(kind: tuple[str, str], implementation: str) -> PreTrainedModel:
    trained = TRAINED if kind[1] == "dynamic" else 4 * TRAINED
    config = CONFIG_MAPPING[kind[0]](max_position_embeddings=trained, **_SIZES, **ROPES[kind])
    if hasattr(config, "num_local_experts"):
        config._experts_implementation = "eager"
    return build_model(config, implementation)


def draw_documents(number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randint(3, 61, (length,), generator=generator) for length in BATCHES[number]]


def sum_losses(
    model: torch.nn.Module, number: int, runs: list[tuple[int, int, int]], **batch: Any
) -> torch.Tensor:
    """Sum the next-token losses of runs (document, start, length) of a global batch."""
    documents = draw_documents(number)
    targets = [torch.cat([one[1:], torch.tensor([-100])]) for one in documents]
    ids, shifted = (
        torch.cat([rows[d][a : a + n] for d, a, n in runs])[None] for rows in (documents, targets)
    )
    positions = torch.cat([torch.arange(a, a + n) for _, a, n in runs])[None]
    logits = model(input_ids=ids, position_ids=positions, use_cache=False, **batch).logits
    return cross_entropy(logits[0], shifted[0], reduction="sum")


def train_alone(
    kind: tuple[str, str], numbers: tuple[int, ...]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train one process under sdpa; return losses of global batches, and summed gradients."""
    model = build_tiny(kind, "sdpa")
    losses = [
        sum_losses(model, number, [(d, 0, n) for d, n in enumerate(BATCHES[number])])
        for number in numbers
    ]
    torch.stack(losses).sum().backward()
    return [float(loss.detach()) for loss in losses], {
        name: p.grad for name, p in model.named_parameters()
    }


def train_on_shares(
    rank: int,
    kind: tuple[str, str],
    numbers: tuple[int, ...],
    how: str,
    ping_pong: bool,
    lone_rank: int | None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    config = settings(ping_pong=ping_pong)
    hf_distca.configure(config)
    model = build_tiny(kind, "distca")
    names = [name for name, _ in model.named_parameters()]
    if how in ("reentrant", "not reentrant"):
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
        model.enable_input_require_grads()
    if how == "prepared":
        hf_distca.prepare(model)
    forward: Any = torch.compile(model, backend="aot_eager") if how == "compiled" else model
    if how == "FSDP2":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    dealing = Dealing(2, TOKENS, {PlanKey(PAIRS.shape, "cpu", None): PAIRS}, config)
    losses = []
    for number in numbers:
        if rank == lone_rank:  # this rank alone runs a row longer than all documents
            model.eval().generate(torch.full((1, 150), 7), max_new_tokens=number + 1)
            model.train()
        share = dealing.make_share(np.array(BATCHES[number]), (0, number), rank)
        runs = list(zip(share.documents, share.starts, share.lengths, strict=True))
        losses.append(sum_losses(forward, number, runs, distca_documents=share))
    (torch.stack(losses).sum() * (2 if how == "FSDP2" else 1)).backward()
    total = torch.stack([loss.detach() for loss in losses])
    dist.all_reduce(total)
    grads = [p.grad for p in model.parameters()]
    if how == "FSDP2":
        grads = [grad.full_tensor() for grad in grads]
    else:
        for grad in grads:
            dist.all_reduce(grad)
    return total.tolist(), dict(zip(names, grads, strict=True))


def check(
    pool: RankPool,
    kind: tuple[str, str],
    numbers: tuple[int, ...],
    how: str = "plain",
    *,
    ping_pong: bool = False,
    lone_rank: int | None = None,
) -> None:
    losses, grads = train_alone(kind, numbers)
    for found, found_grads in pool(train_on_shares, kind, numbers, how, ping_pong, lone_rank):
        assert found == pytest.approx(losses, rel=1e-6)
        for name, grad in grads.items():
            assert float((found_grads[name] - grad).norm()) <= 1e-5 * float(grad.norm()) + 1e-12, (
                name
            )


@pytest.mark.parametrize("kind", CHOSEN, ids=" ".join)
def test_rotary_frequencies_follow_the_longest_document_of_all_ranks(
    rank_pool: RankPools, kind: tuple[str, str]
) -> None:
    check(rank_pool(2), kind, tuple(range(len(BATCHES))))


@pytest.mark.parametrize(
    "how",
    [
        "prepared",
        "reentrant",
        "not reentrant",
        "FSDP2",
        pytest.param("compiled", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", [("llama", "dynamic"), ("phi3", "longrope")], ids=" ".join)
def test_rotary_is_exact_under_every_engine(
    rank_pool: RankPools, kind: tuple[str, str], how: str
) -> None:
    """All forwards run before all backwards, so a recompute must find the frequencies of its own
    batch.
    """
    check(rank_pool(2), kind, (0, 1), how)


@pytest.mark.parametrize("kind", [("llama", "dynamic"), ("phi3", "longrope")], ids=" ".join)
def test_rotary_is_exact_in_ping_pong(rank_pool: RankPools, kind: tuple[str, str]) -> None:
    check(rank_pool(2), kind, (0, 1, 3), ping_pong=True)


@pytest.mark.parametrize(
    ("kind", "lone_rank"), [(("llama", "dynamic"), 0), (("gemma3_text", "dynamic"), 1)]
)
def test_long_evaluation_on_one_rank_keeps_the_frequencies_of_shares(
    rank_pool: RankPools, kind: tuple[str, str], lone_rank: int
) -> None:
    check(rank_pool(2), kind, tuple(range(len(BATCHES))), lone_rank=lone_rank)


@pytest.mark.parametrize("kind", ROPES, ids=" ".join)
def test_plain_rows_that_run_after_a_share_have_the_logits_of_sdpa(kind: tuple[str, str]) -> None:
    """Rows without documents, in evaluation or generation, have the frequencies of their own
    length.
    """
    hf_distca.configure(settings())
    model = build_tiny(kind, "distca")
    dealing = Dealing(1, sum(BATCHES[0]), {PlanKey(PAIRS.shape, "cpu", None): PAIRS}, settings())
    runs = [(d, 0, n) for d, n in enumerate(BATCHES[0])]
    sum_losses(model, 0, runs, distca_documents=dealing.make_share(np.array(BATCHES[0]), (0, 0), 0))
    ids = draw_documents(1)[0][None]
    torch.testing.assert_close(
        model(input_ids=ids).logits, build_tiny(kind, "sdpa")(input_ids=ids).logits
    )


def run_parts(rank: int, kind: tuple[str, str], cut: bool) -> str:
    """Run two documents of 20 tokens, or two halves, on each rank; compare logits or return the
    error.
    """
    hf_distca.configure(settings())
    documents, starts = ((0, 1), (20 * rank,) * 2) if cut else ((2 * rank, 2 * rank + 1), (0, 0))
    packed = PackedDocuments((20, 20), starts, documents)
    positions = torch.cat([torch.arange(start, start + 20) for start in starts])[None]
    ids = torch.full((1, 40), 7)
    try:
        logits = build_tiny(kind, "distca")(
            input_ids=ids, position_ids=positions, distca_documents=packed, use_cache=False
        ).logits
    except hf_distca.UnsupportedError as error:
        return str(error)
    want = build_tiny(kind, "sdpa")(input_ids=ids, position_ids=positions, use_cache=False).logits
    return "equal" if torch.allclose(logits, want) else "differs"


@pytest.mark.parametrize("kind", CHOSEN, ids=" ".join)
def test_parts_of_documents_with_unknown_lengths_are_refused(
    rank_pool: RankPools, kind: tuple[str, str]
) -> None:
    for said in rank_pool(2)(run_parts, kind, True):
        assert "a document of this batch is in several parts" in said
        assert f"rotary embedding ({kind[1]}) depends on the longest document of all ranks" in said
    for said in rank_pool(2)(run_parts, kind, False):
        assert said == "equal"


def test_models_whose_layers_make_rotary_embeddings_are_refused() -> None:
    """The recompute of a layer does not know its batch."""
    model = build_tiny(("llama", "dynamic"), "distca")
    assert "which only shares" in str(extend_rotary(model.model, model.config, None))
    other = build_tiny(("llama", "dynamic"), "distca")
    other.model.layers[0].rotary_emb = other.model.rotary_emb
    assert "each layer makes its own" in str(extend_rotary(other.model, other.config, None))
    assert "does not find the module" in str(extend_rotary(None, other.config, None))


def test_rotary_embeddings_of_fixed_frequencies_get_no_hook() -> None:
    model = tiny_llama("distca")
    assert extend_rotary(model.model, model.config, None) is None
    assert not model.model.rotary_emb._forward_pre_hooks
