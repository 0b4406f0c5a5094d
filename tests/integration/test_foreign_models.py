"""Models that distca has no table entry for, and masks that it does not compute."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
    ViTConfig,
    ViTModel,
)
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    causal_mask_function,
    create_causal_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_distca
from hf_distca.integration.mask_objects import ForeignMask
from tiny_runs import make_trainer, rows


class MineConfig(PreTrainedConfig):
    model_type = "mine"
    vocab_size = 61
    hidden_size = 64
    num_attention_heads = 4
    num_hidden_layers = 2


class Mine(PreTrainedModel):
    """A custom decoder of two attention layers, without positions or classes of transformers."""

    config_class = MineConfig
    _supports_sdpa = True

    def __init__(self, config: MineConfig, arguments: dict[str, Any], masked: bool = True) -> None:
        super().__init__(config)
        self.embed = torch.nn.Embedding(61, 64)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(64, 192) for _ in range(2))
        self.arguments, self.masked = arguments, masked
        self.is_causal = True
        self.post_init()

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        mask = None
        if self.masked:
            mask = create_causal_mask(
                self.config, x, None, past_key_values=None, position_ids=position_ids
            )
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        for qkv in self.qkv:
            q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in qkv(x).chunk(3, -1))
            out, _ = attention(
                self, q, k, v, mask, position_ids=position_ids, scaling=0.3, **self.arguments
            )
            x = x + out.flatten(2)
        return x @ self.embed.weight.T


def run_mine(
    implementation: str, arguments: dict[str, Any], masked: bool = True
) -> list[torch.Tensor]:
    """Return the logits of two packed documents, and the gradients."""
    torch.manual_seed(0)
    model = Mine(MineConfig(attn_implementation=implementation), arguments, masked).double().train()
    positions = torch.cat([torch.arange(11), torch.arange(6)])[None]
    ids = torch.randint(0, 61, (1, 17), generator=torch.Generator().manual_seed(1))
    logits = model(ids, positions)
    logits.square().sum().backward()
    return [logits.detach(), *(p.grad for p in model.parameters())]


@pytest.fixture(autouse=True)
def _defaults() -> None:
    hf_distca.configure()


def test_custom_model_with_known_arguments_equals_sdpa() -> None:
    for got, want in zip(
        run_mine("distca", {"use_cache": False}), run_mine("sdpa", {}), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_custom_model_with_an_unknown_argument_is_refused() -> None:
    with pytest.raises(hf_distca.UnsupportedError, match="Mine passes alibi_slopes"):
        run_mine("distca", {"alibi_slopes": torch.ones(4)})


def test_custom_model_without_a_mask_function_is_refused() -> None:
    with pytest.raises(hf_distca.UnsupportedError, match="create_causal_mask"):
        run_mine("distca", {}, masked=False)


def test_mask_composed_of_a_partial_becomes_a_foreign_mask() -> None:
    part = partial(causal_mask_function)
    mask = ALL_MASK_ATTENTION_FUNCTIONS["distca"](
        batch_size=1, q_length=6, kv_length=6, mask_function=and_masks(causal_mask_function, part)
    )
    assert isinstance(mask, ForeignMask)
    assert mask.features == "partial"


SMALL = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "vocab_size": 61,
}
ENCODER_DECODERS = {
    "bart": BartConfig(**SMALL, encoder_attention_heads=2, decoder_attention_heads=2),
    "t5": T5Config(
        d_model=32,
        d_kv=16,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        vocab_size=61,
        decoder_start_token_id=0,
    ),
}


def build_encoder_decoder(name: str) -> PreTrainedModel:
    return AutoModelForSeq2SeqLM.from_config(ENCODER_DECODERS[name], attn_implementation="distca")


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_encoder_decoder_is_refused_in_its_first_forward(name: str) -> None:
    ids = torch.arange(8)[None]
    with pytest.raises(
        hf_distca.UnsupportedError, match=f"{name} models: .* encoder with a decoder"
    ):
        build_encoder_decoder(name)(input_ids=ids, labels=ids)


def test_an_encoder_decoder_is_refused_by_name_before_training() -> None:
    trainer = make_trainer("distca", rows(4), model=build_encoder_decoder("bart"), max_steps=1)
    steps: list[int] = []
    trainer.training_step = lambda *_args, **_kwargs: steps.append(1)
    with pytest.raises(hf_distca.UnsupportedError, match=r"bart models: .* encoder with a decoder"):
        trainer.train()
    assert not steps


def test_vision_model_under_distca_is_refused() -> None:
    """Two-way attention could be computed, but ranks without images would not take part."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = ViTConfig(**sizes, intermediate_size=32, image_size=28, patch_size=14)
    config._attn_implementation = "distca"
    with pytest.raises(hf_distca.UnsupportedError, match="image or audio towers"):
        ViTModel(config).train()(torch.randn(1, 3, 28, 28))


def test_bart_decoder_with_an_unused_mask_generates_as_under_sdpa() -> None:
    """The mask is for a cross attention that exists only with an encoder."""
    ids, outputs = torch.randint(4, 61, (2, 7), generator=torch.Generator().manual_seed(2)), []
    for implementation in ("distca", "sdpa"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            ENCODER_DECODERS["bart"], attn_implementation=implementation
        ).eval()
        outputs.append(
            model.generate(input_ids=ids, max_new_tokens=5, do_sample=False, pad_token_id=1)
        )
    assert torch.equal(*outputs)
