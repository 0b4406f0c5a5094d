"""How a server accepts rank 0 of a run. Each client sends a greeting, and the server accepts the
first rank 0 that it can serve.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import version
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import Any

import torch

from hf_distca.pool.protocol import JsonLineConnection

# Limits on the greeting that every client must send.
_HANDSHAKE_SECONDS = 5.0
_HANDSHAKE_BYTES = 1 << 16
_TAKEN = "it serves the ranks of another run. Start a separate server for each run."


def accept(
    listening: socket.socket, find_refusal: Callable[[Any], str | None], wait_seconds: float | None
) -> JsonLineConnection | None:
    """Accept the connection of the first rank 0 that this server can serve. All other clients are
    refused, now and later. Each client is asked in a separate thread, so that a silent client does
    not block the others.

    Args:
        listening: socket to which clients connect.
        find_refusal: returns the reason to refuse a greeting, None to accept it.
        wait_seconds: time that rank 0 may take; None for no limit.

    Returns:
        The connection; None if no such rank 0 comes in time.
    """
    accepted = SimpleQueue[JsonLineConnection]()
    Thread(target=_ask_all, args=[listening, find_refusal, accepted], daemon=True).start()
    try:
        return accepted.get(timeout=wait_seconds)
    except Empty:
        return None


def _ask_all(
    listening: socket.socket,
    find_refusal: Callable[[Any], str | None],
    accepted: SimpleQueue[JsonLineConnection],
) -> None:
    """Read and answer the greeting of every client, as long as the socket is open."""
    deciding, is_taken = Lock(), Event()

    def ask(connection: JsonLineConnection) -> None:
        # A client that is not a rank 0 may send anything, or close the connection.
        with suppress(EOFError, OSError, ValueError, RecursionError, TypeError, AttributeError):
            greeting = connection.receive(_HANDSHAKE_SECONDS, _HANDSHAKE_BYTES)
            with deciding:
                refusal = _TAKEN if is_taken.is_set() else find_refusal(greeting)
                connection.send({"error": refusal})
                if refusal is None:
                    is_taken.set()
                    accepted.put(connection)
                    return
        connection.close()

    while listening.fileno() >= 0:
        with suppress(OSError):  # the socket was closed, or too many clients are connected
            connection = JsonLineConnection(listening.accept()[0], _HANDSHAKE_SECONDS)
            Thread(target=ask, args=[connection], daemon=True).start()


def find_refusal(
    token: str, device: torch.device, log: Callable[[str], None], greeting: Mapping[str, Any]
) -> str | None:
    """Return the reason why this server cannot serve the client that sent this greeting; None if it
    can serve the client.
    """
    ours, theirs = version("hf-distca"), greeting.get("version")
    wanted = greeting.get("device")
    conditions = (
        (
            hmac.compare_digest(str(greeting.get("token", "")).encode(), token.encode()),
            "it asks for another token. Set HF_DISTCA_POOL_TOKEN to the same text for this server"
            " and for the ranks that train.",
        ),
        (
            theirs == ours,
            f"it runs hf-distca {ours}, but rank 0 runs {theirs}. Install one version everywhere.",
        ),
        (
            wanted == device.type,
            f"it computes on {device.type}, but rank 0 computes on {wanted}. Start it with --device"
            f" {wanted}.",
        ),
    )
    why = next((text for is_met, text in conditions if not is_met), None)
    if why is not None:
        log(f"turned ranks away: {why}")
    return why
