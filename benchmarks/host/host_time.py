"""Host time that core attention takes besides its kernels: an exchange and planning by number of
ranks, and a layer on one rank.

    python benchmarks/host/host_time.py --json results.json

All times are processor time of the one thread that works, so that other programs do not count:
medians.

*Layers*: forward and backward of one call of core attention on one rank of N, dispatch and return
both ways, without ping-pong. The plan is a real one for all ranks, and the route that rank's. What
is not bookkeeping is kept small: rows are 2 bytes wide, the kernel returns zeros, and messages
arrive at once and are never sent. Typical ranks are evenly spaced among all; the busiest one
exchanges with the most others. *One by one* has a document as long as the batch on every eighth
rank and short ones elsewhere, which is more exchange than documents of a corpus make.

*Planning*: what every rank does for a plan besides the balancing itself, from all announcements to
the route. No collectives.

*Alone*: what `distca` takes in a layer on one rank beyond `sdpa`, forward and backward, both
without their kernels, which are replaced by ones that only make tensors of the right shapes. The
time of making them is taken off, and for sdpa that of a run of autograd, too, so that distca is
charged a little too much. sdpa gets one sequence of as many tokens. Times with the real kernels are
beside it: how many documents there are shows in distca's kernel.

The *first layer* of a micro-batch makes the plan besides.

*Calls*: Python calls, of functions and built-in ones, that one more layer adds to a step of a small
Llama on one rank, forward and backward, and those that a step of one layer has beyond that: with
distca, with a bare call of torch's attention, and the difference. They do not depend on the machine
(`host_calls.py`).

With `--before FOLDER`, a checkout of an earlier commit, calls and microseconds of the same steps
are shown of both, measured in turns in processes of their own. These times have the kernels in
them.
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
from script import add_option, make_parser, print_table, put_out

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
    """In the place of torch's function: as `Zeros`."""

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
    """A channel whose messages arrive at once; what they hold was there before."""

    is_gloo = False

    def start(self, *_: Any) -> Nowhere:
        return self

    def wait(self) -> None:
        pass


def documents(ranks: int, tokens: int, kind: str) -> list[list[int]]:
    """Lengths of each rank's documents: long-tailed ones cut where a rank is full; or long and
    short ones by rank.
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


def median_ms(run: Callable[[], object], repeats: int) -> float:
    """Milliseconds of a run; the first one does not count."""
    run()
    seconds = []
    for _ in range(repeats):
        started = time.thread_time()
        run()
        seconds.append(time.thread_time() - started)
    return statistics.median(seconds) * 1e3


def peers(plan: Plan) -> np.ndarray[Any, Any]:
    """How many others each rank exchanges queries with."""
    pairs = np.unique(np.stack([plan.home, plan.server])[:, plan.home != plan.server], axis=1)
    return np.bincount(pairs.reshape(-1), minlength=plan.layout.world_size)


def layer(plan: Plan, rank: int) -> Callable[[], object]:
    """Forward and backward of a layer on a rank."""
    route, rows = Route.build(plan, rank), int(plan.layout.query_tokens[rank])
    group = AttentionGroup(tuple(range(plan.layout.world_size)), rank, Nowhere())  # type: ignore[arg-type]
    server = AttentionServer(ZEROS, ScoreOptions(1.0), Meter())  # type: ignore[arg-type]
    heads = plan.layout.groups  # of a document that is split by heads, every group has one
    leaves = [
        torch.zeros(rows, heads, WIDTH, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]
    do_THV = torch.zeros_like(leaves[0])
    return lambda: torch.autograd.grad(
        compute_core_attention(Inputs(*leaves), LayerExchange(route, group, server)), leaves, do_THV
    )


def layers(ranks: int, arguments: argparse.Namespace, kind: str) -> dict[str, Any]:
    plan = balance(
        Layout.from_lengths(documents(ranks, arguments.tokens, kind)), COST, DistCAConfig()
    )
    others = peers(plan)
    chosen = np.linspace(0, ranks - 1, min(arguments.sample, ranks), dtype=int).tolist()
    typical = [median_ms(layer(plan, rank), arguments.repeats) for rank in chosen]
    busiest = int(others.argmax())
    return {
        "typical_ms": statistics.median(typical),
        "slowest_typical_ms": max(typical),
        "typical_peers": float(np.median(others)),
        "busiest_ms": median_ms(layer(plan, busiest), arguments.repeats),
        "busiest_peers": int(others[busiest]),
    }


def planning(ranks: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of each step, and of all."""
    config, key = DistCAConfig(), PlanKey(LLAMA_3_8B, "cuda")
    facts, group = collect_shared_settings(config, (COST,)), AttentionGroup(tuple(range(ranks)))
    rows = []
    for lengths in documents(ranks, arguments.tokens, "long tail"):
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
    found = {name: median_ms(run, arguments.repeats) for name, run in steps.items()}
    return {**found, "all": sum(found.values())}


