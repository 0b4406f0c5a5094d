"""The attention and mask functions on one rank: local path, padding, caches and refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
)

import hf_distca
from checkpointed import checkpoint_layers
from document_keys import say_documents
from handles import make_handle
from hf_distca.agreement.documents import DOCUMENT_KEYS, PackedDocuments
from hf_distca.errors import LayoutError
from hf_distca.integration.current_session import current_session
from hf_distca.integration.handle import MaskStandIn
from hf_distca.integration.hooks.mask import distca_mask
from tiny_runs import SIZES, tiny_llama


def draw_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(1, 61, shape, generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def _defaults() -> None:
    hf_distca.configure()


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("training", [True, False])
def test_padding_on_any_side_keeps_the_logits_of_sdpa(side: str, training: bool) -> None:
    ids, mask = draw_tokens(3, 20), torch.ones(3, 20, dtype=torch.long)
    if side != "right":
        mask[1, :6] = 0
    if side != "left":
        mask[2, 9:] = 0
    ours, theirs = (tiny_llama(name).train(training) for name in ("distca", "sdpa"))
    got, want = (
        model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        for model in (ours, theirs)
    )
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=1e-4, atol=1e-5)


def test_each_document_key_gives_the_logits_of_position_ids() -> None:
    """Each key is given with position ids and the arguments for flash attention, and then alone."""
    model, ids, said = tiny_llama("distca").train(), draw_tokens(1, 12), say_documents((7, 5))
    positions = {"position_ids": said["position_ids"]}
    by_positions = model(input_ids=ids, use_cache=False, **positions).logits
    flash = {"cu_seq_lens_k": said["cu_seq_lens_q"], "max_length_q": 7, "max_length_k": 7}
    for key, value in said.items():
        given = {**positions, **flash, key: value}
        beside = model(input_ids=ids, use_cache=False, **given).logits
        torch.testing.assert_close(beside, by_positions)
        alone = model(input_ids=ids, use_cache=False, **{key: value}).logits
        torch.testing.assert_close(alone, by_positions, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("key", DOCUMENT_KEYS)
def test_packed_documents_in_a_padded_row_stay_apart(key: str) -> None:
    """The batch has no position ids, so the model counts positions over the whole row."""
    model, ids = tiny_llama("distca").train(), draw_tokens(1, 8)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]])
    said = {key: say_documents((3, 3, 2))[key]}
    out = model(input_ids=ids, attention_mask=mask, use_cache=False, **said).logits
    for start in (0, 3):
        alone = model(input_ids=ids[:, start : start + 3], use_cache=False).logits
        torch.testing.assert_close(out[:, start : start + 3], alone, rtol=1e-4, atol=1e-5)


VARIANTS = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5, "head_dim": 16, "attn_logit_softcapping": 2.0},
    "gpt_oss": {
        "sliding_window": 5,
        "head_dim": 16,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "eos_token_id": None,
    },
}


def build_variant(kind: str, implementation: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, pad_token_id=0, bos_token_id=1, **VARIANTS[kind])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", VARIANTS)
def test_generation_with_a_cache_equals_eager_attention(kind: str, cache: str) -> None:
    ids, mask = draw_tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    settings = {
        "max_new_tokens": 6,
        "do_sample": False,
        "cache_implementation": cache,
        "pad_token_id": 0,
    }
    got, want = (
        build_variant(kind, n).eval().generate(input_ids=ids, attention_mask=mask, **settings)
        for n in ("distca", "eager")
    )
    assert torch.equal(got, want)


def attend(**changes: object) -> None:
    """Call the attention function with some arguments changed."""
    from transformers import AttentionInterface

    module = torch.nn.Module().train()
    q = torch.randn(1, 4, 6, 16)
    arguments = {
        "attention_mask": make_handle(1, 6),
        "scaling": 0.25,
        **changes,
    }
    AttentionInterface()["distca"](module, q, q, q, **arguments)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention_mask": None}, "create_causal_mask"),
        ({"attention_mask": torch.ones(1, 1, 6, 6)}, r"\(1, 1, 6, 6\)"),
        ({"dropout": 0.1}, "attention_dropout"),
        ({"output_attentions": True}, "output_attentions"),
        ({"is_causal": False}, "Module is not causal"),
        ({"s_aux": torch.zeros(2)}, r"s_aux of shape \(2,\) for 4 query heads"),
        ({"scaling": torch.ones(6)}, r"scaling of shape \(6,\) for 4 query heads"),
        ({"softcap": torch.nn.Parameter(torch.ones(()))}, "softcap"),
        ({"position_ids": torch.zeros(3, 1, 6, dtype=torch.long)}, r"\(3, 1, 6\)"),
    ],
)
def test_unsupported_arguments_are_refused_by_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(hf_distca.UnsupportedError, match=named):
        attend(**changes)


@pytest.mark.parametrize("shape", [(), (1,), (4, 1, 1), (1, 4, 1, 1)])
def test_learned_scaling_gets_the_gradients_of_eager_attention(shape: tuple[int, ...]) -> None:
    """The scale is one for all heads or one per head, and the second call reads a cache."""
    found = []
    for name in ("distca", "eager"):
        model = tiny_llama(name).double()
        scales = torch.linspace(0.2, 0.4, 4 if 4 in shape else 1, dtype=torch.float64)
        scale = torch.nn.Parameter(scales.view(shape))
        for layer in model.model.layers:
            layer.self_attn.scaling = scale
        head = model(input_ids=draw_tokens(2, 9), use_cache=True)
        tail = model(input_ids=draw_tokens(2, 3), past_key_values=head.past_key_values)
        torch.cat([head.logits, tail.logits], 1).sin().sum().backward()
        found.append([scale.grad, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)  # eager: softmax in float32


@pytest.mark.parametrize("name", ["sdpa", "eager"])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_with_another_attn_implementation_is_refused(name: str, layer: int) -> None:
    model = tiny_llama("distca")
    attention: Any = model.model.layers[layer].self_attn
    attention.config = copy.deepcopy(attention.config)
    attention.config._attn_implementation = name
    with pytest.raises(hf_distca.UnsupportedError, match="another attn_implementation than"):
        model(input_ids=draw_tokens(2, 9), use_cache=False)


# Models with attention dropout, by default or by a setting.
DROPPING = {
    "attn_pdrop": GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=31),
    "attention_probs_dropout_prob": BertConfig(**SIZES, is_decoder=True),
    "attention_dropout": LlamaConfig(**SIZES, attention_dropout=0.25),
}


@pytest.mark.parametrize("setting", DROPPING)
def test_dropout_error_names_the_setting_in_the_models_config(setting: str) -> None:
    """Names of settings differ between families: GPT-2 has no attention_dropout."""
    config, ids = copy.deepcopy(DROPPING[setting]), torch.arange(1, 9)[None]

    def train() -> None:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="distca")
        model.train()(input_ids=ids, use_cache=False)

    with pytest.raises(
        hf_distca.UnsupportedError, match=f"set {setting}=0.0 in the model's config"
    ):
        train()
    setattr(config, setting, 0.0)
    train()


def test_cached_packed_documents_stay_apart_unlike_under_sdpa() -> None:
    """docs/troubleshooting.md states that a comparison in a bare loop needs use_cache=False."""
    ids, positions = draw_tokens(1, 60), torch.cat([torch.arange(40), torch.arange(20)])[None]
    logits = {
        (name, cache): tiny_llama(name)(
            input_ids=ids, position_ids=positions, use_cache=cache
        ).logits.detach()
        for name in ("distca", "sdpa")
        for cache in (False, True)
    }
    right = logits["sdpa", False]
    assert torch.allclose(logits["distca", False], right, atol=1e-5)
    assert torch.allclose(logits["distca", True], right, atol=1e-5)
    assert not torch.allclose(logits["sdpa", True], right, atol=1e-3)


def test_supported_arguments_of_attention_are_accepted() -> None:
    attend(
        use_cache=False,
        num_items_in_batch=torch.tensor(3),
        sliding_window=6,
        softcap=None,
        output_router_logits=False,
    )
    attend(is_causal=True, softcap=2.0, s_aux=torch.zeros(4), sliding_window=2)


@pytest.mark.parametrize("argument", ["shift_labels", "ignore_index"])
def test_arguments_of_the_loss_pass_through_attention(argument: str) -> None:
    """Models hand every keyword argument of forward to their layers."""
    ids = draw_tokens(2, 9)
    changes = {argument: ids if argument == "shift_labels" else int(ids[0, 4])}
    ours, theirs = (
        tiny_llama(name)(input_ids=ids, labels=ids, use_cache=False, **changes).loss
        for name in ("distca", "sdpa")
    )
    plain = tiny_llama("sdpa")(input_ids=ids, labels=ids, use_cache=False).loss
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert abs(float((ours - plain).detach())) > 1e-4, (
        "the argument changed nothing, so nothing was tested"
    )


def test_documents_that_do_not_cover_the_batch_are_refused() -> None:
    with pytest.raises(LayoutError, match="5 tokens and the batch has 1 x 6"):
        attend(distca_documents=PackedDocuments((2, 3)))


def test_negative_positions_are_refused_with_row_and_index() -> None:
    with pytest.raises(LayoutError, match=r"position_ids\[0, 2\] is -1"):
        attend(position_ids=torch.tensor([[0, 1, -1, 0, 1, 2]]))


def test_custom_mask_functions_are_refused() -> None:
    with pytest.raises(hf_distca.UnsupportedError, match="custom mask"):
        attend(attention_mask=distca_mask(batch_size=1, q_length=6, kv_length=6, use_vmap=True))


def test_a_4d_mask_is_refused() -> None:
    with pytest.raises(hf_distca.UnsupportedError, match="ready-made attention mask"):
        tiny_llama("distca")(input_ids=draw_tokens(1, 6), attention_mask=torch.zeros(1, 1, 6, 6))


def test_forward_under_no_grad_keeps_no_graph_and_sends_nothing() -> None:
    with torch.no_grad():
        out = tiny_llama("distca").train()(input_ids=draw_tokens(1, 8)).logits
    assert out.grad_fn is None
    assert current_session().meter.dispatches == 0


@pytest.mark.parametrize("reentrant", [None, True])
def test_handle_records_whether_its_forward_has_gradients(reentrant: bool | None) -> None:
    """With reentrant checkpointing, layers first run without gradients, after the mask is made."""
    handles: list[MaskStandIn] = []
    model = tiny_llama("distca").train()
    if reentrant:
        checkpoint_layers(model, use_reentrant=True)
        model.enable_input_require_grads()
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _module, _args, kwargs: handles.append(kwargs["attention_mask"]),
            with_kwargs=True,
        )
    model(input_ids=draw_tokens(1, 8), use_cache=False)
    assert [handle.batch.context.can_recompute for handle in handles] == [True, True]
    if not reentrant:  # reentrant checkpointing would warn
        with torch.no_grad():
            model(input_ids=draw_tokens(1, 8), use_cache=False)
        assert [handle.batch.context.can_recompute for handle in handles[2:]] == [False, False]
