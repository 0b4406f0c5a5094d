"""What a forward plans, keeps and computes under FSDP2, torch.func, fake tensors and autocast."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_parity import build_model, measure_error
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import hf_distca
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.errors import LayoutError
from hf_distca.integration.current_session import current_session
from live_bytes import LiveBytes
from ranks import RankPools
from recorded import counted_planning
from tiny_runs import SIZES, VOCABULARY, pack, settings, tiny_llama
from turns import in_turn

LAYERS = 2


def count_collectives(rank: int, dtype: torch.dtype | None, ping_pong: bool) -> tuple[int, int]:
    """Train one micro-batch under FSDP2; count its planning collectives and micro-batches."""
    hf_distca.configure(settings(ping_pong=ping_pong))
    model = build_model(2, "distca", torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    data = pack(*([96], [16, 16, 16])[rank])
    before = current_session().planner.number
    with counted_planning() as seen:
        model(**data, use_cache=False).loss.backward()
    return len(seen), current_session().planner.number - before


@pytest.mark.parametrize("ping_pong", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_fsdp2_plans_a_micro_batch_once_in_any_precision(
    rank_pool: RankPools, dtype: torch.dtype | None, ping_pong: bool
) -> None:
    assert rank_pool(2)(count_collectives, dtype, ping_pong) == [(2, 1)] * 2


def measure_bytes(training: bool) -> list[int]:
    """Return the bytes alive after each layer of a forward without gradients."""
    hf_distca.configure()
    model = build_model(2, "distca", torch.float32).train(training)
    alive: list[int] = []
    with LiveBytes() as live, torch.no_grad():
        hooks = [
            layer.register_forward_hook(lambda *_: alive.append(live.alive))
            for layer in model.model.layers
        ]
        model(**pack(64, 64), use_cache=False)
    for hook in hooks:
        hook.remove()
    return alive


def test_training_forward_under_no_grad_keeps_as_few_bytes_as_evaluation() -> None:
    training, evaluating = measure_bytes(training=True), measure_bytes(training=False)
    assert training == evaluating
    assert len(training) == LAYERS


@pytest.mark.parametrize("given", [True, False], ids=["documents", "positions"])
@pytest.mark.parametrize("rope", ["default", "dynamic"])
def test_step_keeps_no_logits_of_earlier_steps(rope: str, given: bool) -> None:
    """Code that reads the call stack must not keep a frame or the variables of a frame."""
    hf_distca.configure()
    config = tiny_llama("distca").config
    config.rope_parameters = {"rope_type": rope, "rope_theta": 10_000.0, "factor": 4.0}
    model, inputs = LlamaForCausalLM(config).train(), pack(40, 24)
    if not given:
        inputs.pop("distca_documents")
    gc.collect()
    gc.disable()
    logits: list[weakref.ref[torch.Tensor]] = []
    try:
        for _ in range(3):
            out = model(**inputs, use_cache=False)
            out.loss.backward()
            logits.append(weakref.ref(out.logits))
            assert sum(one() is not None for one in logits) == 1
    finally:
        gc.enable()


def differentiate(model: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (), inputs).logits.sin().sum()

    gradients = torch.func.grad(loss)(dict(model.named_parameters()))
    return [gradient.detach() for gradient in gradients.values()]


def compare_gradients(rank: int, family: str, use_cache: bool) -> tuple[list[torch.Tensor], ...]:
    """Compute gradients with torch.func: under distca, and of each document alone under eager."""
    hf_distca.configure(settings(ping_pong=True))
    torch.manual_seed(0)
    make_config, sizes = CONFIG_MAPPING[family], {**SIZES, "head_dim": 16, "sliding_window": 8}
    models = [
        AutoModelForCausalLM.from_config(make_config(**sizes), attn_implementation=name)
        .double()
        .train()
        for name in ("distca", "eager")
    ]
    models[1].load_state_dict(models[0].state_dict())
    given = {**pack(*([20, 12], [32])[rank]), "use_cache": use_cache}
    given.pop("labels", None)
    lengths = given["distca_documents"].lengths
    alone = [
        differentiate(models[1], {"input_ids": part, "use_cache": False})
        for part in given["input_ids"].split(list(lengths), 1)
    ]
    return differentiate(models[0], given), [sum(parts) for parts in zip(*alone, strict=True)]


@pytest.mark.parametrize(
    ("family", "use_cache"), [("llama", False), ("mistral", True), ("gemma2", False)]
)
def test_torch_func_gradients_are_exact(rank_pool: RankPools, family: str, use_cache: bool) -> None:
    """Transforms allow no exchange, so each rank computes its own documents."""
    for found, wanted in rank_pool(2)(compare_gradients, family, use_cache):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


WITHOUT_BEGINNING = {
    "input_ids": torch.ones(1, 10, dtype=torch.long),
    "position_ids": torch.arange(10, 20)[None],
    "distca_documents": PackedDocuments((10,), (10,), (7,)),
    "use_cache": False,
}


def test_document_without_its_beginning_under_torch_func_is_refused() -> None:
    hf_distca.configure()
    with pytest.raises(hf_distca.UnsupportedError, match=r"torch\.func"):
        differentiate(build_model(2, "distca", torch.float64), WITHOUT_BEGINNING)


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_meta_and_fake_tensors_run_forward_and_backward(kind: str) -> None:
    """Tools that estimate memory run models on tensors without values."""
    hf_distca.configure(settings(ping_pong=True))
    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        ids = torch.ones(2, 20, dtype=torch.long)
        model = tiny_llama("distca")
        logits = model(input_ids=ids, use_cache=True).logits
        logits.sum().backward()
    assert logits.shape == (2, 20, VOCABULARY)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("training", [True, False])
def test_lone_rank_joins_segments_of_one_document(training: bool) -> None:
    hf_distca.configure()
    model = build_model(2, "distca", torch.float64).train(training)
    ids = torch.arange(20)[None] % 11
    whole = model(input_ids=ids, use_cache=False).logits
    positions = {"input_ids": ids, "position_ids": torch.arange(20)[None]}
    pieces = PackedDocuments((10, 10), (0, 10), (7, 7))
    torch.testing.assert_close(
        model(**positions, distca_documents=pieces, use_cache=False).logits, whole
    )


def test_lone_rank_refuses_segments_without_a_beginning() -> None:
    hf_distca.configure()
    model = build_model(2, "distca", torch.float64)
    with pytest.raises(LayoutError, match="must cover it from 0"):
        model(**WITHOUT_BEGINNING)
    with pytest.raises(hf_distca.UnsupportedError, match="balance_evaluation=True"):
        model.eval()(**WITHOUT_BEGINNING)


def train_under_autocast(rank: int) -> tuple[list[int], list[str]]:
    """Train under autocast; return the element bytes of the costs, and the dtypes of q."""
    hf_distca.configure()
    with torch.autocast("cpu", torch.bfloat16):
        build_model(2, "distca", torch.float32)(
            **pack(*([96], [16])[rank]), use_cache=False
        ).loss.backward()
    costs = current_session().planner.costs
    return [shape.element_bytes for shape, _ in costs], [*costs.dtypes.values()]


def test_costs_under_autocast_are_those_of_bfloat16(rank_pool: RankPools) -> None:
    assert rank_pool(2)(train_under_autocast) == [([2], ["torch.bfloat16"])] * 2


def catch_refusal(rank: int, positions: list[int]) -> str:
    hf_distca.configure()
    ids = torch.ones(1, len(positions), dtype=torch.long)
    with pytest.raises(hf_distca.UnsupportedError) as caught:
        build_model(2, "distca", torch.float32)(
            input_ids=ids, position_ids=torch.tensor([positions]), use_cache=False
        )
    return str(caught.value)


def test_row_cut_over_ranks_by_another_tool_is_refused(rank_pool: RankPools) -> None:
    for rank, message in enumerate(rank_pool(2)(catch_refusal, [4, 5, 6, 0, 1])):
        assert message.startswith(f"rank {rank}: row 0 of a training batch begins at position 4")


def sum_gradients(model: torch.nn.Module, losses: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Compute the gradients of the summed losses, and add them over ranks."""
    torch.stack(losses).sum().backward()
    found = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    for grad in found.values():
        dist.all_reduce(grad)
    return found