def backward_too(
    run: Callable[..., torch.Tensor], leaves: list[torch.Tensor]
) -> Callable[[], object]:
    """The run, and its backward."""

    def both() -> None:
        out = run(*leaves)
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    return both


class Switch(Session):
    """A session whose kernel can be replaced by one that computes nothing; it is looked for all the
    same.
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


def alone(count: int, tokens: int, repeats: int, session: Switch) -> dict[str, float]:
    """Microseconds of a layer with so many documents."""
    module = LlamaAttention(ALONE, 0).train()
    # As projections leave them: heads of a token side by side.
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

    both, sdpa_both = backward_too(distca, leaves), backward_too(sdpa, leaves)
    runs: dict[str, Callable[[], object]] = {
        "distca": both,
        "its kernel": partial(kernel, real),
        "distca without kernel": partial(without_kernel, both),
        "its forward": partial(without_kernel, lambda: distca(*leaves)),
        "first layer without kernel": partial(without_kernel, backward_too(first, leaves)),
        "zeros": partial(kernel, ZEROS),
        "sdpa": sdpa_both,
        "sdpa without kernel": sdpa_without_kernel,
        "zeros of a function": backward_too(zeros_function, leaves),
    }
    found = in_rounds(runs, repeats)
    # The run of autograd counts for distca alone: that of sdpa goes with the function that is taken
    # off.
    ours, theirs = (
        found["distca without kernel"] - found["zeros"],
        found["sdpa without kernel"] - found["zeros of a function"],
    )
    return {**found, "beyond sdpa": ours - theirs}


def in_rounds(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median microseconds of each of several runs. In a round each runs several times, so that its
    code and data are in cache.
    """
    milliseconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(5):
        for name, run in runs.items():
            milliseconds[name].append(median_ms(run, repeats))
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
    add_option(parser, "--sample", 15, "typical ranks that are measured")
    add_option(parser, "--repeats", 20, "of each measurement; the median counts")
    add_option(parser, "--documents", [1, 8, 64, 512], "documents of the layer on one rank")
    add_option(parser, "--tokens-alone", 512, "tokens of the layer on one rank")
    text = "checkout of an earlier commit, to be measured as well"
    parser.add_argument("--before", type=Path, metavar="FOLDER", help=text)
    given = parser.parse_args()
    torch.set_num_threads(1)
    session = Switch(DistCAConfig())
    result: dict[str, Any] = {
        "alone, us": {
            str(n): alone(n, given.tokens_alone, given.repeats, session) for n in given.documents
        },
        "calls": {str(n): measure_calls(n) for n in given.documents},
        "planning, ms": {str(n): planning(n, given) for n in given.ranks},
        "layers, ms": {str(n): layers(n, given, "long tail") for n in given.ranks},
        "layers of one by one, ms": {str(n): layers(n, given, "one by one") for n in given.ranks},
    }
    if given.before:
        result["calls and us, before and after"] = compare(
            given.before, given.documents, min(5, given.repeats)
        )
    put_out(given, result, show)


if __name__ == "__main__":
    main()
