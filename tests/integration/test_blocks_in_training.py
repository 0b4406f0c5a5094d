"""Models whose tokens see others behind them, as they are trained: checkpointed, compiled, in
halves, dealt, and in a Trainer.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPImageProcessor,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessor,
    Gemma3Processor,
    LlamaConfig,
    LlavaConfig,
    LlavaProcessor,
    PaliGemmaConfig,
    PaliGemmaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    SiglipImageProcessor,
    Trainer,
    TrainingArguments,
)

import hf_distca
from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.dealt_share import Dealing
from hf_distca.errors import LayoutError, UnsupportedError
from hf_distca.integration.current_session import current_session
from hf_distca.schedule.cost import AttentionShape
from ranks import RankPool
from tiny_runs import COMMON, PAIRS, settings

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 61,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "image_size": 28,
    "num_attention_heads": 2,
    "patch_size": 14,
}
KINDS = ("images", "both ways")
VARIANTS = ("plain", "checkpointed", "reentrant", "compiled", "halves", "halves, one document")
# By rank; documents begin near the middle of rows, for halves.
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
    """A packed row; the image of each document takes a third of it."""
    places = [torch.arange(length) for length in lengths]
    at = torch.cat(places)[None]
    generator = torch.Generator().manual_seed(sum(lengths))
    batch = {"input_ids": torch.randint(3, 59, at.shape, generator=generator), "position_ids": at}
    if kind == "images":
        thirds = [(p >= len(p) // 3) & (p < 2 * len(p) // 3) for p in places]
        batch["token_type_ids"] = torch.cat(thirds).long()[None]
    return batch


def run(model: PreTrainedModel, kind: str, rows: list[list[int]]) -> list[torch.Tensor]:
    """Logits of rows, and gradients of their sum."""
    logits = []
    for lengths in rows:
        batch = make_batch(kind, lengths)
        logits.append(model(**batch, use_cache=False).logits[0])
    torch.cat(logits).sin().sum().backward()
    return [torch.cat(logits).detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def select_documents(kind: str, lengths: list[int]) -> list[torch.Tensor]:
    """Logits and gradients of a rank's documents, each alone under sdpa."""
    model, logits = build(kind, "sdpa").train(), []
    batch = make_batch(kind, lengths)
    parts = zip(*(tensor.split(lengths, 1) for tensor in batch.values()), strict=True)
    for tensors in parts:
        one = dict(zip(batch, tensors, strict=True))
        logits.append(model(**one, use_cache=False).logits[0])
    torch.cat(logits).sin().sum().backward()
    return [torch.cat(logits).detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def train(rank: int, kind: str) -> list[tuple[str, list[torch.Tensor], int, int]]:
    """Logits, summed gradients, bytes sent and calls of attention, of all variants."""
    found = []
    for variant in VARIANTS if kind == "images" else VARIANTS[::2]:
        hf_distca.configure(settings(ping_pong="halves" in variant))
        model = build(kind, "distca").train()
        if variant in ("checkpointed", "reentrant"):
            model.gradient_checkpointing_enable({"use_reentrant": variant == "reentrant"})
            model.enable_input_require_grads()
        called = torch.compile(model, backend="eager") if variant == "compiled" else model
        lengths = LENGTHS[rank] if "one" not in variant else [sum(LENGTHS[rank])]
        results = run(called, kind, [lengths])
        for grad in results[1:]:
            dist.all_reduce(grad)
        meter = current_session().meter
        found.append((variant, results, meter.sent_bytes, meter.calls))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_training_on_two_ranks(kind: str, rank_pool: Callable[[int], RankPool]) -> None:
    found = rank_pool(2)(train, kind)
    wants = {}
    for one in (False, True):
        lengths = [[sum(n)] if one else n for n in LENGTHS]
        wants[one] = [select_documents(kind, of_rank) for of_rank in lengths]
    largest = max(float(tensor.abs().max()) for want in wants[False] for tensor in want)
    for rank, of_rank in enumerate(found):
        for variant, (logits, *grads), sent, calls in of_rank:
            first, second = wants["one" in variant]
            assert sent, f"{variant}: nothing was moved"
            assert calls == (4 if variant == "halves" else 2), variant
            torch.testing.assert_close(
                logits, (first, second)[rank][0], rtol=0, atol=1e-6 * largest
            )
            for got, a, b in zip(grads, first[1:], second[1:], strict=True):
                torch.testing.assert_close(got, a + b, rtol=0, atol=1e-6 * largest, msg=variant)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of forty words."""
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"w{i}" for i in range(40))]
    words += [f"rest{i}" for i in range(len(words), 58)] + ["<boi>", "<eoi>", "<img>"]
    words_of = Tokenizer(
        models.WordLevel(dict(zip(words, range(61), strict=True)), unk_token="<unk>")
    )
    words_of.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"image_token": "<img>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
    ends = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=words_of, unk_token="<unk>", extra_special_tokens=names, **ends
    )


def make_processor(kind: str) -> ProcessorMixin:
    """The processor of a family: an image becomes four tokens."""
    size = {"height": 28, "width": 28}
    if kind == "gemma3":
        return Gemma3Processor(
            Gemma3ImageProcessor(size=size), make_tokenizer(), image_seq_length=4
        )
    if kind == "paligemma":
        images = SiglipImageProcessor(size=size)
        images.image_seq_length = 4
        return PaliGemmaProcessor(images, make_tokenizer())
    images = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=size)
    return LlavaProcessor(
        images,
        make_tokenizer(),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def build_with_images(kind: str, implementation: str) -> PreTrainedModel:
    if kind == "gemma3":
        return build("images", implementation)
    torch.manual_seed(0)
    if kind == "paligemma":
        config: Any = PaliGemmaConfig(
            text_config={**TEXT, "model_type": "gemma"},
            vision_config={**VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
            image_token_id=60,
            projection_dim=64,
        )
    else:
        config = LlavaConfig(
            text_config={**TEXT, "model_type": "llama"},
            vision_config={**VISION, "model_type": "clip_vision_model"},
            image_token_index=60,
            vision_feature_layer=-1,
        )
    names = {"text_config": implementation, "vision_config": "sdpa"}
    return AutoModelForImageTextToText.from_config(config, attn_implementation=names)


def make_row(kind: str, words: int, rng: np.random.Generator) -> dict[str, Any]:
    """A text of so many words around an image; PaliGemma has it first."""
    texts = [f"w{word}" for word in rng.integers(0, 40, words)]
    if kind != "paligemma":
        token = "<boi>" if kind == "gemma3" else "<img>"
        texts.insert(int(rng.integers(0, words)), token)
    pixels = (rng.random((30, 40, 3)) * 255).astype("uint8")
    return {"text": " ".join(texts), "image": Image.fromarray(pixels)}


def train_images(
    rank: int, kind: str, implementation: str, bf16: bool = False
) -> tuple[list[float], int]:
    """Losses and gradient norms of a Trainer on padded rows with images, and bytes sent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        processor: Any = make_processor(kind)
    rng = np.random.default_rng(0)
    rows = [make_row(kind, words, rng) for words in (90, 5, 20, 3, 12, 80, 7, 4)]

    def collate(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        texts, images = [row["text"] for row in features], [[row["image"]] for row in features]
        given: dict[str, Any] = {"text": texts, "images": images}
        if kind == "paligemma":  # learns the second half of a text
            halves = [text.split() for text in texts]
            given["text"] = ["<img> " + " ".join(words[: len(words) // 2]) for words in halves]
            given["suffix"] = [" ".join(words[len(words) // 2 :]) + " " for words in halves]
        batch = dict(processor(**given, padding=True, return_tensors="pt"))
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return {"labels": labels, **batch}

    arguments = {**COMMON, "output_dir": tempfile.gettempdir(), "max_steps": 2, "bf16": bf16}
    arguments |= {"per_device_train_batch_size": 2, "remove_unused_columns": False}
    trainer = Trainer(
        build_with_images(kind, implementation).float(),
        TrainingArguments(**arguments),
        data_collator=collate,
        train_dataset=rows,
        callbacks=[hf_distca.DistCACallback(settings(), record=False)],
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    found = [entry[name] for entry in logged for name in ("loss", "grad_norm")]
    return found, current_session().meter.sent_bytes


@pytest.mark.parametrize("kind", ["gemma3", "paligemma", "llava"])
def test_a_trainer_with_images(kind: str, rank_pool: Callable[[int], RankPool]) -> None:
    """What the processor of a family makes of texts and images, in padded rows on two ranks."""
    (ours, sent), *_ = rank_pool(2)(train_images, kind, "distca")
    (theirs, _), *_ = rank_pool(2)(train_images, kind, "sdpa")
    assert sent
    assert len(ours) == 4
    assert ours == pytest.approx(theirs, rel=1e-4)
    if kind != "gemma3":
        return
    # In bf16 as far from that as eager attention is.
    halves = [rank_pool(2)(train_images, kind, name, True)[0][0] for name in ("distca", "eager")]
    far, eager = (
        max(abs(a / b - 1) for a, b in zip(found, theirs, strict=True)) for found in halves
    )
    assert 0 < far <= 1.5 * eager


def test_images_are_not_packed_or_dealt_by_distca() -> None:
    row = {"input_ids": [3, 60, 60, 4], "token_type_ids": [0, 1, 1, 0]}
    with pytest.raises(LayoutError, match="token_type_ids"):
        hf_distca.PackingCollator(build("images", "distca"))([row])
    arguments = {**COMMON, "output_dir": tempfile.gettempdir(), "bf16": False}
    trainer = Trainer(
        build("images", "distca").float(), TrainingArguments(**arguments), train_dataset=[row] * 4
    )
    with pytest.raises(LayoutError, match="token_type_ids"):
        hf_distca.deal(trainer, 16)


def deal(rank: int, lengths: list[int]) -> tuple[list[torch.Tensor], str]:
    """Logits of a share of documents whose tokens all see each other, or the error."""
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


def test_dealt_documents_that_see_all_of_themselves(rank_pool: Callable[[int], RankPool]) -> None:
    """Whole ones are right, and those that were cut are refused on all ranks."""
    for (logits, want), error in rank_pool(2)(deal, [12] * 16):
        assert not error
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-5)
    for _, error in rank_pool(2)(deal, [180, 12]):
        assert "lies in several parts" in error
