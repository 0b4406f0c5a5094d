"""The protocol between ranks that train and their servers, outside of torch.distributed.

Rank 0 has a connection to every server. It announces each step that servers take part in, just
before it takes the step itself. So servers make the same plans and launch the same exchanges in the
same order. Messages are JSON, so that nothing that arrives is executed or unpickled. Tensors and
plans are not sent this way.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from functools import partial
from typing import Any

import numpy as np
import torch

from hf_distca.agreement.announce import PlanKey, Request
from hf_distca.agreement.dealt_share import DealtShare
from hf_distca.agreement.documents import Documents
from hf_distca.config import DistCAConfig, is_built_in
from hf_distca.errors import ConfigError
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.layout import Layout

_SOCKET_OPTIONS = {
    (socket.IPPROTO_TCP, socket.TCP_NODELAY): 1,
    # These options detect a lost node. TCP probes a silent connection every 10 s, and
    # closes it after 6 probes without an answer.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 10,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 10,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 6,
}
_PART_BYTES = 1 << 16
_MESSAGE_BYTES = 1 << 28  # enough for a share, which lists a whole global batch
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}


class JsonLineConnection:
    """A connection that carries messages in both directions. Each message is one line.

    Args:
        connected: the socket, which belongs to this object from now on.
        seconds: time that the other side may take to read a message.
    """

    def __init__(self, connected: socket.socket, seconds: float) -> None:
        for (level, option), value in _SOCKET_OPTIONS.items():
            connected.setsockopt(level, option, value)
        self._socket = connected
        self._seconds = seconds
        self._received = bytearray()

    def send(self, message: Any) -> None:
        """Send a message. Raise `OSError` if the other side has ended or does not read it."""
        self._socket.settimeout(self._seconds)
        self._socket.sendall(json.dumps(message, default=_encode).encode() + b"\n")

    def receive(self, seconds: float, most_bytes: int = _MESSAGE_BYTES) -> Any:
        """Return the next message. Wait up to `seconds` for all of it.

        Raises:
            TimeoutError: if the message does not arrive in time.
            EOFError, OSError: if the other side has ended.
            ValueError: if the message is not JSON, or has more than about `most_bytes`.
        """
        deadline = time.monotonic() + seconds
        read = 0
        while (end := self._received.find(b"\n", read)) < 0:
            read = len(self._received)
            if read > most_bytes:
                raise ValueError(
                    f"{read} bytes arrived without the end of a message, but the limit is"
                    f" {most_bytes}"
                )
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError(f"no message arrived within {seconds:g} s")
            self._socket.settimeout(left)
            self._received += self._socket.recv(_PART_BYTES)
            if len(self._received) == read:
                raise EOFError("the other side has ended")
        line = self._received[:end]
        del self._received[: end + 1]
        return json.loads(line)

    def wait_for_end(self) -> None:
        """Wait until the other side has ended. This reads no message, so it may run in a second
        thread.
        """
        waiting = select.poll()
        # A system without POLLRDHUP reports the end of a connection only if both sides have ended.
        waiting.register(self._socket, getattr(select, "POLLRDHUP", 0))
        waiting.poll()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def _encode(value: Any) -> Any:
    """Encode values of types that JSON does not support."""
    match value:
        case torch.Tensor():
            return value.dtype
        case torch.dtype():
            return str(value).removeprefix("torch.")
        case np.ndarray():
            return value.tolist()
        case AttentionShape():
            return astuple(value)
        case DistCAConfig():
            return {field.name: getattr(value, field.name) for field in fields(value)}
        case CostModel():
            return {"text": value.to_json()}
        case Documents():
            return value.span_ranks
        case DealtShare():
            return {
                "batch": value.batch_id,
                "documents": value.digest,
                "layouts": [
                    (layout.document, layout.start, layout.length, layout.offsets)
                    for layout in value.layouts
                ],
            }
    raise TypeError(f"{value!r} cannot be sent in a message")


def read_dtype(name: str) -> torch.dtype:
    """Read a dtype. Raise `ValueError` if attention does not compute in this dtype."""
    if name not in _DTYPES:
        raise ValueError(f"attention computes in {', '.join(_DTYPES)}, but not in {name!r}")
    return _DTYPES[name]


def read_config(values: Mapping[str, Any]) -> DistCAConfig:
    """Read settings.

    Raises:
        ConfigError: if a setting is out of range, or if the cost model is the name of a file.
    """
    costs = values["cost_model"]
    if isinstance(costs, Mapping):
        costs = CostModel.from_json(costs["text"])
    elif not is_built_in(costs):  # such as the name of a file
        raise ConfigError(
            f"cost_model={costs!r:.80} must be 'analytic' or a cost model, and not a path."
        )
    return DistCAConfig(**{**values, "cost_model": costs})


def read_key(values: Sequence[Any]) -> PlanKey:
    """Read the key of a plan."""
    shape, *rest = values
    return PlanKey(AttentionShape(*shape), *rest)


def read_requests(requests: Sequence[Any]) -> list[Request]:
    """Read requests for plans. Their documents are empty, because servers have no tokens."""
    none = np.zeros((0, 3), dtype=np.int64)
    return [(Documents(none, span_ranks=spans), read_key(key)) for spans, key in requests]


def read_share(share: Mapping[str, Any]) -> DealtShare:
    """Read the share of a dealt batch that a rank without tokens has."""
    numbers = partial(np.array, dtype=np.int64)
    return DealtShare(
        tuple(share["batch"]),
        -1,
        tuple(
            Layout(numbers(document), numbers(start), numbers(length), numbers(offsets))
            for document, start, length, offsets in share["layouts"]
        ),
        share["documents"],
    )