def train_with_built_in_costs(rank: int) -> tuple[int, int, float]:
    """Train with built-in costs; return exchanges, sent bytes and the largest error of a gradient.

    The reference is each document alone under sdpa.
    """
    hf_distca.configure()  # the default settings
    documents = (
        [torch.arange(2048) % 13]
        if rank == 0
        else [torch.arange(n, n + 256) % 13 for n in range(8)]
    )
    model = build_model(2, "distca", torch.float64)
    packed = hf_distca.PackingCollator()([{"documents": [one.tolist() for one in documents]}])
    ours = sum_gradients(model, [model(**packed, use_cache=False).logits.square().sum()])
    alone = build_model(2, "sdpa", torch.float64)
    theirs = sum_gradients(
        alone,
        [alone(input_ids=one[None], use_cache=False).logits.square().sum() for one in documents],
    )
    worst = max(measure_error(ours[name], want) for name, want in theirs.items())
    return current_session().meter.dispatches, current_session().meter.sent_bytes, worst


# Among six ranks, some are relays.
@pytest.mark.parametrize(("ranks", "hops"), in_turn([(2, 1), (6, 2)], 2, [(2, 1)]))
def test_plan_with_built_in_costs_moves_work_and_is_exact(
    rank_pool: RankPools, ranks: int, hops: int
) -> None:
    results = rank_pool(ranks)(train_with_built_in_costs)
    assert all(
        dispatches == 2 * hops * LAYERS and worst <= 1e-9 for dispatches, _, worst in results
    )
    assert sum(sent for _, sent, _ in results) > 0
