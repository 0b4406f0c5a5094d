"""Host time of core attention outside its kernels: an exchange and planning by number of ranks, and
a layer on one rank.

    python benchmarks/host/host_time.py --json results.json

All times are medians of the processor time of the one working thread, so that other programs do not
count.

*Layers*: forward and backward of one call of core attention on one rank of N, with dispatch and
return in both directions, without ping-pong. Plan and route are real. Everything except bookkeeping
is kept small: rows are 2 bytes wide, the kernel returns zeros, and messages are never sent and
arrive at once. Typical ranks are evenly spaced among all; the busiest rank exchanges with the most
others. *One by one* has a document as long as the batch on every eighth rank and short ones
elsewhere, which needs more exchange than documents of a corpus.

*Planning*: the work of every rank for a plan except balancing, from all announcements to the route,
without collectives.

*Alone*: the time that `distca` adds to `sdpa` in a layer on one rank, forward and backward. The
kernels of both are replaced by functions that only make tensors of the right shapes. The time to
make these tensors is subtracted, and for sdpa also that of an autograd run, so the figure for
distca is slightly too large. sdpa gets one sequence of as many tokens. Times with the real kernels
follow; there the number of documents shows in distca's kernel.

The *first layer* of a micro-batch also makes the plan.

*Calls*: Python calls (functions and built-ins) that one more layer adds to a step of a small Llama
on one rank, forward and backward, and the calls of a step outside its layers: with distca, with a
bare call of torch's attention, and the difference. They do not depend on the machine
(`host_calls.py`).

`--before FOLDER`, a checkout of an earlier commit, shows calls and microseconds of the same steps
for both commits, measured in turns in separate processes. These times include the kernels.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

from hf_distca.agreement.announce import (
    FIGURE_COUNT,
    Announcement,
    Announcements,
    PlanKey,
    check_agreement,
    collect_shared_settings,
    hash_settings,
)
from hf_distca.agreement.batch_plan import History, Measurement, MicroBatchPlan
from hf_distca.agreement.documents import PackedDocuments, TokenBatch
from hf_distca.config import DistCAConfig
from hf_distca.integration.handle import ForwardBatch, LayerPlanner, MaskStandIn
from hf_distca.integration.session import Session
from hf_distca.kernels import KernelRequest, ScoreOptions, TaskBatch, select_kernel
from hf_distca.kernels.base import BackwardInputs, Grads, Operands, Outputs
from hf_distca.runtime.call import AttentionServer, Inputs, LayerExchange
from hf_distca.runtime.core_attention import compute_core_attention
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.route import Route
from hf_distca.schedule.balance import balance
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import UNIFORM_RANKS
from host_calls import compare, measure_calls
from placed import CUDA as COST
from placed import LLAMA_3_8B
from script import add_option, make_parser, output_result, print_table

CPU = torch.device("cpu")
WIDTH = 1  # of the only head, in bfloat16
# The layer of a small Llama on one rank.
ALONE = LlamaConfig(hidden_size=64, num_attention_heads=4, attention_dropout=0.0)


class Zeros:
    """A kernel that computes nothing."""

    name = "zeros"

    def forward(self, pools: Operands, *_: Any) -> Outputs:
        size = pools.q_THD.shape[:2]
        return Outputs(
            pools.q_THD.new_zeros(*size, pools.v_TKV.shape[2]),
            pools.q_THD.new_zeros(size, dtype=torch.float32),
        )

    def backward(self, pools: BackwardInputs, *_: Any) -> Grads:
        return Grads(*map(torch.zeros_like, pools.operands))


ZEROS = Zeros()


class ZerosFunction(torch.autograd.Function):
    """Replaces torch's autograd function, with the results of `Zeros`."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.zeros_like(tensors[0])

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros_like(tensor) for tensor in ctx.saved_tensors)


def zeros_function(*tensors: torch.Tensor, **_: Any) -> torch.Tensor:
    return ZerosFunction.apply(*tensors)


class Nowhere:
    """A channel that sends nothing: messages arrive at once and keep their previous contents."""

    is_gloo = False

    def start(self, *_: Any) -> Nowhere:
        return self

    def wait(self) -> None:
        pass


