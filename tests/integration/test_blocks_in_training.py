"""Training of models whose tokens see later tokens: checkpointed, compiled, in ping-pong, and
dealt.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    PreTrainedModel,
)

import hf_distca
from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.dealt_share import Dealing
from hf_distca.errors import UnsupportedError
from hf_distca.integration.current_session import current_session
from hf_distca.schedule.cost import AttentionShape
from ranks import RankPools
from tiny_runs import PAIRS, SIZES, settings

TEXT = {**SIZES, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "image_size": 28,
    "num_attention_heads": 2,
    "patch_size": 14,
}
KINDS = ("images", "both ways")
VARIANTS = (
    "plain",
    "checkpointed",
    "reentrant",
    "compiled",
    "halves",
    "halves, rank 0 one document",
)
# Lengths by rank. A document begins near the middle of a row, where ping-pong cuts.
LENGTHS = ([60, 64], [20, 18])


def build(kind: str, implementation: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "both ways":
        config: Any = LlamaConfig(**TEXT, is_causal=False)
        return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).double()
    text = {**TEXT, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
    config = Gemma3Config(
        text_config=text, vision_config=VISION, mm_tokens_per_image=4, image_token_id=60
    )
    names = {"text_config": implementation, "vision_config": "sdpa"}
    return Gemma3ForConditionalGeneration._from_config(
        copy.deepcopy(config), attn_implementation=names
    ).double()


def make_batch(kind: str, lengths: list[int]) -> dict[str, torch.Tensor]:
    """Make a packed row; the image of each document takes a third of its tokens."""
    places = [torch.arange(length) for length in lengths]
    at = torch.cat(places)[None]
    generator = torch.Generator().manual_seed(sum(lengths))
    batch = {"input_ids": torch.randint(3, 59, at.shape, generator=generator), "position_ids": at}
    if kind == "images":
        thirds = [(p >= len(p) // 3) & (p < 2 * len(p) // 3) for p in places]
        batch["token_type_ids"] = torch.cat(thirds).long()[None]
    return batch


def backward(model: PreTrainedModel, logits: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the logits, and the gradients of a loss."""
    torch.cat(logits).sin().sum().backward()
    return [torch.cat(logits).detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def select_documents(kind: str, lengths: list[int]) -> list[torch.Tensor]:
    """Return logits and gradients of a rank's documents, each alone under sdpa."""
    model, logits = build(kind, "sdpa").train(), []
    batch = make_batch(kind, lengths)
    parts = zip(*(tensor.split(lengths, 1) for tensor in batch.values()), strict=True)
    for tensors in parts:
        one = dict(zip(batch, tensors, strict=True))
        logits.append(model(**one, use_cache=False).logits[0])
    return backward(model, logits)


def train(rank: int, kind: str) -> list[tuple[str, list[torch.Tensor], int, int]]:
    """Return logits, summed gradients, sent bytes and calls of attention for each variant."""
    found = []
    for variant in VARIANTS if kind == "images" else VARIANTS[::2]:
        hf_distca.configure(settings(ping_pong="halves" in variant))
        model = build(kind, "distca").train()
        if variant in ("checkpointed", "reentrant"):
            model.gradient_checkpointing_enable({"use_reentrant": variant == "reentrant"})
            model.enable_input_require_grads()
        called = torch.compile(model, backend="eager") if variant == "compiled" else model
        lengths = LENGTHS[rank] if "one" not in variant or rank else [sum(LENGTHS[rank])]
        logits = called(**make_batch(kind, lengths), use_cache=False).logits[0]
        results = backward(model, [logits])
        for grad in results[1:]:
            dist.all_reduce(grad)
        meter = current_session().meter
        found.append((variant, results, meter.sent_bytes, meter.calls))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_two_way_attention_on_two_ranks_trains_like_sdpa(kind: str, rank_pool: RankPools) -> None:
    found = rank_pool(2)(train, kind)
    wants = {}
    for one in (False, True):
        lengths = [[sum(LENGTHS[0])] if one else LENGTHS[0], LENGTHS[1]]
        wants[one] = [select_documents(kind, of_rank) for of_rank in lengths]
    largest = max(float(tensor.abs().max()) for want in wants[False] for tensor in want)
    for rank, of_rank in enumerate(found):
        for variant, (logits, *grads), sent, calls in of_rank:
            first, second = wants["one" in variant]
            assert sent, f"{variant}: nothing was moved"
            assert calls == (4 if "halves" in variant else 2), variant
            torch.testing.assert_close(
                logits, (first, second)[rank][0], rtol=0, atol=1e-6 * largest
            )
            for got, a, b in zip(grads, first[1:], second[1:], strict=True):
                torch.testing.assert_close(got, a + b, rtol=0, atol=1e-6 * largest, msg=variant)


def deal(rank: int, lengths: list[int]) -> tuple[list[torch.Tensor], str]:
    """Return the logits of a share whose documents attend both ways, or the error."""
    hf_distca.configure(settings())
    key = PlanKey(AttentionShape(4, 2, 16, 16, 8), "cpu")
    share = Dealing(2, 96, {key: PAIRS}, settings()).make_share(
        np.array(lengths), (0, 0), rank, document_ids=np.arange(len(lengths))
    )
    starts, documents = share.starts or (), share.documents or ()
    runs = list(zip(documents, starts, share.lengths, strict=True))
    texts = [make_batch("both ways", [length])["input_ids"][0] for length in lengths]
    ids = torch.cat([texts[d][a : a + n] for d, a, n in runs])[None]
    positions = torch.cat([torch.arange(a, a + n) for _, a, n in runs])[None]
    model = build("both ways", "distca").train()
    try:
        batch = {"input_ids": ids, "position_ids": positions, "distca_documents": share}
        logits = model(**batch, use_cache=False).logits[0]
    except (UnsupportedError, hf_distca.DistCAError) as error:
        return [], str(error)
    want = torch.cat(
        [build("both ways", "sdpa")(input_ids=texts[d][None]).logits[0] for d, _, _ in runs]
    )
    return [logits.detach(), want.detach()], ""


def test_dealt_documents_that_attend_both_ways_must_be_whole(rank_pool: RankPools) -> None:
    """Whole documents get the logits of sdpa, and cut documents are refused on all ranks."""
    for (logits, want), error in rank_pool(2)(deal, [12] * 16):
        assert not error
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-5)
    for _, error in rank_pool(2)(deal, [180, 12]):
        assert "lies in several parts" in error
