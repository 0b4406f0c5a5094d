"""Models, devices, lengths and settings: what they are, and what is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from hf_distca.errors import ConfigError, LayoutError
from hf_distca.model_shape import KNOWN_MODELS, find_model
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.profiles import Profile
from hf_distca.simulate.document_lengths import find_distribution, from_list
from hf_distca.simulate.hardware import find_hardware
from hf_distca.simulate.setting import Setting


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.2-1b", 1.24),
        ("llama-3-8b", 8.03),
        ("llama-3-70b", 70.6),
        ("qwen3-8b", 8.19),
        ("mistral-7b", 7.25),
    ],
)
def test_known_models_have_the_weights_that_their_names_say(name: str, billions: float) -> None:
    assert KNOWN_MODELS[name].parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_layers_without_attention_and_experts_are_counted() -> None:
    """Layers without attention and experts count as what they are."""
    dense = KNOWN_MODELS["qwen3-8b"]
    assert dense.kinds == ((None, 36),)
    assert (dense.attention_share, dense.active_share) == (1.0, 1.0)
    hybrid = replace(dense, attention_layers=9, window=64, windowed_layers=3)
    assert hybrid.kinds == ((None, 6), (64, 3))
    assert hybrid.attention_share == 0.25
    experts = replace(dense, weights=4 * dense.parameters, active=18 * dense.dense_parameters)
    assert experts.active_share == 0.5
    assert experts.layer_parameters * 36 == pytest.approx(4 * dense.parameters - 2 * 4096 * 151936)
    with pytest.raises(ConfigError, match="no more layers have a window"):
        replace(dense, attention_layers=9, window=64, windowed_layers=10)


def test_unknown_names_say_which_are_known() -> None:
    with pytest.raises(ConfigError, match="llama-3-8b"):
        find_model("llama-9")
    with pytest.raises(ConfigError, match="h100, h200, a100, b200"):
        find_hardware("v100")


@pytest.mark.parametrize(
    ("name", "kernel", "profile"),
    [
        ("h100", None, "h100_flash_attn_2"),
        ("h200", "flash_attn_3", "h100_flash_attn_3"),
        ("h200", "flash_attn_4", "h100_flash_attn_4"),
        ("a100", None, "a100_flash_attn_2"),
        ("B200", None, "b200_flash_attn_4"),
        ("gb200", "flash_attn_4", "b200_flash_attn_4"),
    ],
)
def test_attention_and_links_are_those_of_a_shipped_profile(
    setting: Setting, name: str, kernel: str | None, profile: str
) -> None:
    hardware = find_hardware(name, kernel)
    simulated, shipped = (
        replace(setting, hardware=hardware).make_cost_model(),
        Profile.load(profile).make_cost_model(setting.shape),
    )
    faster = 4.8 / 3.35 if name == "h200" else 1  # its memory, than that of the GPU that was timed
    for ours, theirs in (
        (simulated.forward, shipped.forward),
        (simulated.backward, shipped.backward),
    ):
        assert ours == replace(
            theirs, bytes_per_second=pytest.approx(faster * theirs.bytes_per_second)
        )
    assert simulated.exchange_bytes_per_second == pytest.approx(shipped.exchange_bytes_per_second)
    assert simulated.node_bytes_per_second == shipped.node_bytes_per_second
    assert simulated.peer_seconds == shipped.peer_seconds > 0
    assert {"matmul", "memory", "host", "gather", "links", "attention"} == dict(
        hardware.sources
    ).keys()
    assert hardware.ranks_per_node == (72 if name == "gb200" else 8)


def test_a_profile_of_a_gpu_without_rates_of_links_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = replace(Profile.load("h100_flash_attn_3"), between=None)
    monkeypatch.setattr(Profile, "load", lambda name: alone)
    with pytest.raises(
        ConfigError,
        match=(
            r"h100_flash_attn_3 has inside=ExchangeRates\(.*\) and between=None: of a GPU, it needs"
        ),
    ):
        find_hardware("h100", "flash_attn_3")


def test_a_kernel_without_timings_on_a_device_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match="flash_attn_3' has no published timings on a100: it must be one of flash_attn_2",
    ):
        find_hardware("a100", "flash_attn_3")


@pytest.mark.parametrize(
    ("change", "shared", "per_node"),
    [
        ({}, 8, 8),
        ({"ranks": 64}, 64, 8),
        ({"ranks": 64, "tensor": 4}, 16, 2),
        ({"ranks": 64, "tensor": 8}, 8, None),  # the other ranks of its node have the same tokens
        ({"ranks": 1024}, 512, 8),
        ({"ranks": 1056, "ranks_per_node": 32}, 352, 32),
        ({"ranks": 4096, "tensor": 2}, 512, 4),
        ({"ranks": 4096, "stages": 2}, 2048, 8),
        ({"ranks": 12, "ranks_per_node": 5}, 12, None),
    ],
)
def test_groups_and_nodes_are_those_of_training(
    setting: Setting, change: dict[str, int], shared: int, per_node: int | None
) -> None:
    found = replace(setting, **change)
    assert (found.shared, found.nodes.per_node) == (shared, per_node)


def test_a_profile_replaces_attention_and_exchange(setting: Setting) -> None:
    measured = CostModel.make_analytic(setting.shape, device_type="cpu")
    found = replace(setting, profile=measured, tensor=8).make_cost_model(4096)
    assert (found.forward, found.exchange_bytes_per_second, found.window) == (
        measured.forward,
        1e9,
        4096,
    )
    assert found.shape.query_heads == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 0}, "ranks=0"),
        ({"ranks": -8}, "ranks=-8"),
        ({"ranks": 10**9}, "ranks=1000000000"),
        ({"ranks": 8.0}, "ranks=8.0"),
        ({"tokens_per_rank": 0}, "tokens_per_rank=0"),
        ({"tensor": 3}, "multiple of tensor"),
        ({"tensor": 64, "ranks": 64}, "must divide the 32 query heads"),
        ({"stages": 5, "ranks": 10}, "must divide the 32 layers"),
        ({"micro_batches": 0}, "micro_batches=0"),
    ],
)
def test_settings_out_of_range(setting: Setting, change: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(setting, **change)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_links_have_a_positive_rate(rate: float) -> None:
    with pytest.raises(ConfigError, match="link_gbps"):
        replace(find_hardware("h100"), link_gbps=rate)


@pytest.mark.parametrize("text", ["pretrain", "prolong", "equal:1000", "lognormal:2000:1.5"])
def test_batches_have_their_exact_tokens_and_repeat(text: str) -> None:
    """Batches have exactly their tokens and are the same every time."""
    documents = find_distribution(text, 65536)
    first, again, other = (
        [n.tolist() for n in replace(documents, seed=seed).draw_batches(300_000, 3)]
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other or text == "equal:1000"
    assert [sum(n) for n in first] == [300_000] * 3
    assert max(itertools.chain(*first)) <= 65536
    assert min(itertools.chain(*first)) >= 1


@pytest.mark.parametrize("text", ["prolong", "pretrain"])
def test_a_step_has_the_same_work_in_any_number_of_micro_batches(text: str) -> None:
    documents = replace(find_distribution(text, 32768), seed=1)
    work = []
    for count in (1, 4, 16):
        for step in itertools.islice(documents.draw_steps(2**20 // count, count, 2), 1, 2):
            assert [int(one.sum()) for one in step] == [2**20 // count] * count
            assert min(int(one.min()) for one in step) >= 1
            work.append(sum(float(np.square(one, dtype=np.float64).sum()) for one in step))
    assert work == pytest.approx([work[0]] * 3, rel=1e-3), "only short documents are cut"


def test_a_document_longer_than_a_micro_batch() -> None:
    with pytest.raises(
        LayoutError, match="a document of 9000 tokens is longer than a micro-batch of 8192"
    ):
        list(from_list([9000], "one").draw_steps(8192, 2, 1))


def test_long_documents_hold_the_promised_share_of_tokens() -> None:
    """Long documents hold the share of tokens that is promised."""
    for name, share, boundary in (("pretrain", 0.5, 8192), ("prolong", 0.6, 16384)):
        lengths = next(find_distribution(name, 65536).draw_batches(50_000_000, 1))
        assert lengths[lengths > boundary].sum() / lengths.sum() == pytest.approx(share, abs=0.08)


def test_a_list_is_gone_through_and_begins_anew() -> None:
    batch = next(from_list([3, 5], "two").draw_batches(80, 1))
    assert sorted(set(batch[:-1].tolist())) == [3, 5]
    assert np.bincount(batch[:20])[[3, 5]].tolist() == [10, 10]
    assert from_list([3, 500], "two", 10).draw_batches(80, 1)
    assert max(next(from_list([3, 500], "two", 10).draw_batches(80, 1))) == 10


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "no document lengths"),
        ([0], "length 0"),
        ([5, -1], "document 1 has length -1"),
        ([1.5], "whole numbers"),
        ([2**40], "the limit is"),
        ([float("nan")], "whole numbers"),
    ],
)
def test_lists_that_hold_no_lengths(lengths: list[int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        from_list(lengths, "list")


def test_a_document_longer_than_a_batch() -> None:
    with pytest.raises(LayoutError, match="5000 tokens is longer than a global batch of 4096"):
        next(from_list([5000], "one").draw_batches(4096, 1))


@pytest.mark.parametrize(
    "text",
    [
        "normal",
        "equal",
        "equal:0",
        "equal:nan",
        "equal:x",
        "lognormal:1",
        "lognormal:1:99",
        "lognormal:-1:1",
    ],
)
def test_distributions_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="neither a file nor one of pretrain, prolong"):
        find_distribution(text, 65536)


@pytest.mark.parametrize("longest", [0, -1, 2**60])
def test_longest_documents_have_a_length(longest: int) -> None:
    with pytest.raises(ConfigError, match="max_length"):
        find_distribution("pretrain", longest)
