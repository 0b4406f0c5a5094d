"""Vision-language models train on batches of their own processors, which cannot be packed."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any
from unittest.mock import patch

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from test_blocks_in_training import TEXT, VISION, build
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional
from transformers import (
    AutoModelForImageTextToText,
    CLIPImageProcessor,
    Gemma3ImageProcessor,
    Gemma3Processor,
    Gemma4AudioFeatureExtractor,
    Gemma4Config,
    Gemma4ImageProcessor,
    Gemma4Processor,
    LlavaConfig,
    LlavaProcessor,
    Molmo2Config,
    Molmo2Processor,
    PaliGemmaConfig,
    PaliGemmaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2VLConfig,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    SiglipImageProcessor,
    Trainer,
    processing_utils,
)
from transformers.models.molmo2.image_processing_molmo2 import Molmo2ImageProcessor
from transformers.video_processing_utils import VideoProcessorMixin

import hf_distca
from hf_distca.errors import LayoutError
from hf_distca.integration.current_session import current_session
from ranks import RankPools
from tiny_runs import exact_arguments, settings

KINDS = ("gemma3", "gemma4", "paligemma", "llava", "molmo2", "qwen2_vl")
WORDS = [f"w{number}" for number in range(40)]
ENDS = {"pad": "<pad>", "bos": "<bos>", "eos": "<eos>", "unk": "<unk>"}
# Tokens that processors write around or instead of images; some processors look up names.
MOLMO2 = ("im_patch", "im_col", "im_start", "low_res_im_start", "im_end", "im_low")
SPECIAL = {name: f"<{name}>" for name in (*MOLMO2, "frame_start", "frame_end", "vision", "/vision")}
SPECIAL |= {"audio": "<audio>", "boa": "<boa>", "eoa": "<eoa>", "video": "<|video|>"}
SPECIAL |= {"boi": "<boi>", "eoi": "<eoi>", "image": "<image>"}
VOCABULARY = [*ENDS.values(), *WORDS, *SPECIAL.values()]
ID = {word: number for number, word in enumerate(VOCABULARY)}


def make_tokenizer(side: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer of forty words that pads on one side."""
    words = Tokenizer(models.WordLevel(ID, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        padding_side=side,
        extra_special_tokens={f"{name}_token": word for name, word in SPECIAL.items()},
        **{f"{name}_token": word for name, word in ENDS.items()},
    )


class Molmo2Images(Molmo2ImageProcessor):
    """Molmo2's image processor, with torch instead of torchvision."""

    def resize(self, image: torch.Tensor, size: Any, **_: Any) -> torch.Tensor:
        return functional.interpolate(image, (size.height, size.width), mode="bilinear")

    def normalize(
        self, image: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        return (image - mean[:, None, None]) / std[:, None, None]


def make_processor(kind: str) -> ProcessorMixin:
    """Make the processor of a family, for images of about 28 x 28 pixels."""
    size = {"height": 28, "width": 28}
    tokenizer = make_tokenizer("left" if kind in ("gemma4", "qwen2_vl") else "right")
    if kind == "gemma3":
        return Gemma3Processor(Gemma3ImageProcessor(size=size), tokenizer, image_seq_length=4)
    if kind == "paligemma":
        images = SiglipImageProcessor(size=size)
        images.image_seq_length = 4
        return PaliGemmaProcessor(images, tokenizer)
    if kind == "llava":
        images = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=size)
        return LlavaProcessor(
            images,
            tokenizer,
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )
    # The other families need a video processor, which transformers has only with torchvision.
    videos = VideoProcessorMixin()
    where = processing_utils.transformers_module
    with patch.object(where, "VideoProcessorMixin", VideoProcessorMixin, create=True):
        if kind == "gemma4":
            images = Gemma4ImageProcessor(patch_size=7, max_soft_tokens=70, pooling_kernel_size=2)
            return Gemma4Processor(Gemma4AudioFeatureExtractor(), images, tokenizer, videos)
        if kind == "molmo2":
            images = Molmo2Images(size=size, patch_size=7, overlap_margins=[1, 1], max_crops=2)
            return Molmo2Processor(images, videos, tokenizer)
        images = Qwen2VLImageProcessor(
            size={"shortest_edge": 28 * 28, "longest_edge": 42 * 42}, patch_size=7
        )
        return Qwen2VLProcessor(images, tokenizer, videos)


def make_config(kind: str) -> Any:
    text = {**TEXT, "vocab_size": len(VOCABULARY), "initializer_range": 0.1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    if kind == "paligemma":
        return PaliGemmaConfig(
            text_config={**text, "model_type": "gemma"},
            vision_config={**VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
            image_token_id=ID["<image>"],
            projection_dim=64,
        )
    if kind == "llava":
        return LlavaConfig(
            text_config={**text, "model_type": "llama"},
            vision_config={**VISION, "model_type": "clip_vision_model"},
            image_token_index=ID["<image>"],
            vision_feature_layer=-1,
        )
    if kind == "gemma4":
        text |= {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
        text |= {"global_head_dim": 16, "hidden_size_per_layer_input": 0}
        text |= {"num_kv_shared_layers": 0, "use_bidirectional_attention": "vision"}
        vision = {**VISION, **heads, "patch_size": 7, "pooling_kernel_size": 2}
        return Gemma4Config(
            text_config=text,
            vision_config={**vision, "position_embedding_size": 64},
            audio_config=None,
            image_token_id=ID["<image>"],
        )
    if kind == "molmo2":
        return Molmo2Config(
            text_config=text,
            vision_config={**VISION, **heads, "image_size": [28, 28], "patch_size": 7},
            adapter_config={
                **heads,
                "hidden_size": 32,
                "intermediate_size": 32,
                "text_hidden_size": 64,
                "vision_feature_layer": [-1],
            },
            image_patch_id=ID["<im_patch>"],
        )
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 1}
    return Qwen2VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config={**vision, "patch_size": 7},
        image_token_id=ID["<image>"],
        video_token_id=ID["<|video|>"],
        vision_start_token_id=ID["<vision>"],
        vision_end_token_id=ID["</vision>"],
    )


def build_with_images(kind: str, implementation: str) -> PreTrainedModel:
    if kind == "gemma3":
        return build("images", implementation).float()
    torch.manual_seed(0)
    names = {"text_config": implementation, "vision_config": "sdpa"}
    return AutoModelForImageTextToText.from_config(make_config(kind), attn_implementation=names)


def make_row(kind: str, words: int, rng: np.random.Generator) -> dict[str, Any]:
    """Make a text of `words` words around one or two images; PaliGemma has one image, in front."""
    texts = [WORDS[number] for number in rng.integers(0, 40, words)]
    token = {"gemma3": "<boi>", "qwen2_vl": "<vision> <image> </vision>"}.get(kind, "<image>")
    count = 1 if kind == "paligemma" else int(rng.integers(1, 3))
    for _ in range(count):
        texts.insert(0 if kind == "paligemma" else int(rng.integers(0, words)), token)
    shapes = rng.integers(20, 60, (count, 2))
    pixels = [(rng.random((*shape, 3)) * 255).astype("uint8") for shape in shapes]
    return {"text": " ".join(texts), "images": [Image.fromarray(image) for image in pixels]}


def process(kind: str, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Make a batch of rows with the processor of a family."""
    texts, images = ([row[name] for row in rows] for name in ("text", "images"))
    given: dict[str, Any] = {"text": texts, "images": images}
    if kind == "paligemma":  # PaliGemma learns the second half of a text
        halves = [text.split() for text in texts]
        given["text"] = [" ".join(words[: len(words) // 2]) for words in halves]
        given["suffix"] = [" ".join(words[len(words) // 2 :]) + " " for words in halves]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        processor: Any = make_processor(kind)
        batch = dict(processor(**given, padding=True, return_tensors="pt"))
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return {"labels": labels, **batch}


def train_images(
    rank: int, kind: str, implementation: str, bf16: bool = False
) -> tuple[list[float], int]:
    """Train on padded rows with images; return losses, gradient norms and sent bytes."""
    rng = np.random.default_rng(0)
    rows = [make_row(kind, words, rng) for words in (90, 5, 20, 3, 12, 80, 7, 4)]
    trainer = Trainer(
        build_with_images(kind, implementation),
        exact_arguments(max_steps=2, per_device_train_batch_size=2, bf16=bf16),
        data_collator=partial(process, kind),
        train_dataset=rows,
        callbacks=[hf_distca.DistCACallback(settings(), record=False)],
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    found = [entry[name] for entry in logged for name in ("loss", "grad_norm")]
    return found, current_session().meter.sent_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_padded_rows_with_images_have_the_losses_of_sdpa(kind: str, rank_pool: RankPools) -> None:
    (ours, sent), *_ = rank_pool(2)(train_images, kind, "distca")
    (theirs, _), *_ = rank_pool(2)(train_images, kind, "sdpa")
    assert sent
    assert len(ours) == 4
    assert ours == pytest.approx(theirs, rel=2e-6)
    if kind != "gemma3":
        return
    # In bfloat16, the error is at most 1.5 times the error of eager attention.
    halves = [rank_pool(2)(train_images, kind, name, True)[0][0] for name in ("distca", "eager")]
    far, eager = (
        max(abs(a / b - 1) for a, b in zip(found, theirs, strict=True)) for found in halves
    )
    assert 0 < far <= 1.5 * eager


@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_images_are_refused_by_the_collator_and_by_deal(kind: str) -> None:
    """Rows are refused before and after the processor."""
    model = build_with_images(kind, "distca")
    raw = make_row(kind, 8, np.random.default_rng(0))
    batch = process(kind, [raw])
    made = {
        name: values[0].tolist() if "image" not in name else values.tolist()
        for name, values in batch.items()
    }
    tokens = {name: made[name] for name in ("input_ids", "labels", "attention_mask")}
    for row, named in (
        (made, "'(pixel_values|image_.*|.*token_type_ids)'"),
        ({**tokens, "images": raw["images"]}, "'images'"),
        ({**tokens, "images": ["a.png"]}, "'images'"),
        (raw, "'input_ids'"),
    ):
        for collator in (hf_distca.PackingCollator(model), hf_distca.PackingCollator()):
            with pytest.raises(LayoutError, match=named):
                collator([row])
        for rows in ([row], datasets.Dataset.from_list([row])):
            trainer = Trainer(model, exact_arguments(), train_dataset=rows)
            with pytest.raises(LayoutError, match=named):
                hf_distca.deal(trainer, 16)
