"""`accept`: how a server accepts rank 0 of its launch. Rank 0 greets each server with the server's
token, which only processes of the launch can read.
"""

from __future__ import annotations

import hmac
import socket
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread

from hf_distca.pool.protocol import JsonLineConnection

# Limits on the greeting that every client must send.
_HANDSHAKE_SECONDS = 5.0
_HANDSHAKE_BYTES = 1 << 16


def accept(listening: socket.socket, token: str, wait_seconds: float) -> JsonLineConnection | None:
    """Accept the connection of the client that sends the token. Close all other connections, even
    after this function has returned. A separate thread reads the greeting of each client, so that a
    silent client does not block the others.

    Args:
        listening: socket to which clients connect.
        token: greeting of rank 0.
        wait_seconds: longest time to wait for rank 0.

    Returns:
        The connection; None if rank 0 does not connect in time.
    """
    accepted = SimpleQueue[JsonLineConnection]()
    Thread(target=_ask_all, args=[listening, token, accepted], daemon=True).start()
    try:
        return accepted.get(timeout=wait_seconds)
    except Empty:
        return None


def _ask_all(
    listening: socket.socket, token: str, accepted: SimpleQueue[JsonLineConnection]
) -> None:
    """Read the greeting of every client, as long as the socket is open."""

    def ask(connection: JsonLineConnection) -> None:
        # A client that is not rank 0 may send anything, or close the connection.
        with suppress(EOFError, OSError, ValueError, RecursionError):
            greeting = connection.receive(_HANDSHAKE_SECONDS, _HANDSHAKE_BYTES)
            if hmac.compare_digest(str(greeting).encode(), token.encode()):
                accepted.put(connection)
                return
        connection.close()

    while listening.fileno() >= 0:
        with suppress(OSError):  # the socket was closed, or too many clients are connected
            connection = JsonLineConnection(listening.accept()[0], _HANDSHAKE_SECONDS)
            Thread(target=ask, args=[connection], daemon=True).start()
