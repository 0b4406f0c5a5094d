"""`hf_distca.prepare` registers the model of a custom loop, without the call stack."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers import MambaConfig, MambaForCausalLM, OPTConfig, OPTForCausalLM, PreTrainedModel

import hf_distca
from hf_distca.integration.callers import MaskCall
from hf_distca.integration.current_session import current_session
from hf_distca.runtime.group import AttentionGroup
from ranks import RankPools
from tiny_runs import dispatches, rows, settings, tiny_llama


@contextmanager
def hide_callers() -> Iterator[None]:
    """Hide all models on the call stack."""
    with patch.object(MaskCall, "iterate_models", lambda _: iter(())):
        yield


def train_on_a_mesh(rank: int, prepares: bool) -> tuple[int, bool, int, int]:
    """Train on a tensor-parallel mesh; return the group size, whether layers are cut, and groups
    made.
    """
    hf_distca.configure(settings(ping_pong=True))
    model = tiny_llama("distca")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("fsdp", "tp"))
    # A model that was loaded with a `DistributedConfig` has a manager like this one.
    model._mesh_manager = SimpleNamespace(mesh=mesh, get_mesh=lambda _names: mesh)
    wrapped = DistributedDataParallel(model)
    with (
        hide_callers(),
        patch.object(
            AttentionGroup, "find_or_create", side_effect=AttentionGroup.find_or_create
        ) as made,
    ):
        if prepares:
            assert hf_distca.prepare(hf_distca.prepare(wrapped)) is wrapped
        before = made.call_count
        wrapped(**hf_distca.PackingCollator()([rows(2)[rank]]), use_cache=False).loss.backward()
    cut = hasattr(type(model.model.layers[0]), "_distca_whole")
    return current_session().join_group().size, cut, before, made.call_count


def test_prepare_finds_mesh_and_layers_without_the_call_stack(rank_pool: RankPools) -> None:
    for size, cut, before, after in rank_pool(2)(train_on_a_mesh, True):
        assert (size, cut) == (1, True), "the ranks of one data-parallel coordinate share nothing"
        assert before == after == 1, "the group is made once, where all ranks are together"
    for size, cut, before, _ in rank_pool(2)(train_on_a_mesh, False):
        assert (size, cut, before) == (2, False, 0), (
            "without prepare, the group is the world, and layers are whole"
        )


def train_in_ping_pong(rank: int) -> int:
    hf_distca.configure(settings(ping_pong=True))
    with hide_callers():
        model = hf_distca.prepare(tiny_llama("distca"))
        plain = tiny_llama("sdpa")
        for one in (model, plain):
            one(**hf_distca.PackingCollator()([rows(2)[rank]]), use_cache=False).loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    return dispatches()


def test_prepared_model_in_ping_pong_has_the_gradients_of_sdpa(rank_pool: RankPools) -> None:
    layers, directions, halves = 2, 2, 2
    assert rank_pool(2)(train_in_ping_pong) == [layers * directions * halves] * 2


def opt(implementation: str = "distca", **layerdrop: float) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "ffn_dim": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "word_embed_proj_dim": 32,
    }
    config = OPTConfig(
        **sizes, vocab_size=61, attention_dropout=0.0, max_position_embeddings=64, **layerdrop
    )
    config._attn_implementation = implementation
    return OPTForCausalLM(config)


IDS = torch.arange(2, 10)[None]


def test_layerdrop_is_refused_before_the_first_layer() -> None:
    hf_distca.configure()
    model = opt(layerdrop=0.1)
    for refused in (
        lambda: hf_distca.prepare(model),
        lambda: model.train()(IDS, labels=IDS, use_cache=False),
    ):
        with pytest.raises(
            hf_distca.UnsupportedError, match=r"opt model has layerdrop=0\.1: .* Set layerdrop=0\.0"
        ):
            refused()
    assert current_session().meter.calls == 0


@pytest.mark.parametrize("name", ["decoder_layerdrop", "encoder_layerdrop"])
def test_layerdrop_is_refused_under_its_other_names(name: str) -> None:
    model = opt()
    setattr(model.config, name, 0.25)
    with pytest.raises(hf_distca.UnsupportedError, match=f"{name}=0.25"):
        hf_distca.prepare(model)


def test_layerdrop_is_accepted_if_no_layer_is_dropped() -> None:
    hf_distca.configure()
    ours, theirs = (
        opt(name, layerdrop=0.1).eval()(IDS, use_cache=False).logits for name in ("distca", "sdpa")
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    hf_distca.prepare(opt(layerdrop=0.0)).train()(IDS, labels=IDS, use_cache=False).loss.backward()
    hf_distca.prepare(opt("sdpa", layerdrop=0.1))


def build_mamba() -> MambaForCausalLM:
    """Build a model without attention."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 61}
    return MambaForCausalLM(MambaConfig(**sizes, attn_implementation="distca"))


def test_unsupported_family_is_refused_by_prepare() -> None:
    with pytest.raises(hf_distca.UnsupportedError, match="mamba"):
        hf_distca.prepare(build_mamba())


def test_prepare_of_a_model_under_sdpa_makes_no_group() -> None:
    hf_distca.configure()
    with patch.object(
        AttentionGroup, "find_or_create", side_effect=AssertionError("asked for a group")
    ):
        assert hf_distca.prepare(tiny_llama("sdpa")).training
    assert not dist.is_initialized()


def test_reading_the_call_stack_keeps_no_frame_alive() -> None:
    """A cycle of frames would keep variables such as logits until the next garbage collection."""

    class Logits:
        pass

    def ask() -> weakref.ref[Logits]:
        logits, call = Logits(), MaskCall()
        assert not call.is_generating
        return weakref.ref(logits)

    gc.disable()
    try:
        assert ask()() is None
    finally:
        gc.enable()
