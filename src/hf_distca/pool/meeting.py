"""How ranks that train and servers of a launch meet. Each server publishes its address and a token
in the store of the launch, which only processes of the launch can read. Rank 0 connects to all
servers, and invites them and the other ranks to a group.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Mapping
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch.distributed as dist

from hf_distca.borrowed import PrefixStore, Store, TCPStore, group_in_store
from hf_distca.errors import ConfigError, DistCADesyncError, make_printable
from hf_distca.pool.protocol import JsonLineConnection
from hf_distca.runtime.group import AttentionGroup

INVITATION = "invitation"  # key in the store


def join_store(seconds: float) -> Store:
    """Join the store at the launcher's address, where servers and ranks that train meet. Rank 0
    opens the store unless the launcher has done so. `seconds` is the timeout of the store.
    """
    environment = os.environ
    is_open = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        is_master=environment["RANK"] == "0" and not is_open,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=True,  # rank 0 may have opened it for its world
    )
    # A launcher may keep its store when it starts all processes again.
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"distca pool of attempt {attempt}", store)


def publish_server(store: Store, number: int, device_type: str) -> tuple[socket.socket, str]:
    """Open a socket for server `number`. Publish its address and a token in the store, where rank 0
    reads them. Return the socket and the token.
    """
    launcher = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with socket.create_connection(launcher) as connected:
        address = connected.getsockname()[0]  # other hosts can reach this address
    listening = socket.create_server((address, 0), backlog=16)
    token = secrets.token_hex(16)
    published = [*listening.getsockname()[:2], token, describe_process(device_type)]
    store.set(_make_key(number), json.dumps(published))
    return listening, token


def find_servers(
    store: Store, nodes: int, each_node: int, wait_seconds: float
) -> list[tuple[str, int, str, str]]:
    """Return what each server has published: its host, its port, its token, and the text of
    `describe_process`.

    Raises:
        ConfigError: if a server does not start within `wait_seconds`.
    """
    keys = [_make_key(number) for number in range(nodes * each_node)]
    try:
        store.wait(keys, timedelta(seconds=wait_seconds))
    except RuntimeError as error:
        missing = [n // each_node for n, key in enumerate(keys) if not store.check([key])]
        raise ConfigError(
            f"{len(missing)} of {len(keys)} servers did not start within {wait_seconds:g} s: look"
            f" at the log of the last {each_node} processes of node"
            f" {', '.join(map(str, dict.fromkeys(missing)))}, or raise --server-wait."
        ) from error
    return [json.loads(store.get(key)) for key in keys]


def connect_server(
    name: str, address: tuple[str, int], token: str, seconds: float
) -> JsonLineConnection:
    """Connect to a server, and send the token. The server may take up to `seconds` to read a
    message.

    Raises:
        ConfigError: if the server does not answer.
    """
    try:
        connection = JsonLineConnection(socket.create_connection(address, seconds), seconds)
        connection.send(token)
    except OSError as error:
        raise ConfigError(
            f"{name} does not answer ({error.strerror or error}): look at its log, and start the"
            " run again."
        ) from error
    return connection


def read_invitation(store: Store, seconds: float) -> dict[str, Any]:
    """Read rank 0's invitation to the group.

    Raises:
        ConfigError: if rank 0 has not found the servers.
        DistCADesyncError: if the invitation does not arrive in time.
    """
    try:
        store.wait([INVITATION], timedelta(seconds=seconds))
        invitation: dict[str, Any] = json.loads(store.get(INVITATION))
    except RuntimeError as error:
        raise DistCADesyncError(
            f"rank 0 did not name the servers within {seconds:g} s ({error}): look at the log of"
            " rank 0."
        ) from error
    if "error" in invitation:
        raise ConfigError(make_printable(invitation["error"]))
    return invitation


def join_group(invitation: Mapping[str, Any], store: Store, number: int) -> AttentionGroup:
    """Build the group to which rank 0 invites. `number` is the global rank of this process. Servers
    are numbered after the ranks that train. For errors see `AttentionGroup.create`.
    """
    ranks = tuple(invitation["ranks"])
    place = ranks, ranks.index(number)
    group = AttentionGroup(
        *place,
        has_tokens=tuple(invitation["has_tokens"]),
        timeout_seconds=invitation["seconds"],
    )

    def connect(timeout: timedelta) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        backend = invitation["backend"]
        return (
            group_in_store(place, store, backend, timeout, f"distca-data of {len(ranks)}"),
            group_in_store(place, store, "gloo", timeout, f"distca-control of {len(ranks)}"),
        )

    names = {int(server): name for server, name in invitation["names"].items()}
    return group.with_communicators(connect, names)


def describe_process(device_type: str) -> str:
    """Describe hf-distca's version and the device type. Both must be the same in all processes."""
    return f"hf-distca {version('hf-distca')} on {device_type}"


def _make_key(number: int) -> str:
    return f"server {number}"
