"""Several ranks on one device, as processes over NCCL (gloo on a CPU): outputs and gradients
compared with `sdpa`.

This checks streams and lifetimes, not speed: sockets carry the messages.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hf_distca
from gpu_models import Packed, make_stack
from gpu_ranks import Ranks
from gpu_setting import Setting, time_call
from hf_distca.integration.current_session import current_session
from hf_distca.runtime.channel import Channel
from hf_distca.runtime.messages import MessagePart, RowRun, Rows, launch
from hf_distca.runtime.monitor import FailureMonitor
from hf_distca.schedule.cost import AttentionShape, CostModel

LAYERS, STEPS, TIMEOUT = 2, 3, 60.0
# Exchanges cost nothing in the cost model, so that small documents move as well.
MODES: dict[str, dict[str, Any]] = {"balanced": {}, "ping-pong": {"ping_pong": True}}
# Largest norm of the difference / norm: float32 relative to sdpa; half precision relative to
# float32, divided by the error of sdpa in that dtype.
WIDE_BOUND, HALF_BOUND = 1e-4, 2.0


def choose_lengths(rank: int, tokens: int) -> list[int]:
    """Return one long document on rank 0, short ones of odd lengths on other ranks."""
    if rank == 0:
        return [tokens]
    short = tokens // 8 - rank
    return [short] * 8 + [tokens - 8 * short]


def compute_step(packed: Packed, implementation: str) -> dict[str, torch.Tensor]:
    """Run a step; return its output and all gradients in float32."""
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


def find_worst(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Compute the relative errors of the output and of the worst gradient."""
    if found.keys() != expected.keys():
        raise RuntimeError(
            f"gradients of {sorted(found.keys() ^ expected.keys())} exist only for one attention"
        )
    errors = {
        name: float((found[name] - expected[name]).norm() / expected[name].norm())
        for name in expected
    }
    return {"output": errors.pop("output"), "gradients": max(errors.values())}


def measure_dtype(setting: Setting, rank: int, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    """Compute the errors of sdpa and of every mode on this rank."""
    model = make_stack(setting, LAYERS, small=True).to(dtype)
    torch.manual_seed(rank)
    packed = Packed(setting, model, choose_lengths(rank, tokens))
    exact = copy.copy(packed)
    exact.model = copy.deepcopy(model).float()
    exact.embeddings, exact.gradient = packed.embeddings.float(), packed.gradient.float()
    expected = compute_step(exact, "sdpa")
    result: dict[str, Any] = {"sdpa": find_worst(compute_step(packed, "sdpa"), expected)}
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
            errors.append(find_worst(compute_step(packed, "distca"), expected))
            # Overwrite the memory that the step released: a late read of it would show.
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
        dist.all_gather_object(rows, measure_dtype(setting, rank, dtype, tokens))
        result[str(dtype)] = rows
        keep(dtypes=result)
    dist.barrier()


def measure_world_of_one(setting: Setting) -> dict[str, Any]:
    """Exchange with oneself over the device's backend; return whether every message arrives intact,
    and the seconds of an exchange.
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
                # The message is computed just before it is sent and overwritten while it travels,
                # so only the order of the streams keeps it correct.
                x = torch.full(
                    (8, size), float(round_), dtype=setting.dtype, device=setting.device
                ) + torch.arange(8, dtype=setting.dtype, device=setting.device).unsqueeze(1)
                expected = torch.cat([x[2:5], x[:1]])
                pending = launch(channel, [MessagePart(x, rows)])
                x.fill_(float("nan"))
                ((arrived,),) = pending.receive_sections()
                equal &= bool(torch.equal(arrived, expected))
            tensor = torch.zeros(8, size, dtype=setting.dtype, device=setting.device)
            seconds = time_call(
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
    """Start the ranks, so that they import in the meantime."""
    return {
        ranks: Ranks(setting, work, ranks)
        for ranks in setting.size(quick=(2,), cpu=(2,), gpu=(2, 4))
    }


def run(setting: Setting, started: dict[int, Ranks]) -> None:
    """Record exchanges in a world of one, then all ranks' errors by ranks, dtype and mode."""
    try:
        setting.put(world_of_one=measure_world_of_one(setting))
    except Exception as error:  # other figures do not need it
        setting.put(world_of_one={"failed": f"{type(error).__name__}: {error}"[:500]})
    found: dict[str, Any] = {}
    for ranks, processes in started.items():
        if not setting.has_time_for(f"{ranks} ranks", cpu=30.0, gpu=15.0):
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
