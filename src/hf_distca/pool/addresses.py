"""Addresses and tokens of servers: how users write them, and under which key the servers of a
launch publish them.
"""

from __future__ import annotations

import os

from hf_distca.errors import ConfigError


def parse_address(text: object) -> tuple[str, int]:
    """Split ``HOST:PORT`` into host and port.

    Raises:
        ConfigError: if the text does not have this form.
    """
    host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    if not host or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise ConfigError(f"{text!r} must be HOST:PORT, such as 10.0.0.7:29600.")
    return host.strip("[]"), int(port)


def store_key(number: int, attempt: str) -> str:
    """Return the key under which the server with this number publishes its address and token in the
    store of a launch.
    """
    return f"distca server {number} of attempt {attempt}"


def read_token() -> str:
    """Read the token for servers that were started separately; empty if they need no token."""
    return os.environ.get("HF_DISTCA_POOL_TOKEN", "")
