"""A tiny model of any family, in stages on the ranks of a pool or in one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tiny import class_of, tiny_config
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

import hf_distca
from hf_distca.integration.current_session import current_session
from hf_distca.pipeline import Schedule, Stage, split
from tiny_runs import settings


class Case(NamedTuple):
    """What is trained, and how.

    `layers` is the number of layers, None for that of the family's tiny config.
    """

    family: str = "llama"
    stages: int = 2
    copies: int = 1
    micro_batches: int = 4
    tokens: int = 96
    dtype: torch.dtype = torch.float64
    layers: int | None = 4
    checkpointing: bool | None = None  # whether it is reentrant; None: no checkpointing
    per_stage: tuple[int, ...] | None = None
    steps: int = 1
    tied: bool = False
    engine: str = "none"  # around each stage; with an engine, steps accumulate
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def lengths(self) -> list[list[int]]:
        """List document lengths by micro-batch: one long document, shorter ones, or tiny ones."""
        chance, found = random.Random(self.micro_batches), []
        for number in range(self.micro_batches * self.copies):
            left, lengths = self.tokens, []
            while left:
                most = (
                    left
                    if number % 3 == 0
                    else max(1, self.tokens // (4 if number % 3 == 1 else 16))
                )
                lengths.append(min(left, most if number % 3 == 0 else chance.randint(1, most)))
                left -= lengths[-1]
            found.append(lengths)
        return found


def make_model(case: Case, implementation: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = tiny_config(case.family)
    if case.layers is not None and not getattr(config, "layer_types", None):
        config.num_hidden_layers = case.layers
    if case.tied:
        config.tie_word_embeddings = True
    config._attn_implementation = implementation
    model_class = class_of(case.family)
    if model_class._can_set_experts_implementation():
        config._experts_implementation = "eager"  # grouped products do not support float64
    model = model_class(config).to(case.dtype).train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            )
    return model


def make_batch(case: Case, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make token ids, position ids and targets of a micro-batch, (1, tokens) each."""
    ids = torch.randint(40, 90, (1, case.tokens), generator=torch.Generator().manual_seed(number))
    positions = torch.cat([torch.arange(length) for length in case.lengths[number]])[None]
    last = torch.cat([positions[:, 1:], torch.zeros(1, 1, dtype=torch.long)], 1) == 0
    return ids, positions, torch.where(last, -100, torch.cat([ids[:, 1:], ids[:, :1]], 1))


