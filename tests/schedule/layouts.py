"""Random layouts: documents of all lengths, dealt to ranks whole, in consecutive parts, or head and tail."""

from __future__ import annotations

from hypothesis import strategies as st

from hf_distca.schedule.layout import Layout

Rows = list[list[tuple[int, int, int]]]


def deal(world_size: int, documents: list[tuple[int, int, int, str]]) -> Layout:
    """Deal (length, first rank, parts, way) rows; the parts of a document go to consecutive ranks."""
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
    return deal(world_size, draw(st.lists(document, max_size=24)))
