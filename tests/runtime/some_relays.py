"""Random relays."""

from __future__ import annotations

import random

import numpy as np

from hf_distca.schedule.plan import Plan, Relays
from hf_distca.schedule.relays import find_units


def draw_relays(random_: random.Random, plan: Plan) -> Relays | None:
    """Draw valid relays for some documents of a plan; return None if there are none."""
    per_node = random_.randint(1, plan.layout.world_size)
    keys = plan.list_key_transfers()
    units = find_units(plan.layout, keys.document, keys.server, per_node).tolist()
    needs: dict[tuple[int, int], dict[int, int]] = {}
    sources: dict[tuple[int, int], set[int]] = {}
    columns = (keys.document, keys.end, keys.source, keys.server)
    for unit, document, end, source, server in zip(
        units, *(column.tolist() for column in columns), strict=True
    ):
        need = needs.setdefault((document, unit), {})
        need[server] = max(need.get(server, 0), end)
        sources.setdefault((document, unit), set()).add(source)
    rows = []
    for (document, unit), need in sorted(needs.items()):
        held_by = sources[document, unit]
        if len(held_by) == 1 and held_by <= set(need):
            need[min(held_by)] = plan.layout.longest  # it holds all keys
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
    return Relays(*np.array(rows, dtype=np.int64).T, per_node) if rows else None