def make_batches(
    case: Case, copy: int = 0, *, count: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make token ids, position ids and targets of a copy, (micro-batches, tokens) each."""
    numbers = range(
        copy * case.micro_batches, copy * case.micro_batches + (count or case.micro_batches)
    )
    ids, positions, targets = (
        torch.cat(tensors)
        for tensors in zip(*(make_batch(case, number) for number in numbers), strict=True)
    )
    return ids, positions, targets


def make_loss(case: Case) -> Any:
    """Make the loss of a micro-batch: the sum over its targets, over all targets of the step."""
    total = sum(
        int((make_batch(case, number)[2] >= 0).sum())
        for number in range(case.micro_batches * case.copies)
    )

    return partial(compute_loss, total=total)


def compute_loss(logits: torch.Tensor, targets: torch.Tensor, *, total: int) -> torch.Tensor:
    summed = cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    return summed / total


def run_alone(model: Any, case: Case, loss: Any) -> float:
    """Run a step in one process, one document at a time, with backward; return the loss."""
    total = 0.0
    for number, lengths in enumerate(case.lengths):
        ids, _, targets = make_batch(case, number)
        parts = [model(input_ids=one, use_cache=False).logits for one in ids.split(lengths, 1)]
        found = loss(torch.cat(parts, 1), targets)
        found.backward()
        total += found.item()
    return total


def collect_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Collect gradients by the names of weights, whole if they are sharded."""
    weights = model.named_parameters()
    return {name: gather_whole(weight.grad) for name, weight in weights if weight.grad is not None}


def add_tied_head(model: Any, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Add a tied embedding's entry by the name of the head, as on the last stage."""
    tied, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    if head.weight is tied:
        embedding = next(name for name, weight in model.named_parameters() if weight is tied)
        name = next(name for name, module in model.named_modules() if module is head)
        found[f"{name}.weight"] = found[embedding]
    return found


def gather_whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run_in_one_process(case: Case, implementation: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of a step, one document at a time."""
    model = make_model(case, implementation)
    loss = run_alone(model, case, make_loss(case))
    return loss, add_tied_head(model, collect_gradients(model))


def make_stage(
    case: Case, engine: str = "none", *, model: Any = None
) -> tuple[Stage, DeviceMesh, PreTrainedModel]:
    """Make this rank's stage under an engine; return it, its mesh and its part of the model."""
    mesh = init_device_mesh("cpu", (case.copies, case.stages), mesh_dim_names=("dp", "pp"))
    stage = split(model or make_model(case, "distca"), mesh["pp"], layers=case.per_stage)
    held = stage.submod.model
    if engine == "fsdp":
        for layer in held.model.layers:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh["dp"])
        fully_shard(stage.submod, mesh=mesh["dp"])
    if engine == "ddp":
        stage.submod = DistributedDataParallel(stage.submod, process_group=mesh["dp"].get_group())
    return stage, mesh, held


def make_schedule(stage: Stage, case: Case) -> Schedule:
    """Make a schedule whose losses add up to the mean of a step."""
    return Schedule(stage, case.micro_batches, make_loss(case), scale_grads=False)


def prepare(
    case: Case, engine: str = "none", *, model: Any = None, loss: Any = None
) -> tuple[Stage, PreTrainedModel, Callable[..., Any]]:
    """Make this rank's stage, its part of the model, and a function that runs a step. `loss`, if
    given, is the mean over a micro-batch.
    """
    configure(case)
    stage, mesh, held = make_stage(case, engine, model=model)
    schedule = Schedule(stage, case.micro_batches, loss) if loss else make_schedule(stage, case)
    ids, positions, targets = make_batches(case, mesh.get_local_rank("dp"))
    return stage, held, partial(schedule.step, ids, position_ids=positions, target=targets)


def sum_over_ranks(losses: list[torch.Tensor]) -> float:
    """Sum the losses of all micro-batches, which only the last stages have."""
    total = torch.tensor(sum(one.item() for one in losses), dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


class Found(NamedTuple):
    """Results of a rank. Gradients are those of all copies."""

    loss: float
    gradients: dict[str, torch.Tensor]
    calls: int
    recomputed_calls: int
    kernel_calls: int
    served: int
    sent_bytes: int
    dispatches: int
    returns: int


def configure(case: Case) -> None:
    hf_distca.configure(settings(**{"timeout_seconds": 20.0, **dict(case.settings)}))


def run_in_stages(rank: int, case: Case) -> Found:
    """Run the steps of a case on one rank of a pool."""
    configure(case)
    model = make_model(case, "distca")
    if case.checkpointing is not None:
        model._set_gradient_checkpointing(
            enable=True,
            gradient_checkpointing_func=partial(checkpoint, use_reentrant=case.checkpointing),
        )
    stage, mesh, held = make_stage(case, case.engine, model=model)
    schedule, losses = make_schedule(stage, case), list[torch.Tensor]()
    ids, positions, targets = make_batches(case, mesh.get_local_rank("dp"))
    meter = current_session().meter
    for _ in range(case.steps):
        if case.engine == "none":
            stage.submod.zero_grad()
        schedule.step(ids, position_ids=positions, target=targets, losses=losses)
    gradients = collect_gradients(held)
    for gradient in gradients.values():
        if case.engine != "none":
            gradient *= case.copies / case.steps
        elif case.copies > 1:
            dist.all_reduce(gradient, group=mesh["dp"].get_group())
    idle = [one for one in schedule.figures if one.tick.micro_batches[stage.stage_index] is None]
    served = sum(one.attention_seconds > 0 for one in idle)
    counts = (
        meter.calls,
        meter.recomputed_calls,
        meter.kernel_calls,
        served,
        meter.sent_bytes,
        meter.dispatches,
        meter.returns,
    )
    return Found(sum_over_ranks(losses), gradients, *counts)


def check_equal(
    found: list[Found], loss: float, gradients: dict[str, torch.Tensor], tolerance: float
) -> None:
    """Check the gradients of each rank, and that all ranks together have all gradients."""
    for one in found:
        assert abs(one.loss - loss) <= tolerance * abs(loss)
        check_near(one.gradients, gradients, tolerance, tolerance * 1e-3)
    assert {name for one in found for name in one.gradients} == set(gradients)


def check_near(
    found: dict[str, torch.Tensor],
    wanted: dict[str, torch.Tensor],
    tolerance: float = 1e-9,
    least: float = 0.0,
) -> None:
    """Check that a rank's tensors are those of one process, up to `tolerance` of their norms."""
    for name, tensor in found.items():
        difference = (tensor - wanted[name]).norm()
        assert difference <= tolerance * wanted[name].norm() + least, name
