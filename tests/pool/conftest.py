from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

for room in ("engines", "models"):  # tests run cases of these folders with servers
    sys.path.append(str(Path(__file__).parents[1] / room))

if TYPE_CHECKING:
    from launches import Launch


@pytest.fixture(scope="module")
def launch() -> Iterator[Callable[[int, int], Launch]]:
    """Start one launch for each pair of counts, and another after a failure."""
    from launches import Launch

    launches: dict[tuple[int, int], Launch] = {}

    def start(trainers: int, servers: int) -> Launch:
        known = launches.get((trainers, servers))
        if known is None or not known.alive:
            if known is not None:
                known.close()
            known = launches[trainers, servers] = Launch(trainers, servers)
        return known

    yield start
    for known in launches.values():
        known.close()
