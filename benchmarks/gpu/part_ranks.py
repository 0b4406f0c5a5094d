"""Several ranks on one device, in processes of their own over NCCL (gloo on a CPU): outputs and
gradients beside `sdpa`.

For the correctness of streams and lifetimes, not for speed: sockets carry the messages.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hf_distca
from gpu_models import Packed, stack
from gpu_ranks import Ranks
from gpu_setting import Setting, seconds_of
from hf_distca.integration.current_session import current_session
from hf_distca.runtime.channel import Channel
from hf_distca.runtime.messages import MessagePart, RowRun, Rows, launch
from hf_distca.runtime.monitor import FailureMonitor
from hf_distca.schedule.cost import AttentionShape, CostModel

LAYERS, STEPS, TIMEOUT = 2, 3, 60.0
# Whole layers, and in halves. Exchanges cost nothing in the cost model, so that small documents
# move, too.
MODES: dict[str, dict[str, Any]] = {"balanced": {}, "ping-pong": {"ping_pong": True}}
# Norm of the difference over norm: in float32 to sdpa; in half precision to float32, beside the
# error of sdpa in that dtype.
WIDE_BOUND, HALF_BOUND = 1e-4, 2.0


def lengths_of(rank: int, tokens: int) -> list[int]:
    """One long document on rank 0, short ones of odd lengths elsewhere."""
    if rank == 0:
        return [tokens]
    short = tokens // 8 - rank
    return [short] * 8 + [tokens - 8 * short]


def computed(packed: Packed, implementation: str) -> dict[str, torch.Tensor]:
    """Output of a step and every gradient of it, in float32."""
    packed.embeddings = packed.embeddings.detach().requires_grad_()
    packed.use(implementation)
    out = packed.step(implementation).float()
    named = {
        name: parameter.grad.float()
        for name, parameter in packed.model.named_parameters()
        if parameter.grad is not None
    }
    found = {"output": out, "embeddings": packed.embeddings.grad.float(), **named}
    packed.model.zero_grad(set_to_none=True)
    return found


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative errors of the output and of the gradient that is furthest off."""
    if found.keys() != expected.keys():
        raise RuntimeError(
            f"gradients of {sorted(found.keys() ^ expected.keys())} are there for one attention"
            " only"
        )
    errors = {
        name: float((found[name] - expected[name]).norm() / expected[name].norm())
        for name in expected
    }
    return {"output": errors.pop("output"), "gradients": max(errors.values())}


