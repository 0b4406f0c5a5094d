"""Pipeline stages together with engines, tensor parallelism, LoRA, accumulation, evaluation,
padding, dealt batches.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from staged import (
    Case,
    check_equal,
    check_near,
    collect_gradients,
    compute_loss,
    configure,
    make_batch,
    make_batches,
    make_loss,
    make_model,
    make_schedule,
    make_stage,
    prepare,
    run_alone,
    run_in_one_process,
    run_in_stages,
    sum_over_ranks,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from hf_distca import PackingCollator, document_shares
from hf_distca.integration.current_session import current_session
from hf_distca.pipeline import Schedule, save_pretrained, split
from ranks import RankPools

EXACT = 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("steps", [1, 2], ids=["one step", "accumulated"])
@pytest.mark.parametrize("how", ["fsdp", "ddp"])
def test_sharded_and_replicated_stages_equal_one_process(
    rank_pool: RankPools, how: str, steps: int, tied: bool
) -> None:
    case = Case(copies=2, steps=steps, tied=tied, engine=how)
    check_equal(rank_pool(4)(run_in_stages, case), *run_in_one_process(case, "sdpa"), EXACT)


def run_tensor_parallel(rank: int, case: Case) -> tuple[float, dict[str, torch.Tensor], int]:
    """Run stages with heads and feed-forward layers cut in two; also return the bytes sent."""
    configure(case)
    mesh = init_device_mesh("cpu", (case.stages, 2), mesh_dim_names=("pp", "tp"))
    stage = split(make_model(case, "distca"), mesh["pp"])
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
    schedule, losses = make_schedule(stage, case), list[torch.Tensor]()
    ids, positions, targets = make_batches(case, 0)
    for _ in range(case.steps):
        stage.submod.zero_grad()
        schedule.step(ids, position_ids=positions, target=targets, losses=losses)
    assert all(weight.grad is not None for weight in stage.submod.parameters())
    loss = sum_over_ranks(losses) / 2  # both halves of a stage have the loss
    return loss, collect_gradients(stage.submod.model), current_session().meter.sent_bytes


@pytest.mark.slow
def test_stages_with_tensor_parallel_layers_equal_one_process(rank_pool: RankPools) -> None:
    """Only stages with the same heads share attention."""
    case = Case(steps=3)
    loss, gradients = run_in_one_process(case, "sdpa")
    results = rank_pool(4)(run_tensor_parallel, case)
    assert {name for _, own, _ in results for name in own} == set(gradients)
    for found, own, sent in results:
        assert abs(found - loss) <= EXACT * loss
        assert sent > 0
        check_near(own, gradients)


def add_adapters(model: PreTrainedModel, *, wrapped: bool) -> Any:
    """Add adapters after attention only. Attention of the first layer then needs no gradient, but
    other stages still expect its rows in backward.
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


