"""Models that attend both ways: encoders, decoders with ``is_causal=False``, and prefixes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import quiet
from transformers import AutoConfig, AutoModel, PreTrainedModel

import hf_distca
from float64 import Float64Throughout
from hf_distca.integration.current_session import current_session
from ranks import RankPools
from tiny_runs import settings

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
    "hidden_dropout": 0.0,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER = {"is_causal": False}
# Further config fields of each type.
KINDS: dict[str, dict[str, Any]] = {
    "llama": DECODER,
    "mistral": {**DECODER, "sliding_window": 9},
    "qwen3": DECODER,
    "gemma2": {**DECODER, "sliding_window": 9},
    "hrm_text": {"prefix_lm": True},
    "eurobert": {},
    "modernbert": {"local_attention": 12, "global_attn_every_n_layers": 2},
    "gte": {},
    "nomic_bert": {},
    "jina_embeddings_v3": {},
    "neomme": {},
    "ultrabert": {},
    "esm": {"position_embedding_type": "rotary", "token_dropout": False, "mask_token_id": 3},
    "esmc": {"num_key_value_heads": 4},
    "bert": {},
}
LENGTHS = (70, 9, 1, 23)
PREFIX = 12


def build(kind: str, implementation: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **copy.deepcopy({**SIZES, **KINDS[kind]}))
    if implementation == "sdpa" and kind == "gemma2":
        implementation = "eager"
    model = AutoModel.from_config(config, attn_implementation=implementation).double().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def run(model: PreTrainedModel, lengths: list[int], *, packed: bool) -> list[torch.Tensor]:
    """Run documents, packed in a row or each alone, and return their outputs."""
    docs = [torch.randint(5, 90, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    rows = [docs] if packed else [[doc] for doc in docs]
    found: list[torch.Tensor] = []
    for row in rows:
        places = [torch.arange(len(doc)) for doc in row]
        batch = {"input_ids": torch.cat(row)[None], "position_ids": torch.cat(places)[None]}
        if model.config.model_type == "hrm_text":
            batch["token_type_ids"] = (torch.cat(places) < PREFIX).long()[None]
            batch["use_cache"] = False
        output = model(**batch)[0][0]
        found += output.split([len(doc) for doc in row])
    torch.cat(found).sin().sum().backward()
    return [output.detach() for output in found]


def share(rank: int, kind: str, world: int) -> tuple[list[torch.Tensor], dict[str, Any], int]:
    """Run this rank's documents; return outputs, gradients summed over ranks, and sent bytes."""
    hf_distca.configure(settings())
    lengths = list(LENGTHS) if world == 1 else [list(LENGTHS[:1]), list(LENGTHS[1:])][rank]
    with quiet(), Float64Throughout():
        model = build(kind, "distca")
        outputs = run(model, lengths, packed=True)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for grad in grads.values():
        if world > 1:
            dist.all_reduce(grad)
    return outputs, grads, current_session().meter.sent_bytes


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_equal_each_document_alone(
    kind: str,
    world: int,
    rank_pool: RankPools,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with quiet(), Float64Throughout():
        model = build(kind, "sdpa")
        want = run(model, list(LENGTHS), packed=False)
    found = rank_pool(2)(share, kind, 2) if world == 2 else [share(0, kind, 1)]
    assert all(bool(sent) == (world == 2) for *_, sent in found)
    got = [output for outputs, *_ in found for output in outputs]
    scale = max(float(w.abs().max()) for w in want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10 * scale)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for name, grad in grads.items():
        torch.testing.assert_close(found[0][1][name], grad, rtol=0, atol=1e-10 * largest, msg=name)
    assert "never compared" not in caplog.text
