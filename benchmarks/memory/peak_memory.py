"""Peak memory of a rank in training steps: torch's allocations in CPU processes, compared with the
simulator.

One document lies on all ranks, dealt head and tail, in float32 or FSDP2's mixed precision. Every
allocation and release of torch's CPU allocator that the profiler sees is counted: parameters,
gradients, the optimizer, tensors that autograd saves, message buffers, and temporary tensors of
operations. On a GPU, `torch.cuda.max_memory_allocated` counts the same. The resident size of a
process also includes libraries, and freed memory that the C library keeps.

A CPU has no second memory, so offloading copies to numpy arrays here. torch does not count them;
the script counts them separately.

    python benchmarks/memory/peak_memory.py --json
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaForCausalLM, modeling_utils

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

import hf_distca
from batches import make_share
from hf_distca.agreement.dealt_share import Dealing
from hf_distca.integration.layer_kinds import list_layer_keys, make_initial_cost
from hf_distca.schedule.cost import CostModel
from models import make_llama_config
from processes import gather, run_on_ranks
from script import add_option, make_parser, output_result, print_table
from simulator.hardware import find_hardware
from simulator.model_shape import ModelShape
from simulator.predict import predict_step
from simulator.setting import Setting
from simulator.strategies import find_strategy

# Tokens whose logits TRL's loss holds at a time. TRL's default of 4,096 is more than a rank has
# here.
CHUNK = 64
SHAPE = ModelShape("tiny", 256, 4, 4, 2, 64, 896, 4096)


@dataclass(frozen=True)
class Case:
    """The trained model, and the way it is trained."""

    name: str
    ranks: int
    tokens: int
    checkpointing: bool = False
    chunked: bool = False
    offload: bool = False
    mixed: bool = False
    narrow: bool = False

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model; a narrow one has little but attention, with a key/value head per
        query head.
        """
        return (
            replace(SHAPE, key_value_heads=4, feed_forward=64, vocabulary=512)
            if self.narrow
            else SHAPE
        )

    def setting(self) -> Setting:
        """Make the simulator's setting of this case."""
        hardware = replace(find_hardware("h100"), element_bytes=2 if self.mixed else 4)
        setting = Setting(
            self.shape,
            hardware,
            self.ranks,
            self.tokens,
            sharding="fsdp" if self.ranks > 1 else "ddp",
            fused=False,
        )
        return replace(
            setting,
            checkpointing="full" if self.checkpointing else "none",
            offload=self.offload,
            loss_tokens=CHUNK if self.chunked else None,
            profile=CostModel.make_analytic(setting.shape, device_type="cpu"),
        )


_CHUNKED: dict[str, Any] = {"checkpointing": True, "chunked": True}
_OFFLOADED = _CHUNKED | {"offload": True}
CASES = (
    Case("one rank", 1, 1024),
    Case("one rank, checkpointing", 1, 2048, checkpointing=True),
    Case("FSDP2", 2, 1024),
    Case("FSDP2, checkpointing", 2, 1024, checkpointing=True),
    Case("FSDP2, checkpointing, chunked loss", 2, 2048, **_CHUNKED),
    Case("FSDP2, offloaded checkpoints, chunked loss", 2, 2048, **_OFFLOADED),
    Case("the same, half as long again", 2, 3072, **_OFFLOADED),
    Case("the same in mixed precision", 2, 2048, **_OFFLOADED, mixed=True),
    Case("little but attention", 2, 2048, checkpointing=True, narrow=True),
)


class Host:
    """Hooks that keep saved tensors in numpy arrays, and the peak bytes of these arrays."""

    def __init__(self) -> None:
        self.bytes = self.most = 0

    @contextmanager
    def keeping(self, **_: Any) -> Iterator[None]:
        """Replace `save_on_cpu` inside the block."""

        def pack(tensor: torch.Tensor) -> _Packed:
            return _Packed(self, tensor)

        with torch.autograd.graph.saved_tensors_hooks(pack, _Packed.unpack):
            yield


class _Packed:
    def __init__(self, host: Host, tensor: torch.Tensor) -> None:
        self.host, self.dtype = host, tensor.dtype
        self.array = tensor.detach().view(torch.uint8).numpy().copy()
        host.bytes += self.array.nbytes
        host.most = max(host.most, host.bytes)

    def unpack(self) -> torch.Tensor:
        return torch.from_numpy(self.array).clone().view(self.dtype)

    def __del__(self) -> None:
        self.host.bytes -= self.array.nbytes


