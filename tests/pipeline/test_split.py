"""Stages that run in one process equal the model; models that cannot be split are refused."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tiny import build

from hf_distca.errors import ConfigError, UnsupportedError
from hf_distca.integration.families import FAMILIES
from hf_distca.pipeline import split
from hf_distca.pipeline.model_parts import (
    SPLIT,
    ModelParts,
    check_split,
    divide_layers,
)
from hf_distca.pipeline.stage_models import StageModel

EXACT = 1e-9  # both run the same operations in the same order
IDS = torch.randint(40, 90, (1, 24), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(24)[None]


def compare(family: str) -> None:
    """Assert that two stages give the logits and the gradients of the model."""
    whole: Any = build(family, "distca", torch.float64)
    layers = len(ModelParts.from_model(whole).layers)
    logits = whole(input_ids=IDS, position_ids=POSITIONS, use_cache=False).logits
    logits.square().sum().backward()
    gradients = {
        name: weight.grad for name, weight in whole.named_parameters() if weight.grad is not None
    }
    cut = [layers // 2, layers - layers // 2]
    first, second = (StageModel(build(family, "distca", torch.float64), at, cut) for at in range(2))
    left = first(IDS, position_ids=POSITIONS)
    arrived = left.detach().requires_grad_()
    found = second(arrived, position_ids=POSITIONS)
    assert (found - logits).abs().max() < EXACT
    found.square().sum().backward()
    left.backward(arrived.grad)
    if first.tied:
        both = first.tied_weight.grad + second.tied_weight.grad
        first.tied_weight.grad, second.tied_weight.grad = both, both.clone()
    held = [dict(stage.model.named_parameters()) for stage in (first, second)]
    assert not held[0].keys() & held[1].keys()
    assert (
        whole.state_dict().keys() - {"lm_head.weight"}
        <= held[0].keys() | held[1].keys() | dict(whole.named_buffers()).keys()
    )
    for name, gradient in gradients.items():
        own = next(stage[name].grad for stage in held if name in stage)
        assert (own - gradient).abs().max() <= EXACT * gradient.abs().max(), name


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_two_stages_equal_the_model(family: str) -> None:
    compare(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name, group in FAMILIES.items() if group == "PROVEN"])
def test_every_proven_family_is_split_or_refused(family: str) -> None:
    if family in SPLIT:
        compare(family)
        return
    model = build(family, "distca", torch.float64)  # its type may be that of a part of the family
    with pytest.raises(
        UnsupportedError,
        match=rf"\({model.config.model_type}\) cannot be split into pipeline stages",
    ):
        check_split(model)


@pytest.mark.parametrize(
    ("family", "setting", "value"),
    [("gemma4_unified_text", "num_kv_shared_layers", 1), ("mixtral", "output_router_logits", True)],
)
def test_settings_that_connect_layers_are_refused(family: str, setting: str, value: object) -> None:
    """Layers share keys, or one loss needs all routers."""
    model = build(family, "distca", torch.float32)
    setattr(model.config, setting, value)
    with pytest.raises(UnsupportedError, match=f"{setting}={value}"):
        check_split(model)


def test_a_model_with_other_attention_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r'has attn_implementation="sdpa".* load the model with attn_implementation="distca"',
    ):
        split(build("llama", "sdpa", torch.float32), Mock(ndim=1))


def test_a_wrong_model_or_mesh_is_refused() -> None:
    with pytest.raises(ConfigError, match="got a Linear: give it the transformers model itself"):
        split(torch.nn.Linear(1, 1), Mock(ndim=1))
    with pytest.raises(ConfigError, match="mesh of 2 dimensions"):
        split(build("llama", "distca", torch.float32), Mock(ndim=2))


def test_layer_counts_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"layers=\[2, 1\] must give .* add up to the model's 2 layers"
    ):
        StageModel(build("llama", "distca", torch.float32), 0, [2, 1])


def test_the_head_is_found_inside_an_adapter() -> None:
    """peft wraps a head or an embedding that it trains whole; a wrapped embedding is refused."""
    from peft import LoraConfig

    model = build("llama", "distca", torch.float32)
    model.add_adapter(LoraConfig(target_modules=["down_proj"], modules_to_save=["lm_head"]))
    assert ModelParts.from_model(model).after == ("model.norm", "lm_head")
    model = build("llama", "distca", torch.float32)
    model.add_adapter(LoraConfig(target_modules=["down_proj"], modules_to_save=["embed_tokens"]))
    with pytest.raises(
        UnsupportedError, match=r"embed_tokens\.original_module is neither in its layers"
    ):
        ModelParts.from_model(model)


def test_the_head_counts_as_a_cost_of_the_last_stage() -> None:
    """A large vocabulary leaves the last stage fewer layers."""
    model = build("llama", "distca", torch.float32)
    costs = ModelParts.from_model(model).estimate_layer_costs(model)
    layer = sum(weight.numel() for weight in model.model.layers[0].parameters())
    head = model.lm_head.weight.numel() + model.model.norm.weight.numel()
    assert costs == [layer, layer + head]
    assert divide_layers([costs[0], layer, layer, layer + 2.5 * layer], 2) == [3, 1]
