"""What a forward plans, keeps and computes where engines, modes and dtypes are not the plain
ones.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_parity import model_for, relative
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


def collectives_of_a_step(rank: int, dtype: torch.dtype | None, ping_pong: bool) -> tuple[int, int]:
    """Collectives of planning one micro-batch under FSDP2, and how many micro-batches were
    counted.
    """
    hf_distca.configure(settings(ping_pong=ping_pong))
    model = model_for(2, "distca", torch.float32)
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
    assert rank_pool(2)(collectives_of_a_step, dtype, ping_pong) == [(2, 1)] * 2


def bytes_after_layers(training: bool) -> list[int]:
    """Bytes alive after each layer of a forward without gradients."""
    hf_distca.configure()
    model = model_for(2, "distca", torch.float32).train(training)
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


def test_a_training_forward_without_gradients_keeps_nothing() -> None:
    training, evaluating = bytes_after_layers(training=True), bytes_after_layers(training=False)
    assert training == evaluating
    assert len(training) == LAYERS


@pytest.mark.parametrize("given", [True, False], ids=["documents", "positions"])
@pytest.mark.parametrize("rope", ["default", "dynamic"])
def test_a_step_keeps_nothing_of_the_one_before(rope: str, given: bool) -> None:
    """What asks the call stack must not keep it: a frame that it looked at, or what that frame had
    in hand then.
    """
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


def func_gradients(model: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (), inputs).logits.sin().sum()

    gradients = torch.func.grad(loss)(dict(model.named_parameters()))
    return [gradient.detach() for gradient in gradients.values()]


def transformed(rank: int, family: str, use_cache: bool) -> tuple[list[torch.Tensor], ...]:
    """Gradients of torch.func under distca, in a first forward, and of each document alone."""
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
        func_gradients(models[1], {"input_ids": part, "use_cache": False})
        for part in given["input_ids"].split(list(lengths), 1)
    ]
    return func_gradients(models[0], given), [sum(parts) for parts in zip(*alone, strict=True)]


@pytest.mark.parametrize(
    ("family", "use_cache"), [("llama", False), ("mistral", True), ("gemma2", False)]
)
def test_transforms_of_torch_func(rank_pool: RankPools, family: str, use_cache: bool) -> None:
    """They take no exchange: each rank computes its own documents."""
    for found, wanted in rank_pool(2)(transformed, family, use_cache):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_cut_document_in_a_transform_is_refused() -> None:
    hf_distca.configure()
    pieces = {"distca_documents": PackedDocuments((10,), (10,), (7,)), "use_cache": False}
    ids = torch.ones(1, 10, dtype=torch.long)
    with pytest.raises(hf_distca.UnsupportedError, match=r"torch\.func"):
        func_gradients(
            model_for(2, "distca", torch.float64),
            {"input_ids": ids, "position_ids": torch.arange(10, 20)[None], **pieces},
        )


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_forwards_without_values(kind: str) -> None:
    """Shapes alone, as tools look at them that estimate memory."""
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
    model = model_for(2, "distca", torch.float64).train(training)
    ids = torch.arange(20)[None] % 11
    whole = model(input_ids=ids, use_cache=False).logits
    positions = {"input_ids": ids, "position_ids": torch.arange(20)[None]}
    pieces = PackedDocuments((10, 10), (0, 10), (7, 7))
    torch.testing.assert_close(
        model(**positions, distca_documents=pieces, use_cache=False).logits, whole
    )


def test_lone_rank_refuses_segments_without_a_beginning() -> None:
    hf_distca.configure()
    model = model_for(2, "distca", torch.float64)
    positions = {
        "input_ids": torch.ones(1, 10, dtype=torch.long),
        "position_ids": torch.arange(10, 20)[None],
    }
    pieces = PackedDocuments((10,), (10,), (7,))
    with pytest.raises(LayoutError, match="must cover it from 0"):
        model(**positions, distca_documents=pieces, use_cache=False)
    with pytest.raises(hf_distca.UnsupportedError, match="balance_evaluation=True"):
        model.eval()(**positions, distca_documents=pieces, use_cache=False)


def dtypes_under_autocast(rank: int) -> tuple[list[int], list[str]]:
    """Element bytes that plans were made with, and dtypes of q."""
    hf_distca.configure()
    with torch.autocast("cpu", torch.bfloat16):
        model_for(2, "distca", torch.float32)(
            **pack(*([96], [16])[rank]), use_cache=False
        ).loss.backward()
    costs = current_session().planner.costs
    return [shape.element_bytes for shape, _ in costs], [*costs.dtypes.values()]


def test_costs_are_those_of_the_dtype_that_is_computed_in(rank_pool: RankPools) -> None:
    assert rank_pool(2)(dtypes_under_autocast) == [([2], ["torch.bfloat16"])] * 2


def refused(rank: int, positions: list[int]) -> str:
    hf_distca.configure()
    ids = torch.ones(1, len(positions), dtype=torch.long)
    with pytest.raises(hf_distca.UnsupportedError) as caught:
        model_for(2, "distca", torch.float32)(
            input_ids=ids, position_ids=torch.tensor([positions]), use_cache=False
        )
    return str(caught.value)


def test_row_cut_over_ranks_by_another_tool_is_refused(rank_pool: RankPools) -> None:
    for rank, message in enumerate(rank_pool(2)(refused, [4, 5, 6, 0, 1])):
        assert message.startswith(f"rank {rank}: row 0 of a training batch begins at position 4")


def gradients(model: torch.nn.Module, losses: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of a sum of losses, summed over ranks."""
    torch.stack(losses).sum().backward()
    found = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    for grad in found.values():
        dist.all_reduce(grad)
    return found


def under_real_costs(rank: int) -> tuple[int, int, float]:
    """Exchanges, bytes sent, and the largest relative difference of gradients to each document
    alone under sdpa.
    """
    hf_distca.configure()  # built-in costs, default tiles and gains: a plan as users get it
    documents = (
        [torch.arange(2048) % 13]
        if rank == 0
        else [torch.arange(n, n + 256) % 13 for n in range(8)]
    )
    model = model_for(2, "distca", torch.float64)
    packed = hf_distca.PackingCollator()([{"documents": [one.tolist() for one in documents]}])
    ours = gradients(model, [model(**packed, use_cache=False).logits.square().sum()])
    alone = model_for(2, "sdpa", torch.float64)
    theirs = gradients(
        alone,
        [alone(input_ids=one[None], use_cache=False).logits.square().sum() for one in documents],
    )
    worst = max(relative(ours[name], want) for name, want in theirs.items())
    return current_session().meter.dispatches, current_session().meter.sent_bytes, worst


# Of six ranks, some pass keys on.
@pytest.mark.parametrize(("ranks", "hops"), in_turn([(2, 1), (6, 2)], 2, [(2, 1)]))
def test_a_plan_of_the_built_in_costs_moves_work_and_is_exact(
    rank_pool: RankPools, ranks: int, hops: int
) -> None:
    results = rank_pool(ranks)(under_real_costs)
    assert all(
        dispatches == 2 * hops * LAYERS and worst <= 1e-9 for dispatches, _, worst in results
    )
    assert sum(sent for _, sent, _ in results) > 0
