"""Vision-language models with packed images: distca runs only the language tower."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import Outcome, difference, finish, quiet, spy_on
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    LlavaConfig,
    Molmo2Config,
    PaliGemmaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2VLConfig,
)

import hf_distca
from float64 import Float64Throughout
from hf_distca.integration.current_session import current_session
from ranks import RankPools
from tiny_runs import settings

IMAGE, START, END = 5, 6, 7  # tokens
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
PATCHES = {"patch_size": 7, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN_VISION = {
    "depth": 2,
    "embed_dim": 32,
    "hidden_size": 64,
    "num_heads": 2,
    "mlp_ratio": 2,
    **PATCHES,
}
# Text tokens around the image of each document.
LENGTHS = (90, 3, 21)


SIGLIP = {**CLIP, "model_type": "siglip_vision_model", "vision_use_head": False}
WINDOWED = {
    **TEXT,
    "head_dim": 16,
    "sliding_window": 14,
    "layer_types": ["sliding_attention", "full_attention"],
}


def _gemma4(**changes: Any) -> PreTrainedConfig:
    text = {**WINDOWED, "global_head_dim": 16, "hidden_size_per_layer_input": 0}
    text |= {"num_kv_shared_layers": 0, "use_bidirectional_attention": "vision", **changes}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    vision |= {"num_attention_heads": 2, "num_key_value_heads": 2, "patch_size": 7}
    vision |= {"pooling_kernel_size": 2, "position_embedding_size": 16}
    return Gemma4Config(
        text_config=text, vision_config=vision, audio_config=None, image_token_id=IMAGE
    )


def _paligemma(text: dict[str, Any]) -> PreTrainedConfig:
    return PaliGemmaConfig(
        text_config=text, vision_config=SIGLIP, image_token_id=IMAGE, projection_dim=64
    )


def _molmo2() -> PreTrainedConfig:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    vision = {**heads, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    adapter = {**heads, "hidden_size": 32, "intermediate_size": 48, "text_hidden_size": 64}
    return Molmo2Config(
        text_config={**TEXT, "head_dim": 16},
        vision_config={**vision, "image_size": [28, 28], "patch_size": 7},
        adapter_config={**adapter, "vision_feature_layer": [-1]},
        image_patch_id=IMAGE,
    )


# Models whose images or prefixes attend to later tokens.
SEEING_AHEAD: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma3": lambda: Gemma3Config(
        text_config=WINDOWED, vision_config=SIGLIP, mm_tokens_per_image=16, image_token_id=IMAGE
    ),
    "gemma4": _gemma4,
    "paligemma": lambda: _paligemma({**TEXT, "model_type": "gemma", "head_dim": 16}),
    "paligemma, windows": lambda: _paligemma(
        {**WINDOWED, "model_type": "gemma2", "sliding_window": 25}
    ),
    "molmo2": _molmo2,
}


def make_config(kind: str) -> PreTrainedConfig:
    if kind == "llava":
        text = {"model_type": "llama", **TEXT}
        return LlavaConfig(
            text_config=text,
            vision_config=dict(CLIP),
            image_token_index=IMAGE,
            vision_feature_layer=-1,
        )
    if kind in SEEING_AHEAD:
        return SEEING_AHEAD[kind]()
    text = {**TEXT, "rope_parameters": MROPE}  # Qwen2-VL
    tokens = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END}
    return Qwen2VLConfig(text_config=text, vision_config=dict(QWEN_VISION), **tokens)


def build(kind: str, implementation: str | dict[str, str]) -> PreTrainedModel:
    torch.manual_seed(0)
    with quiet():
        model = AutoModelForImageTextToText.from_config(
            make_config(kind), attn_implementation=implementation
        )
    return model.double().train()


@dataclass
class Document:
    """Tokens, an image, and positions (1, tokens), or (3 or 4, 1, tokens) for M-RoPE."""

    ids: torch.Tensor
    image: dict[str, torch.Tensor]
    positions: torch.Tensor


def documents(kind: str, model: PreTrainedModel) -> list[Document]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for length in LENGTHS:
        text = torch.randint(32, 96, (length,), generator=generator)
        count = 4 if kind in ("gemma4", "molmo2") or "qwen" in kind else 16
        image = [START, *[IMAGE] * count, END]
        ids = torch.cat([text[:2], torch.tensor(image), text[2:]])
        positions = torch.arange(len(ids))[None]
        if kind in SEEING_AHEAD or kind == "llava":
            pixels = torch.randn(1, 3, 28, 28, generator=generator).double()
            made.append(Document(ids, give_image(kind, pixels), positions))
            continue
        grid = torch.tensor([[1, 4, 4]])
        types = (ids == IMAGE).int()[None]
        spatial, _ = model.model.get_rope_index(
            ids[None], mm_token_type_ids=types, image_grid_thw=grid
        )
        pixels = torch.randn(16, 3 * 2 * 49, generator=generator).double()
        axes = [spatial] if kind == "qwen2_vl, three axes" else [positions[None], spatial]
        made.append(
            Document(ids, {"pixel_values": pixels, "image_grid_thw": grid}, torch.cat(axes))
        )
    return made


def give_image(kind: str, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Convert an image of 28 x 28 to the inputs of a model."""
    if kind not in ("gemma4", "molmo2"):
        return {"pixel_values": pixels}
    patches = pixels.unfold(2, 7, 7).unfold(3, 7, 7).permute(0, 2, 3, 4, 5, 1).reshape(1, 16, 147)
    rows, columns = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    if kind == "gemma4":
        places = torch.stack([columns, rows], -1).reshape(1, 16, 2)
        return {"pixel_values": patches, "image_position_ids": places}
    pooled = (rows // 2 * 2 + columns // 2).flatten().argsort(stable=True).view(4, 4)
    grids = torch.tensor([[2, 2, 0, 0]])
    return {"pixel_values": patches, "image_token_pooling": pooled, "image_grids": grids}


def mark_tokens(kind: str, docs: list[Document]) -> dict[str, torch.Tensor]:
    """Mark tokens like a processor: images, or text after a prefix."""
    ids = torch.cat([d.ids for d in docs])[None]
    if kind.startswith("paligemma"):
        prefixes = [torch.arange(len(d.ids)) >= 22 for d in docs]
        return {"token_type_ids": torch.cat(prefixes).long()[None]}
    if kind == "llava":
        return {}
    name = "token_type_ids" if kind == "gemma3" else "mm_token_type_ids"
    return {name: (ids == IMAGE).int()}


def widen(kind: str) -> AbstractContextManager[object]:
    """Compute in float64 throughout; parts of Gemma 4 need float32."""
    return nullcontext() if kind == "gemma4" else Float64Throughout()


def forward(kind: str, model: PreTrainedModel, docs: list[Document]) -> torch.Tensor:
    """Run packed documents, and return logits (tokens, vocabulary)."""
    ids = torch.cat([d.ids for d in docs])[None]
    images = {name: torch.cat([d.image[name] for d in docs]) for name in docs[0].image}
    positions = torch.cat([d.positions for d in docs], -1)
    extra = mark_tokens(kind, docs)
    if "image_token_pooling" in images:
        images["image_token_pooling"] += 16 * torch.arange(len(docs)).repeat_interleave(4)[:, None]
    return model(input_ids=ids, position_ids=positions, use_cache=False, **images, **extra).logits[
        0
    ]


def alone(kind: str) -> Outcome:
    """Run every document alone, with all towers under sdpa."""
    # Gemma 2 has no sdpa.
    model = build(kind, "sdpa" if "windows" not in kind else "eager")
    docs = documents(kind, model)
    with widen(kind):
        return finish(model, [d.ids for d in docs], [forward(kind, model, [d]) for d in docs])


def balance(rank: int, kind: str, world: int) -> tuple[Outcome, list[str], list[str], int]:
    """Run this rank's documents; return the outcome, callers of distca and sdpa, and sent bytes."""
    hf_distca.configure(settings())
    model = build(kind, {"text_config": "distca", "vision_config": "sdpa"})
    docs = documents(kind, model)
    if world > 1:
        docs = docs[:1] if rank == 0 else docs[1:]
    with spy_on("distca") as ours, spy_on("sdpa") as theirs, widen(kind):
        logits = forward(kind, model, docs)
        outcome = finish(
            model, [d.ids for d in docs], list(logits.split([len(d.ids) for d in docs]))
        )
    for grad in outcome.grads.values():
        if grad is not None and world > 1:
            dist.all_reduce(grad)
    names = {module: name for name, module in model.named_modules()}
    callers = [sorted(names[module] for module in calls.modules) for calls in (ours, theirs)]
    return outcome, *callers, current_session().meter.sent_bytes


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", ["llava", "qwen2_vl", "qwen2_vl, three axes", *SEEING_AHEAD])
def test_language_tower_is_balanced_and_vision_tower_is_not(
    kind: str,
    world: int,
    rank_pool: RankPools,
    caplog: pytest.LogCaptureFixture,
) -> None:
    want = alone(kind)
    results = rank_pool(2)(balance, kind, 2) if world == 2 else [balance(0, kind, 1)]
    outcomes = [outcome for outcome, *_ in results]
    got = Outcome(
        sum(o.loss for o in outcomes),
        [piece for o in outcomes for piece in o.logits],
        outcomes[0].grads,
    )
    value, what = difference(got, want)
    assert value <= (1e-6 if kind == "gemma4" else 1e-9), what
    vision = [
        name
        for name, grad in want.grads.items()
        if "vision" in name or "visual" in name
        if grad is not None
    ]
    assert vision, "no image reached the loss"
    for _, ours, theirs, sent in results:
        assert len(ours) == 2 <= len(theirs)
        assert all("language_model" in name for name in ours)
        if kind == "molmo2":
            assert "pooling" in theirs.pop(0)
        assert all("vis" in name for name in theirs)
        assert bool(sent) == (world == 2)
    assert "never compared" not in caplog.text


def test_a_vision_tower_under_distca_is_refused() -> None:
    model = build("llava", "distca")
    with pytest.raises(hf_distca.UnsupportedError, match="CLIPAttention is not causal"):
        forward("llava", model, documents("llava", model))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layers", ["sliding_attention full_attention", "sliding_attention"])
def test_text_of_a_model_with_bidirectional_images_equals_sdpa(layers: str, training: bool) -> None:
    """The processor of Gemma 4 gives token types even for text without images."""
    kinds = layers.split()
    config = _gemma4(layer_types=kinds, num_hidden_layers=len(kinds), sliding_window=6)
    ids = torch.arange(3, 33)[None]
    batch = {"input_ids": ids, "mm_token_type_ids": torch.zeros_like(ids), "use_cache": False}
    batch["position_ids"] = torch.cat([torch.arange(20), torch.arange(10)])[None]
    found = []
    for name in ("distca", "sdpa"):
        torch.manual_seed(0)
        with quiet():
            model = Gemma4ForConditionalGeneration._from_config(
                copy.deepcopy(config), attn_implementation=name
            )
        logits = model.train(training)(**batch).logits
        logits.sin().sum().backward()
        found.append([logits.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
