"""Pipeline stages together with engines, tensor parallelism, LoRA, accumulation, evaluation,
padding, dealt batches.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from staged import (
    Case,
    alone,
    batch,
    check_equal,
    check_near,
    configure,
    gradients_of,
    in_one_process,
    in_stages,
    loss_for,
    model_for,
    prepare,
    schedule_of,
    stacked,
    stage_of,
    sum_over_ranks,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from hf_distca import PackingCollator, document_shares
from hf_distca.integration.current_session import current_session
from hf_distca.pipeline import Schedule, save_pretrained, split
from ranks import RankPool

EXACT = 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("steps", [1, 2], ids=["one step", "accumulated"])
@pytest.mark.parametrize("how", ["fsdp", "ddp"])
def test_sharded_and_replicated_stages_equal_one_process(
    rank_pool: Callable[[int], RankPool], how: str, steps: int, tied: bool
) -> None:
    case = Case(copies=2, steps=steps, tied=tied, engine=how)
    check_equal(rank_pool(4)(in_stages, case), *in_one_process(case, "sdpa"), EXACT)


def cut(rank: int, case: Case) -> tuple[float, dict[str, torch.Tensor], int]:
    """Loss and gradients of a stage whose heads and feed-forward layers are cut in two, and bytes
    sent for attention.
    """
    configure(case)
    mesh = init_device_mesh("cpu", (case.stages, 2), mesh_dim_names=("pp", "tp"))
    stage = split(model_for(case, "distca"), mesh["pp"])
    columns = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    )
    plan = {
        **dict.fromkeys(columns, ColwiseParallel()),
        **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel()),
    }
    for layer in stage.submod.model.model.layers:
        if any(True for _ in layer.parameters()):
            parallelize_module(layer, mesh["tp"], plan)
    schedule, losses = schedule_of(stage, case), list[torch.Tensor]()
    ids, positions, targets = stacked(case, 0)
    for _ in range(case.steps):
        stage.submod.zero_grad()
        schedule.step(ids, position_ids=positions, target=targets, losses=losses)
    assert all(weight.grad is not None for weight in stage.submod.parameters())
    loss = sum_over_ranks(losses) / 2  # both halves of a stage have it
    return loss, gradients_of(stage.submod.model), current_session().meter.sent_bytes


@pytest.mark.slow
def test_stages_with_tensor_parallel_layers_equal_one_process(
    rank_pool: Callable[[int], RankPool],
) -> None:
    """Stages share attention with those that have the same heads."""
    case = Case(steps=3)
    loss, gradients = in_one_process(case, "sdpa")
    results = rank_pool(4)(cut, case)
    assert {name for _, own, _ in results for name in own} == set(gradients)
    for found, own, sent in results:
        assert abs(found - loss) <= EXACT * loss
        assert sent > 0
        check_near(own, gradients)


def with_adapters(model: PreTrainedModel, *, wrapped: bool) -> Any:
    """Only behind attention: that of the first layer needs no gradient, and other stages count on
    its rows in backward.
    """
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    config = LoraConfig(
        r=4, target_modules=["down_proj"], init_lora_weights=False, layers_to_transform=[0, 1, 3]
    )
    if wrapped:
        return get_peft_model(model, config)
    model.add_adapter(config)
    return model


def adapted(rank: int, case: Case, wrapped: bool, folder: Path) -> dict[str, torch.Tensor]:
    """Gradients of the adapters of a stage, which are saved."""
    model = with_adapters(model_for(case, "distca"), wrapped=wrapped)
    stage, held, step = prepare(case, model=model)
    step()
    save_pretrained(stage, folder)
    return gradients_of(held)


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [False, True], ids=["add_adapter", "get_peft_model"])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.filterwarnings("ignore")
def test_adapters_equal_one_process(
    rank_pool: Callable[[int], RankPool], tmp_path: Path, stages: int, wrapped: bool
) -> None:
    """Of four stages one has a layer without an adapter. What is saved is one adapter of the whole
    model.
    """
    from peft import PeftModel

    case = Case(stages=stages)
    model = with_adapters(model_for(case, "sdpa"), wrapped=False)
    alone(model, case, loss_for(case))
    wanted = gradients_of(model)
    found = rank_pool(stages)(adapted, case, wrapped, tmp_path)
    assert {name for one in found for name in one} == set(wanted)
    for one in found:
        check_near(one, wanted)
    loaded = PeftModel.from_pretrained(model_for(case, "sdpa"), tmp_path)
    ids = batch(case, 1)[0]
    assert torch.allclose(
        loaded(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0, atol=1e-12
    )
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def evaluated(rank: int, case: Case) -> tuple[float, float, int]:
    """Loss of an evaluation between two steps, and of the step after it."""
    configure(case)
    stage, _, _ = stage_of(case)
    schedule = schedule_of(stage, case)
    ids, positions, targets = stacked(case, 0)
    schedule.step(ids, position_ids=positions, target=targets)
    found, before = [], current_session().meter.sent_bytes
    for run in (schedule.eval, schedule.step):
        losses = list[torch.Tensor]()
        with torch.set_grad_enabled(run == schedule.step):
            run(ids, position_ids=positions, target=targets, losses=losses)
        found.append(sum_over_ranks(losses))
    return found[0], found[1], current_session().meter.sent_bytes - before


@pytest.mark.slow
def test_an_evaluation_shares_attention_too(rank_pool: Callable[[int], RankPool]) -> None:
    case = Case()
    loss, _ = in_one_process(case, "sdpa")
    for one, other, sent in rank_pool(2)(evaluated, case):
        assert abs(one - loss) <= EXACT * loss
        assert abs(other - loss) <= EXACT * loss
        assert sent > 0


def padded(rank: int, case: Case, padding: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients with so many tokens of padding at the end of each micro-batch."""
    configure(case)
    stage, _, held = stage_of(case)
    ids, positions, targets = stacked(case, 0)
    mask = torch.cat([torch.ones_like(ids), torch.zeros_like(ids[:, :padding])], 1)
    ids, positions = (
        torch.cat([each, torch.zeros_like(ids[:, :padding])], 1) for each in (ids, positions)
    )
    targets = torch.cat([targets, torch.full_like(targets[:, :padding], -100)], 1)
    losses = list[torch.Tensor]()
    schedule_of(stage, case).step(
        ids, position_ids=positions, attention_mask=mask, target=targets, losses=losses
    )
    return sum_over_ranks(losses), gradients_of(held)


