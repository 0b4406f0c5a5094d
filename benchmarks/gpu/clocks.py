"""Driver, clocks, power and temperature of the card, from nvidia-smi."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_FIELDS = {
    "driver": "driver_version",
    "clock": "clocks.sm",
    "largest clock": "clocks.max.sm",
    "memory clock": "clocks.mem",
    "power": "power.draw",
    "power limit": "power.limit",
    "temperature": "temperature.gpu",
}


def read_card() -> dict[str, str]:
    """Read the card's state once; return nothing if there is no nvidia-smi."""
    query = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS.values())}", "--format=csv,noheader"]
    try:
        line = subprocess.run(
            query, capture_output=True, text=True, timeout=10, check=True
        ).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return {}
    return dict(zip(_FIELDS, (value.strip() for value in line.split(",")), strict=True))


@contextmanager
def watching_clocks(period: float = 2.0) -> Iterator[list[int]]:
    """Record the multiprocessor clock in MHz every `period` seconds, in a list that grows while the
    block runs.
    """
    seen: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(period) and (card := read_card()):
            if card["clock"].split()[0].isdigit():
                seen.append(int(card["clock"].split()[0]))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()