def one_dtype(setting: Setting, rank: int, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    """Errors of sdpa and of every mode on this rank."""
    model = stack(setting, LAYERS, small=True).to(dtype)
    torch.manual_seed(rank)
    packed = Packed(setting, model, lengths_of(rank, tokens))
    exact = copy.copy(packed)
    exact.model = copy.deepcopy(model).float()
    exact.embeddings, exact.gradient = packed.embeddings.float(), packed.gradient.float()
    expected = computed(exact, "sdpa")
    result: dict[str, Any] = {"sdpa": worst(computed(packed, "sdpa"), expected)}
    heads = model.config.num_attention_heads, model.config.num_key_value_heads
    cost = CostModel.make_of_pairs(
        AttentionShape(*heads, model.config.head_dim, model.config.head_dim, dtype.itemsize)
    )
    for mode, settings in MODES.items():
        hf_distca.configure(
            hf_distca.DistCAConfig(cost_model=cost, tile=32, timeout_seconds=TIMEOUT, **settings)
        )
        errors = []
        for _ in range(STEPS):
            errors.append(worst(computed(packed, "distca"), expected))
            # Memory that the step gave back is written over: what still reads it would show.
            churn = [torch.full((2**20,), float("nan"), device=setting.device) for _ in range(8)]
            del churn
        meter = current_session().meter
        figures = {name: max(error[name] for error in errors) for name in errors[0]}
        result[mode] = {
            **figures,
            "exchanges": meter.dispatches + meter.returns,
            "sent_bytes": meter.sent_bytes,
        }
        if dtype == torch.float32:
            bounds = dict.fromkeys(figures, WIDE_BOUND)
        else:
            bounds = {name: HALF_BOUND * result["sdpa"][name] for name in figures}
        result[mode]["passed"] = (
            all(figures[name] <= bounds[name] for name in figures) and meter.sent_bytes > 0
        )
    return result


def work(rank: int, ranks: int, setting: Setting, keep: Any) -> None:
    tokens = setting.size(quick=256, cpu=1024, gpu=2048)
    result = {}
    for dtype in (torch.float32, torch.bfloat16):
        rows: list[Any] = [None] * ranks
        dist.all_gather_object(rows, one_dtype(setting, rank, dtype, tokens))
        result[str(dtype)] = rows
        keep(dtypes=result)
    dist.barrier()


def world_of_one(setting: Setting) -> dict[str, Any]:
    """Exchanges with oneself over the backend of the device: whether each arrives as it was sent,
    and seconds of one.
    """
    backend = "nccl" if setting.device.type == "cuda" else "gloo"
    size = setting.size(quick=2**12, cpu=2**20, gpu=2**27)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            backend, store=dist.FileStore(str(Path(folder, "store")), 1), rank=0, world_size=1
        )
        try:
            world = dist.GroupMember.WORLD
            channel = Channel(world, FailureMonitor((0,), 0, TIMEOUT, (world,)), TIMEOUT)
            rows = Rows((RowRun(0, 2, 3), RowRun(0, 0, 1)), {0: 4})
            equal = True
            for round_ in range(4):
                # What is sent is computed just before, and overwritten while it travels: the
                # streams have to keep the order.
                x = torch.full(
                    (8, size), float(round_), dtype=setting.dtype, device=setting.device
                ) + torch.arange(8, dtype=setting.dtype, device=setting.device).unsqueeze(1)
                expected = torch.cat([x[2:5], x[:1]])
                pending = launch(channel, [MessagePart(x, rows)])
                x.fill_(float("nan"))
                ((arrived,),) = pending.receive_sections()
                equal &= bool(torch.equal(arrived, expected))
            tensor = torch.zeros(8, size, dtype=setting.dtype, device=setting.device)
            seconds = seconds_of(
                lambda: launch(channel, [MessagePart(tensor, rows)]).receive_sections(),
                setting.device,
            )
        finally:
            dist.destroy_process_group()
    return {
        "backend": backend,
        "equal": equal,
        "bytes": 4 * size * setting.dtype.itemsize,
        "seconds": seconds,
    }


def prepare(setting: Setting) -> dict[int, Ranks]:
    """Start the ranks, which import what they need meanwhile."""
    return {
        ranks: Ranks(setting, work, ranks)
        for ranks in setting.size(quick=(2,), cpu=(2,), gpu=(2, 4))
    }


def run(setting: Setting, started: dict[int, Ranks]) -> None:
    """Put exchanges in a world of one, then the errors of every rank, by number of ranks, dtype and
    mode.
    """
    try:
        setting.put(world_of_one=world_of_one(setting))
    except Exception as error:  # the other figures do not need it
        setting.put(world_of_one={"failed": f"{type(error).__name__}: {error}"[:500]})
    found: dict[str, Any] = {}
    for ranks, processes in started.items():
        if not setting.time_for(f"{ranks} ranks", cpu=30.0, gpu=15.0):
            continue
        figures = processes.run(setting.left())
        rows = figures.get("dtypes", {})
        every = [
            row[mode]["passed"]
            for dtype in rows.values()
            for row in dtype
            for mode in MODES
            if mode in row
        ]
        found[str(ranks)] = {
            **figures,
            "passed": figures["failed"] is None and bool(every) and all(every),
        }
        setting.put(ranks=found, backend="nccl" if setting.device.type == "cuda" else "gloo")