@pytest.mark.slow
@pytest.mark.parametrize("ping_pong", [False, True], ids=["whole", "nano-batches"])
def test_padding_changes_nothing(rank_pool: Callable[[int], RankPool], ping_pong: bool) -> None:
    case = Case(settings=(("ping_pong", ping_pong),))
    loss, gradients = in_one_process(case, "sdpa")
    for found, own in rank_pool(2)(padded, case, 7):
        assert abs(found - loss) <= EXACT * loss
        check_near(own, gradients)


# Of global batches for two copies of 96 tokens.
LENGTHS = [[150, 20, 22], [64, 64, 64], [100, 90, 2], [192]]


def tokens_of(number: int, document: int, length: int) -> torch.Tensor:
    return torch.randint(
        40, 90, (length,), generator=torch.Generator().manual_seed(100 * number + document)
    )


def dealt(rank: int, case: Case) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a step of dealt batches, summed over copies."""
    configure(case)
    documents = [
        {"input_ids": tokens_of(number, document, length)}
        for number, lengths in enumerate(LENGTHS)
        for document, length in enumerate(lengths)
    ]
    model = model_for(case, "distca")
    shares = document_shares(
        documents, case.tokens, model=model, ranks=case.copies, seed=None, device="cpu"
    )
    stage, mesh, held = stage_of(case, model=model)
    copy = mesh.get_local_rank("dp")
    mine = [
        PackingCollator()([shares[number * case.copies + copy]])
        for number in range(case.micro_batches)
    ]
    ids, positions, targets = (
        torch.cat([one[name] for one in mine])
        for name in ("input_ids", "position_ids", "shift_labels")
    )
    packed = [one["distca_documents"] for one in mine]
    schedule = Schedule(stage, case.micro_batches, whole_loss, scale_grads=False)
    losses = list[torch.Tensor]()
    for _ in range(2):
        stage.submod.zero_grad()
        schedule.step(
            ids, position_ids=positions, target=targets, losses=losses, distca_documents=packed
        )
    grads = gradients_of(held)
    for grad in grads.values():
        dist.all_reduce(grad, group=mesh["dp"].get_group())
    return sum_over_ranks(losses), grads


def whole_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (
        cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        / 700
    )


@pytest.mark.slow
@pytest.mark.parametrize("ping_pong", [False, True], ids=["whole", "nano-batches"])
def test_dealt_batches_equal_one_process(
    rank_pool: Callable[[int], RankPool], ping_pong: bool
) -> None:
    """Documents over both copies of the model."""
    case = Case(copies=2, settings=(("ping_pong", ping_pong),))
    model, total = model_for(case, "sdpa"), 0.0
    for number, lengths in enumerate(LENGTHS):
        for document, length in enumerate(lengths):
            tokens = tokens_of(number, document, length)
            targets = torch.cat([tokens[1:], torch.tensor([-100])])
            loss = whole_loss(model(input_ids=tokens[None]).logits, targets)
            loss.backward()
            total += loss.item()
    gradients = gradients_of(model)
    for loss, own in rank_pool(4)(dealt, case):
        assert abs(loss - total) <= EXACT * total
        check_near(own, gradients)


@pytest.mark.slow
def test_without_balancing_nothing_is_exchanged(rank_pool: Callable[[int], RankPool]) -> None:
    case = Case(settings=(("balance", False),))
    found = rank_pool(2)(in_stages, case)
    check_equal(found, *in_one_process(case, "sdpa"), EXACT)
    assert [(one.sent_bytes, one.served) for one in found] == [(0, 0)] * 2
