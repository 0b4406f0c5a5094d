"""Random layouts and plans, cost models, and the load of the plan for a layout."""

from __future__ import annotations

import itertools
from pathlib import Path

from hypothesis import strategies as st

from hf_distca.config import DistCAConfig
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import Ranks

SHAPE = AttentionShape(
    query_heads=32, key_value_heads=8, head_dim=128, value_head_dim=128, element_bytes=2
)
PAIRS = CostModel.make_of_pairs(SHAPE)
CPU = CostModel.make_analytic(SHAPE, device_type="cpu")
CUDA = CostModel.make_analytic(SHAPE, device_type="cuda")
# A micro-batch of long documents: a tile is small against the mean work of a rank.
LONG = [
    [65536],
    [4096] * 16,
    [1024] * 64,
    [32768, 16384, 8192, 8192],
    [65536],
    [512] * 128,
    [65535, 1],
    [3, 65533],
]
PLACEMENTS = Path(__file__).parents[2] / "benchmarks" / "placements"
SERIAL, PING_PONG = DistCAConfig(), DistCAConfig(ping_pong=True)
EQUAL_RANKS = Ranks()

Rows = list[list[tuple[int, int, int]]]


def make_load(
    layout: Layout, cost: CostModel, config: DistCAConfig = SERIAL, ranks: Ranks = EQUAL_RANKS
) -> PlanLoad:
    """Plan a layout, and compute the load; with ping-pong, compute hides exchanges."""
    plan = balance(layout, cost, config, ranks)
    return PlanLoad(plan, cost, overlapped=config.ping_pong, ranks=ranks)


def make_local_load(layout: Layout, cost: CostModel) -> PlanLoad:
    """Compute the load of the plan that moves nothing."""
    return PlanLoad(Plan.make_local(layout, cost.window), cost)


def deal(world_size: int, documents: list[tuple[int, int, int, str]]) -> Layout:
    """Put the parts of each (length, first rank, parts, way) document on consecutive ranks."""
    ranks: Rows = [[] for _ in range(world_size)]
    for number, (length, first, parts, way) in enumerate(documents):
        count = 2 * parts if way == "head and tail" else parts
        bounds = [length * i // count for i in range(count + 1)]
        for part in range(count):
            start, end = bounds[part], bounds[part + 1]
            place = count - 1 - part if part >= parts else part
            if start < end:
                ranks[(first + place) % world_size].append((number, start, end - start))
    return Layout.from_segments(ranks)


@st.composite
def layouts(draw: st.DrawFn, *, longest: int = 20_000, ranks: int = 9) -> Layout:
    world_size = draw(st.integers(1, ranks))
    document = st.tuples(
        st.one_of(st.integers(1, 300), st.integers(1, longest)),
        st.integers(0, world_size - 1),
        st.one_of(st.just(1), st.integers(1, world_size)),
        st.sampled_from(["in order", "head and tail"]),
    )
    layout = deal(world_size, draw(st.lists(document, max_size=24)))
    if not draw(st.booleans()):
        return layout
    ranks = [
        [tuple(segment) for segment in layout.list_segments(rank)] for rank in range(world_size)
    ]
    return Layout.from_segments(ranks, [draw(st.integers(0, min(2, len(rank)))) for rank in ranks])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Cut any layout into tasks on any servers, with any window or none."""
    layout = draw(layouts(longest=60, ranks=5))
    tasks = []
    for rank in range(layout.world_size):
        for segment in layout.list_segments(rank)[layout.context[rank] :]:
            cuts = draw(st.sets(st.integers(segment.start, segment.end), max_size=3))
            bounds = sorted({segment.start, segment.end} | cuts)
            for start, end in itertools.pairwise(bounds):
                tasks.append(
                    (
                        segment.document,
                        start,
                        end,
                        rank,
                        draw(st.integers(0, layout.world_size - 1)),
                    )
                )
    window = draw(st.one_of(st.none(), st.integers(1, 12), st.integers(1, 80)))
    return Plan.from_tasks(layout, draw(st.permutations(tasks)), window)