def draw_documents(ranks: int, tokens: int, kind: str) -> list[list[int]]:
    """Return the document lengths of each rank: long-tailed ones cut where a rank is full, or long
    and short ones by rank.
    """
    if kind == "one by one":
        return [[tokens] if rank % 8 == 0 else [tokens // 256] * 256 for rank in range(ranks)]
    draw, rows = np.random.default_rng(0), []
    for _ in range(ranks):
        row: list[int] = []
        while (left := tokens - sum(row)) > 0:
            row.append(min(left, max(16, int(draw.lognormal(math.log(1800), 1.5)))))
        rows.append(row)
    return rows


def measure_ms(run: Callable[[], object], repeats: int) -> float:
    """Return the median milliseconds of a run, after one that is not counted."""
    run()
    seconds = []
    for _ in range(repeats):
        started = time.thread_time()
        run()
        seconds.append(time.thread_time() - started)
    return statistics.median(seconds) * 1e3


def count_peers(plan: Plan) -> np.ndarray[Any, Any]:
    """Count the ranks with which each rank exchanges queries."""
    pairs = np.unique(np.stack([plan.home, plan.server])[:, plan.home != plan.server], axis=1)
    return np.bincount(pairs.reshape(-1), minlength=plan.layout.world_size)


def make_layer(plan: Plan, rank: int) -> Callable[[], object]:
    """Make the function that runs forward and backward of a layer on a rank."""
    route, rows = Route.build(plan, rank), int(plan.layout.query_tokens[rank])
    group = AttentionGroup(tuple(range(plan.layout.world_size)), rank, Nowhere())  # type: ignore[arg-type]
    server = AttentionServer(ZEROS, ScoreOptions(1.0), Meter())  # type: ignore[arg-type]
    heads = plan.layout.groups  # all head groups, as in a document that is split by heads
    leaves = [
        torch.zeros(rows, heads, WIDTH, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]
    do_THV = torch.zeros_like(leaves[0])
    return lambda: torch.autograd.grad(
        compute_core_attention(Inputs(*leaves), LayerExchange(route, group, server)), leaves, do_THV
    )


def measure_layers(ranks: int, arguments: argparse.Namespace, kind: str) -> dict[str, Any]:
    plan = balance(
        Layout.from_lengths(draw_documents(ranks, arguments.tokens, kind)), COST, DistCAConfig()
    )
    others = count_peers(plan)
    chosen = np.linspace(0, ranks - 1, min(arguments.sample, ranks), dtype=int).tolist()
    typical = [measure_ms(make_layer(plan, rank), arguments.repeats) for rank in chosen]
    busiest = int(others.argmax())
    return {
        "typical_ms": statistics.median(typical),
        "slowest_typical_ms": max(typical),
        "typical_peers": float(np.median(others)),
        "busiest_ms": measure_ms(make_layer(plan, busiest), arguments.repeats),
        "busiest_peers": int(others[busiest]),
    }


def measure_planning(ranks: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Return the milliseconds of each step of planning, and of all steps together."""
    config, key = DistCAConfig(), PlanKey(LLAMA_3_8B, "cuda")
    facts, group = collect_shared_settings(config, (COST,)), AttentionGroup(tuple(range(ranks)))
    rows = []
    for lengths in draw_documents(ranks, arguments.tokens, "long tail"):
        one = TokenBatch(1, arguments.tokens, packed=PackedDocuments(lengths)).read_documents()
        own, settings = [Measurement(*(10**6,) * FIGURE_COUNT)], hash_settings(facts)
        rows.append(
            Announcement(
                1, settings, exchanges=0, checksum=0, figures=own, documents=[(one, key.nano)]
            ).to_row()
        )
    (stated,) = check_agreement(Announcements.from_rows(rows), facts, group, "here")
    plan = balance(stated.build_layout(), COST, config)
    history, figures = History(), np.full((ranks, FIGURE_COUNT), 10**9)

    def bookkeeping() -> None:
        seconds = COST.estimate_seconds(plan.end - plan.start, plan.end, plan.heads)
        planned = MicroBatchPlan(key, plan, 1, seconds, UNIFORM_RANKS, Meter())
        history.record_plan(planned)
        history.end_micro_batch()
        history.record_figures(planned, figures)
        history.reset()

    def digest() -> None:
        vars(plan).pop("digest", None)
        _ = plan.digest

    steps: dict[str, Callable[[], object]] = {
        "reading announcements": lambda: check_agreement(
            Announcements.from_rows(rows), facts, group, "here"
        ),
        "layout": stated.build_layout,
        "digest": digest,
        "own route": lambda: Route.build(plan, ranks // 2),
        "history": bookkeeping,
    }
    found = {name: measure_ms(run, arguments.repeats) for name, run in steps.items()}
    return {**found, "all": sum(found.values())}


def add_backward(
    run: Callable[..., torch.Tensor], leaves: list[torch.Tensor]
) -> Callable[[], object]:
    """Make a function that runs `run` and its backward."""

    def both() -> None:
        out = run(*leaves)
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    return both


class Switch(Session):
    """A session whose kernel can be replaced by one that computes nothing, after the usual
    selection.
    """

    bare = False

    def choose_kernel(self, *arguments: Any) -> Any:
        return Either(self, super().choose_kernel(*arguments))


class Either:
    """A kernel, or one that computes nothing while its session is bare."""

    def __init__(self, session: Switch, kernel: Any) -> None:
        self.session, self.kernel, self.name = session, kernel, kernel.name

    def forward(self, *arguments: Any) -> Outputs:
        return (ZEROS if self.session.bare else self.kernel).forward(*arguments)

    def backward(self, *arguments: Any) -> Grads:
        return (ZEROS if self.session.bare else self.kernel).backward(*arguments)


def measure_alone(count: int, tokens: int, repeats: int, session: Switch) -> dict[str, float]:
    """Return the microseconds of a layer with `count` documents."""
    module = LlamaAttention(ALONE, 0).train()
    # The layout that projections leave: heads of a token are adjacent.
    shape = (1, tokens, ALONE.num_attention_heads, module.head_dim)
    leaves = [torch.randn(shape).transpose(1, 2).requires_grad_() for _ in range(3)]
    packed = PackedDocuments((tokens // count,) * count)
    handle = MaskStandIn(ForwardBatch(LayerPlanner(session), TokenBatch(1, tokens)))
    functions = AttentionInterface()
    call = {"scaling": module.scaling, "dropout": 0.0}

    def distca(*tensors: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = functions["distca"](
            module, *tensors, handle, distca_documents=packed, **call
        )[0]
        return out

    def sdpa(*tensors: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = functions["sdpa"](module, *tensors, None, **call)[0]
        return out

    q_THD, k_TKD, v_TKV = (leaf.detach()[0].transpose(0, 1).contiguous() for leaf in leaves)
    lengths = (tokens // count,) * count
    starts = tuple(range(0, tokens, tokens // count))
    tasks, scores = TaskBatch(starts, lengths, starts, lengths), ScoreOptions(module.scaling)
    real = select_kernel(
        "auto", KernelRequest(CPU, q_THD.dtype, module.head_dim, module.head_dim, scores)
    )

    def kernel(which: Any) -> None:
        o_THV, lse_TH = which.forward(Operands(q_THD, k_TKD, v_TKV), tasks, scores)
        which.backward(BackwardInputs(o_THV, q_THD, o_THV, lse_TH, k_TKD, v_TKV), tasks, scores)

    def without_kernel(run: Callable[[], object]) -> None:
        session.bare = True
        run()
        session.bare = False

    def first(*tensors: torch.Tensor) -> torch.Tensor:
        nonlocal handle
        handle = MaskStandIn(ForwardBatch(LayerPlanner(session), TokenBatch(1, tokens)))
        return distca(*tensors)

    def sdpa_without_kernel() -> None:
        functional.scaled_dot_product_attention = zeros_function
        sdpa_both()
        functional.scaled_dot_product_attention = scaled_dot_product_attention

    both, sdpa_both = add_backward(distca, leaves), add_backward(sdpa, leaves)
    runs: dict[str, Callable[[], object]] = {
        "distca": both,
        "its kernel": partial(kernel, real),
        "distca without kernel": partial(without_kernel, both),
        "its forward": partial(without_kernel, lambda: distca(*leaves)),
        "first layer without kernel": partial(without_kernel, add_backward(first, leaves)),
        "zeros": partial(kernel, ZEROS),
        "sdpa": sdpa_both,
        "sdpa without kernel": sdpa_without_kernel,
        "zeros of a function": add_backward(zeros_function, leaves),
    }
    found = time_in_rounds(runs, repeats)
    # The autograd run counts only for distca: for sdpa it is subtracted with the function.
    ours, theirs = (
        found["distca without kernel"] - found["zeros"],
        found["sdpa without kernel"] - found["zeros of a function"],
    )
    return {**found, "beyond sdpa": ours - theirs}


def time_in_rounds(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median microseconds of several functions. Each runs several times in a round, so
    that its code and data are in the cache.
    """
    milliseconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(5):
        for name, run in runs.items():
            milliseconds[name].append(measure_ms(run, repeats))
    return {name: statistics.median(each) * 1e3 for name, each in milliseconds.items()}


def show(result: dict[str, Any]) -> None:
    for title, found in result.items():
        if title in ("machine", "setting"):
            continue
        form = ".2f" if "ms" in title else ".0f"
        rows = (
            (name, *(format(value, form) for value in row.values())) for name, row in found.items()
        )
        print_table(title, ("", *next(iter(found.values()))), rows)


def main() -> None:
    parser = make_parser(__doc__)
    add_option(parser, "--ranks", [64, 512, 4096], "numbers of ranks")
    add_option(parser, "--tokens", 65536, "tokens a rank")
    add_option(parser, "--sample", 15, "number of typical ranks to measure")
    add_option(parser, "--repeats", 20, "repetitions of each measurement; the median counts")
    add_option(parser, "--documents", [1, 8, 64, 512], "documents of the layer on one rank")
    add_option(parser, "--tokens-alone", 512, "tokens of the layer on one rank")
    text = "checkout of an earlier commit to measure as well"
    parser.add_argument("--before", type=Path, metavar="FOLDER", help=text)
    given = parser.parse_args()
    torch.set_num_threads(1)
    session = Switch(DistCAConfig())
    result: dict[str, Any] = {
        "alone, us": {
            str(n): measure_alone(n, given.tokens_alone, given.repeats, session)
            for n in given.documents
        },
        "calls": {str(n): measure_calls(n) for n in given.documents},
        "planning, ms": {str(n): measure_planning(n, given) for n in given.ranks},
        "layers, ms": {str(n): measure_layers(n, given, "long tail") for n in given.ranks},
        "layers of one by one, ms": {
            str(n): measure_layers(n, given, "one by one") for n in given.ranks
        },
    }
    if given.before:
        result["calls and us, before and after"] = compare(
            given.before, given.documents, min(5, given.repeats)
        )
    output_result(given, result, show)


if __name__ == "__main__":
    main()
