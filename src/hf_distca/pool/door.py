"""The door of a server: whoever connects tells what it wants, and a rank 0 that can be served is
let in.
"""

from __future__ import annotations

import hmac
import math
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import version
from multiprocessing.connection import wait
from typing import Any

import torch

from hf_distca.pool.words import JsonLineConnection

# That whoever connects has to tell what it wants.
_HANDSHAKE_SECONDS = 5.0
_HANDSHAKE_BYTES = 1 << 16
_LOOK_SECONDS = 1.0  # between two looks at who has been silent for too long
_GLANCE_SECONDS = 0.01  # to read what has arrived
_MOST_ASKING = 256  # connections at a time that have not told what they want


def accept(
    listening: socket.socket, why_not: Callable[[Any], str | None], wait_seconds: float | None
) -> JsonLineConnection | None:
    """Accept the connection of a rank 0 that this server can serve, among those of strangers and
    those that `why_not` gives a reason to refuse. Nobody waits for another who is silent.

    Returns:
        The connection; None if no such rank 0 comes in time.
    """
    deadline = math.inf if wait_seconds is None else time.monotonic() + wait_seconds
    listening.settimeout(_GLANCE_SECONDS)  # who has connected may have ended already
    asking = dict[JsonLineConnection, float]()  # until when each may tell what it wants
    accepted = None
    while accepted is None:
        if (left := deadline - time.monotonic()) <= 0:
            return None
        sources: list[Any] = [listening, *asking]
        ready: list[Any] = wait(sources, min(left, _LOOK_SECONDS))
        if listening in ready:
            with suppress(TimeoutError):
                words = JsonLineConnection(listening.accept()[0], _HANDSHAKE_SECONDS)
                asking[words] = time.monotonic() + _HANDSHAKE_SECONDS
        for words in [words for words in asking if words in ready]:
            is_served = _answer(words, why_not if accepted is None else refuse)
            if is_served:
                accepted = words
            if is_served is not None:
                del asking[words]
        _close_overdue(asking, everyone=accepted is not None)
    return accepted


def _answer(words: JsonLineConnection, why_not: Callable[[Any], str | None]) -> bool | None:
    """Answer who has connected. Return whether it is served, or None if it has not told what it
    wants.
    """
    try:
        error = why_not(words.receive(_GLANCE_SECONDS, _HANDSHAKE_BYTES))
        words.send({"error": error})
    except TimeoutError:
        return None
    except (EOFError, OSError, ValueError, RecursionError, TypeError, AttributeError):
        error = "a stranger"
    if error is not None:
        words.close()
    return error is None


def _close_overdue(asking: dict[JsonLineConnection, float], *, everyone: bool) -> None:
    """Close the connections whose time is over, and those that came first if there are too many."""
    now, excess = time.monotonic(), len(asking) - _MOST_ASKING
    for number, (words, end) in enumerate(tuple(asking.items())):
        if everyone or end <= now or number < excess:
            del asking[words]
            words.close()


def find_refusal(
    token: str, device: torch.device, say: Callable[[str], None], asked: Mapping[str, Any]
) -> str | None:
    """Return why this server cannot serve a client that sent this greeting; None if it can."""
    here = version("hf-distca")
    there = asked.get("version")
    wanted = asked.get("device")
    conditions = (
        (
            hmac.compare_digest(str(asked.get("token", "")).encode(), token.encode()),
            "it asks for another token. Set HF_DISTCA_POOL_TOKEN to the same where this server and"
            " where the ranks that train are started.",
        ),
        (
            there == here,
            f"it runs hf-distca {here}, and rank 0 {there}. Install one version everywhere.",
        ),
        (
            wanted == device.type,
            f"it computes on {device.type}, and rank 0 on {wanted}. Start it with --device"
            f" {wanted}.",
        ),
    )
    why = next((text for is_met, text in conditions if not is_met), None)
    if why is not None:
        say(f"turned ranks away: {why}")
    return why


def refuse(_asked: object) -> str:
    """Return why a server that is taken refuses all further connections."""
    return "it serves the ranks of another run. Start a separate server for each run."
