"""Relays chosen at random."""

from __future__ import annotations

import random

import numpy as np

from hf_distca.schedule.plan import Plan, Relays


def some_relays(random_: random.Random, plan: Plan) -> Relays | None:
    """Any relays that a plan may have, for some of its documents."""
    needs: dict[int, dict[int, int]] = {}
    sources: dict[int, set[int]] = {}
    for document, _, end, source, server in zip(
        *(column.tolist() for column in plan.list_key_transfers()), strict=True
    ):
        needs.setdefault(document, {})[server] = max(needs.get(document, {}).get(server, 0), end)
        sources.setdefault(document, set()).add(source)
    rows = []
    for document, need in sorted(needs.items()):
        if len(sources[document]) == 1:
            need[min(sources[document])] = plan.layout.longest  # it holds them all
        shared = sorted(need.values())[-2] if len(need) > 1 else 0
        able = sorted(
            random_.sample(sorted(need), random_.randint(1, len(need))), key=lambda rank: need[rank]
        )
        start = 0
        for rank in able:
            end = min(random_.randint(start, max(start, shared)), need[rank], shared)
            if end > start and random_.random() < 0.8:
                rows.append((document, start, end, rank))
                start = end
    return Relays(*np.array(rows, dtype=np.int64).T) if rows else None