def train_adapters(rank: int, case: Case, wrapped: bool, folder: Path) -> dict[str, torch.Tensor]:
    """Run a step and save a stage's adapters; return their gradients."""
    model = add_adapters(make_model(case, "distca"), wrapped=wrapped)
    stage, held, step = prepare(case, model=model)
    step()
    save_pretrained(stage, folder)
    return collect_gradients(held)


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [False, True], ids=["add_adapter", "get_peft_model"])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.filterwarnings("ignore")
def test_adapters_equal_one_process(
    rank_pool: RankPools, tmp_path: Path, stages: int, wrapped: bool
) -> None:
    """One of four stages has no adapter. The saved adapter is that of the whole model."""
    from peft import PeftModel

    case = Case(stages=stages)
    model = add_adapters(make_model(case, "sdpa"), wrapped=False)
    run_alone(model, case, make_loss(case))
    wanted = collect_gradients(model)
    found = rank_pool(stages)(train_adapters, case, wrapped, tmp_path)
    assert {name for one in found for name in one} == set(wanted)
    for one in found:
        check_near(one, wanted)
    loaded = PeftModel.from_pretrained(make_model(case, "sdpa"), tmp_path)
    ids = make_batch(case, 1)[0]
    assert torch.allclose(
        loaded(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0, atol=1e-12
    )
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def evaluate(rank: int, case: Case) -> tuple[float, float, int]:
    """Return the losses of an evaluation and of the next step, and the bytes sent."""
    configure(case)
    stage, _, _ = make_stage(case)
    schedule = make_schedule(stage, case)
    ids, positions, targets = make_batches(case, 0)
    schedule.step(ids, position_ids=positions, target=targets)
    found, before = [], current_session().meter.sent_bytes
    for run in (schedule.eval, schedule.step):
        losses = list[torch.Tensor]()
        with torch.set_grad_enabled(run == schedule.step):
            run(ids, position_ids=positions, target=targets, losses=losses)
        found.append(sum_over_ranks(losses))
    return found[0], found[1], current_session().meter.sent_bytes - before


@pytest.mark.slow
def test_an_evaluation_shares_attention(rank_pool: RankPools) -> None:
    case = Case()
    loss, _ = run_in_one_process(case, "sdpa")
    for one, other, sent in rank_pool(2)(evaluate, case):
        assert abs(one - loss) <= EXACT * loss
        assert abs(other - loss) <= EXACT * loss
        assert sent > 0


def train_padded(rank: int, case: Case, padding: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients with `padding` tokens at the end of each micro-batch."""
    configure(case)
    stage, _, held = make_stage(case)
    ids, positions, targets = make_batches(case, 0)
    mask = torch.cat([torch.ones_like(ids), torch.zeros_like(ids[:, :padding])], 1)
    ids, positions = (
        torch.cat([each, torch.zeros_like(ids[:, :padding])], 1) for each in (ids, positions)
    )
    targets = torch.cat([targets, torch.full_like(targets[:, :padding], -100)], 1)
    losses = list[torch.Tensor]()
    make_schedule(stage, case).step(
        ids, position_ids=positions, attention_mask=mask, target=targets, losses=losses
    )
    return sum_over_ranks(losses), collect_gradients(held)


@pytest.mark.slow
@pytest.mark.parametrize("ping_pong", [False, True], ids=["whole", "nano-batches"])
def test_padding_changes_no_results(rank_pool: RankPools, ping_pong: bool) -> None:
    case = Case(settings=(("ping_pong", ping_pong),))
    loss, gradients = run_in_one_process(case, "sdpa")
    for found, own in rank_pool(2)(train_padded, case, 7):
        assert abs(found - loss) <= EXACT * loss
        check_near(own, gradients)


# Document lengths of global batches for two copies of 96 tokens.
LENGTHS = [[150, 20, 22], [64, 64, 64], [100, 90, 2], [192]]
DEALT_LOSS = partial(compute_loss, total=700)


def draw_tokens(number: int, document: int, length: int) -> torch.Tensor:
    return torch.randint(
        40, 90, (length,), generator=torch.Generator().manual_seed(100 * number + document)
    )


def train_dealt(rank: int, case: Case) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of a step of dealt batches, summed over copies."""
    configure(case)
    documents = [
        {"input_ids": draw_tokens(number, document, length)}
        for number, lengths in enumerate(LENGTHS)
        for document, length in enumerate(lengths)
    ]
    model = make_model(case, "distca")
    shares = document_shares(
        documents, case.tokens, model=model, ranks=case.copies, seed=None, device="cpu"
    )
    stage, mesh, held = make_stage(case, model=model)
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
    schedule = Schedule(stage, case.micro_batches, DEALT_LOSS, scale_grads=False)
    losses = list[torch.Tensor]()
    for _ in range(2):
        stage.submod.zero_grad()
        schedule.step(
            ids, position_ids=positions, target=targets, losses=losses, distca_documents=packed
        )
    grads = collect_gradients(held)
    for grad in grads.values():
        dist.all_reduce(grad, group=mesh["dp"].get_group())
    return sum_over_ranks(losses), grads


@pytest.mark.slow
@pytest.mark.parametrize("ping_pong", [False, True], ids=["whole", "nano-batches"])
def test_dealt_batches_equal_one_process(rank_pool: RankPools, ping_pong: bool) -> None:
    """Documents span both copies of the model."""
    case = Case(copies=2, settings=(("ping_pong", ping_pong),))
    model, total = make_model(case, "sdpa"), 0.0
    for number, lengths in enumerate(LENGTHS):
        for document, length in enumerate(lengths):
            tokens = draw_tokens(number, document, length)
            targets = torch.cat([tokens[1:], torch.tensor([-100])])
            loss = DEALT_LOSS(model(input_ids=tokens[None]).logits, targets)
            loss.backward()
            total += loss.item()
    gradients = collect_gradients(model)
    for loss, own in rank_pool(4)(train_dealt, case):
        assert abs(loss - total) <= EXACT * total
        check_near(own, gradients)


@pytest.mark.slow
def test_nothing_is_exchanged_without_balancing(rank_pool: RankPools) -> None:
    case = Case(settings=(("balance", False),))
    found = rank_pool(2)(run_in_stages, case)
    check_equal(found, *run_in_one_process(case, "sdpa"), EXACT)
    assert [(one.sent_bytes, one.served) for one in found] == [(0, 0)] * 2
