"""Memory of a rank by term, and the longest document that fits, compared with measured and
published figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from benchmark_modules import prepend_benchmarks
from hf_distca.errors import ConfigError
from simulator import longest
from simulator.hardware import find_hardware
from simulator.longest import WAYS, find_longest_documents
from simulator.memory import TERMS, find_fullest_moment
from simulator.model_shape import ModelShape, find_model
from simulator.predict import Prediction, predict_step
from simulator.setting import Setting
from simulator.strategies import find_strategy

QWEN_SMALL = ModelShape(
    "qwen3-0.6b", 1024, 28, 16, 8, 128, 3072, 151936, tied=True, head_norms=True
)
MILLION = 2**20


@pytest.fixture(scope="module")
def peak_memory() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        prepend_benchmarks(patch)
        yield import_module("peak_memory")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(9))
def test_peak_memory_of_cpu_ranks_matches_the_prediction(
    peak_memory: ModuleType, number: int
) -> None:
    """Predict peaks of CPU processes within 10 %, and offloaded bytes within 1 %."""
    if peak_memory.CASES[number].chunked:
        pytest.importorskip("trl", reason='needs pip install -e ".[trl]"')
    found = peak_memory.compare(peak_memory.CASES[number])
    assert found["ratio"] == pytest.approx(1, abs=0.1), found
    assert found["predicted"]["host"] == pytest.approx(found["measured"]["host"], rel=0.01)


def predict_document(model: ModelShape, strategy: str, *, offload: bool) -> Prediction:
    """Predict a document of 1,048,576 tokens over 8 H100, as in TRL's example: no kernels of Liger,
    a chunked loss.
    """
    changes = {**WAYS["+ chunked loss"], "offload": offload}
    setting = replace(Setting(model, find_hardware("h100"), 8, MILLION // 8), **changes)
    step = predict_step(setting, [np.array([MILLION])], find_strategy(strategy))
    assert step is not None
    return step


def test_predicted_peak_of_a_million_tokens_matches_the_published_one() -> None:
    """56.2 GB on each rank: Qwen3-8B, ring attention, FSDP2, offloaded checkpoints
    (huggingface/trl#6846).
    """
    assert predict_document(
        find_model("qwen3-8b"), "ring", offload=True
    ).peak_bytes == pytest.approx(56.2e9, rel=0.05)


def test_predicted_saving_of_offloading_matches_the_published_one() -> None:
    """27.9 GB without offloading, 20.8 GB with it: Qwen3-0.6B, a million tokens over 8 ranks
    (huggingface/accelerate#4175).
    """
    without, with_ = (
        predict_document(QWEN_SMALL, "ring", offload=offload) for offload in (False, True)
    )
    assert without.peak_bytes - with_.peak_bytes == pytest.approx(27.9e9 - 20.8e9, rel=0.05)
    assert with_.memory.host == pytest.approx(28 * MILLION / 8 * 1024 * 2)
    assert 1 < with_.step_seconds / without.step_seconds < 1.01, "0.6 % were measured"


def test_memory_terms_of_the_fullest_rank_add_up_to_the_peak(setting: Setting) -> None:
    tokens, received = np.array([100, 20000, 300, 0]), np.array([0.0, 0.0, 2e11, 0.0])
    for checkpointing in ("none", "selective", "full"):
        arranged = replace(setting, checkpointing=checkpointing)
        memory = find_fullest_moment(arranged, tokens, received)
        assert memory.total == pytest.approx(sum(getattr(memory, term) for term in TERMS))
        assert memory.total == pytest.approx(
            max(
                find_fullest_moment(arranged, *pair).total
                for pair in zip(tokens, received, strict=True)
            )
        )
        assert memory.exchange == 2e11


def test_full_checkpointing_keeps_attention_outputs_under_hf_distca(setting: Setting) -> None:
    lengths = [np.full(8, 16384)]
    plain, ours = (
        predict_step(replace(setting, checkpointing="full"), lengths, find_strategy(name))
        for name in ("plain", "given")
    )
    assert plain is not None
    assert ours is not None
    assert plain.memory.outputs == 0
    assert ours.memory.outputs == 16384 * 32 * (32 * 128 * 2 + 32 * 4)


def test_layers_without_attention_keep_no_attention_tensors(setting: Setting) -> None:
    model, tokens = setting.model, 16384
    dense, hybrid = (
        {
            way: find_fullest_moment(replace(setting, model=one, checkpointing=way), tokens)
            for way in ("selective", "none")
        }
        for one in (model, replace(model, attention_layers=model.layers // 4))
    )
    assert hybrid["selective"].outputs == pytest.approx(dense["selective"].outputs / 4)
    of_attention = (
        setting.shape.query_bytes
        + setting.shape.key_value_bytes
        + setting.shape.output_bytes
        + setting.shape.lse_bytes
    )
    less = dense["none"].checkpoints - hybrid["none"].checkpoints
    assert less == pytest.approx(tokens * model.layers * of_attention * 3 / 4, rel=0.05)


def test_gradients_and_checkpoints_coexist_with_two_micro_batches(setting: Setting) -> None:
    arranged = replace(setting, checkpointing="full")
    once, twice = (
        find_fullest_moment(arranged, 16384),
        find_fullest_moment(replace(arranged, micro_batches=2), 16384),
    )
    assert once.gradients == 0
    assert twice.gradients == pytest.approx(setting.model.parameters * 4 / 8)


def test_offloading_without_checkpointing_is_refused(setting: Setting) -> None:
    with pytest.raises(ConfigError, match="checkpointing='none' keeps nothing"):
        replace(setting, offload=True)


@pytest.mark.parametrize(
    ("model", "hardware"),
    [("qwen3-8b", "h100"), pytest.param("llama-3-8b", "h200", marks=pytest.mark.slow)],
)
def test_the_longest_document_fits_and_a_longer_one_does_not(model: str, hardware: str) -> None:
    setting = Setting(find_model(model), find_hardware(hardware), 8, 65536)
    found = find_longest_documents(setting)
    assert [document.way for document in found] == list(WAYS)
    tokens = [document.tokens for document in found]
    assert tokens == sorted(set(tokens)), "each way saves more than the one before"
    for document in found:
        assert document.step is not None
        assert document.step.fits
        longer = replace(setting, tokens_per_rank=document.tokens // 8 + 1024, **WAYS[document.way])
        step = predict_step(longer, [np.array([longer.tokens])], find_strategy("dealt"))
        assert step is not None
        assert not step.fits
        full = step.memory.host > setting.hardware.host_bytes
        assert (document.limit == "host") == (
            full and step.peak_bytes <= setting.hardware.memory_bytes
        )


def test_search_for_the_longest_document_predicts_no_far_longer_step(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a tiny model, a token takes almost no memory, and messages fill it."""
    small = ModelShape("small", 64, 2, 4, 2, 16, 96, 61)
    tried: list[int] = []

    def note(setting: Setting, *args: Any) -> Any:
        tried.append(setting.tokens)
        return predict_step(setting, *args)

    monkeypatch.setattr(longest, "predict_step", note)
    found = find_longest_documents(replace(setting, model=small))
    assert max(tried) <= 2.01 * max(document.tokens for document in found)


def test_full_host_memory_can_limit_the_longest_document(setting: Setting) -> None:
    small = replace(setting, hardware=replace(setting.hardware, host_bytes=1e10))
    limits = {document.way: document.limit for document in find_longest_documents(small)}
    assert limits == {
        "checkpointing": "device",
        "+ chunked loss": "device",
        "+ offload": "host",
        "+ fused layers": "host",
    }


def test_error_for_a_model_that_does_not_fit_names_its_largest_term(setting: Setting) -> None:
    large = replace(setting, model=find_model("llama-3-70b"))
    with pytest.raises(
        ConfigError,
        match=r"llama-3-70b on 8 h100 .* a document of 1024 tokens a rank needs .* are optimizer",
    ):
        find_longest_documents(large)
    assert all(document.tokens for document in find_longest_documents(replace(large, ranks=24)))