def settle(name: str) -> None:
    """Wrap a collective of torch.distributed so that gloo's threads release its tensors before the
    main thread does.

    The profiler sees only releases of the main thread; otherwise some buffers would seem to stay.
    """
    collective = getattr(dist, name)

    def settled(*arguments: Any, async_op: bool = False, **options: Any) -> Any:
        work = collective(*arguments, async_op=True, **options)
        work.wait()
        time.sleep(0.05)
        return work if async_op else None

    setattr(dist, name, settled)


def train(case: Case, rank: int, host: Host) -> None:
    """Train two steps: the second has gradients and an optimizer's state, as later ones do."""
    shape = case.shape
    config = make_llama_config(
        (shape.hidden, shape.feed_forward, shape.layers),
        (shape.query_heads, shape.key_value_heads),
        shape.vocabulary,
        attn_implementation="distca",
    )
    model = LlamaForCausalLM(config).train()
    if case.chunked:
        from trl.kernels import chunked_logprob
        from trl.trainer.utils import add_fused_lm_head

        chunked_logprob.TOKEN_CHUNK_SIZE = CHUNK
        add_fused_lm_head(model)
    if case.checkpointing:
        modeling_utils.save_on_cpu = host.keeping
        model.activation_checkpointing_enable({"use_reentrant": False}, offload=case.offload)
    settings = hf_distca.configure(hf_distca.DistCAConfig(cost_model="analytic"))
    costs = {key: make_initial_cost(key, settings) for key in list_layer_keys(model, None, "cpu")}
    if case.ranks > 1:
        policy = (
            MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            if case.mixed
            else MixedPrecisionPolicy()
        )
        for module in (*model.model.layers, model):
            fully_shard(module, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    length = case.ranks * case.tokens
    documents = [torch.arange(length) % shape.vocabulary]
    dealing = Dealing(case.ranks, case.tokens, costs, settings)
    share = make_share(documents, dealing.make_share(np.array([length]), (0, 0), rank))
    chunked = {"fused_lm_head": True} if case.chunked else {}
    for _ in range(2):
        model(**share, **chunked, use_cache=False, num_items_in_batch=length).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def list_allocated(profiled: profile) -> list[int]:
    """List the bytes that torch holds after each of its allocations and releases on this CPU."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiled.export_chrome_trace(str(trace))
        events = [
            event
            for event in json.loads(trace.read_text())["traceEvents"]
            if event.get("name") == "[memory]"
        ]
    return [
        event["args"]["Total Allocated"] for event in sorted(events, key=lambda event: event["ts"])
    ]


def measure(rank: int, ranks: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Measure the peaks of the fullest rank in a case."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    host = Host()
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        settle(name)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        train(arguments.case, rank, host)
    peaks = gather((max(list_allocated(profiled)), host.most))
    device, moved = (float(max(values)) for values in zip(*peaks, strict=True))
    return {"device": device, "host": moved}


def predict_case(case: Case) -> dict[str, Any]:
    """Predict the same figures with the simulator, and the terms of the device peak."""
    step = predict_step(
        case.setting(), [np.array([case.ranks * case.tokens])], find_strategy("dealt")
    )
    assert step is not None  # documents can always be dealt
    return {"device": step.peak_bytes, "host": step.memory.host, "terms": asdict(step.memory)}


def compare(case: Case) -> dict[str, Any]:
    """Measure and predict the figures of a case."""
    measured = run_on_ranks(measure, case.ranks, argparse.Namespace(case=case))
    expected = predict_case(case)
    return {
        "case": asdict(case),
        "measured": measured,
        "predicted": expected,
        "ratio": expected["device"] / measured["device"],
    }


def show(result: dict[str, Any]) -> None:
    rows = []
    for row in result["cases"]:
        case, sides = row["case"], (row["measured"], row["predicted"])
        device, host = (
            [f"{side[name] / 1e6:.1f}" for side in sides] for name in ("device", "host")
        )
        sizes = str(case["ranks"]), str(case["tokens"])
        rows.append((case["name"], *sizes, *device, f"{row['ratio']:.3f}", *host))
    columns = ["case", "ranks", "tokens a rank", "measured", "predicted", "ratio"]
    print_table("MB of the fullest rank", [*columns, "host measured", "host predicted"], rows)


def main() -> None:
    parser = make_parser(__doc__)
    add_option(parser, "--cases", list(range(len(CASES))), "indices of cases, from 0")
    arguments = parser.parse_args()
    cases = [compare(CASES[number]) for number in arguments.cases]
    output_result(arguments, {"cases": cases}, show)


if __name__ == "__main__":
    main()
