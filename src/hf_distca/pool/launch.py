"""A launch of two kinds of processes: the last processes of each node become servers, and the
others form an ordinary world.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta
from ipaddress import ip_address
from typing import NamedTuple, NoReturn

from hf_distca.errors import ConfigError
from hf_distca.pool.addresses import read_token, store_key

# Keeps torch from printing C++ stack frames when rank 0 ends and closes all connections.
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}


class LaunchPlace(NamedTuple):
    """Place of a process in a launch in which the last processes of each node are servers.

    Attributes:
        node, local: number of the node, and of the process on it.
        nodes: number of nodes.
        trainers, servers: number of ranks that train, and number of servers, on each node.
    """

    node: int
    local: int
    nodes: int
    trainers: int
    servers: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], servers: int) -> LaunchPlace | None:
        """Read the place from the variables of torchrun and `accelerate launch`; None if neither
        has started this process.

        Args:
            environment: the variables.
            servers: number of servers on each node.

        Raises:
            ConfigError: if the launcher's variables do not tell which processes of a node are the
                last ones, or if no process would train.
        """
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        if "RANK" not in environment or "WORLD_SIZE" not in environment:
            return None
        try:
            rank, local, world, per_node = (int(environment[name]) for name in names)
        except (KeyError, ValueError):
            rank = local = world = per_node = 0
        if not per_node or world % per_node or rank % per_node != local:
            given = ", ".join(f"{name}={environment.get(name)}" for name in names)
            raise ConfigError(
                "servers are the last processes of each node, but this launcher does not tell which"
                f" ones are the last ({given}). Use torchrun or accelerate launch, or start servers"
                " with `hf-distca serve` and name them by --server-address."
            )
        if servers >= per_node:
            raise ConfigError(
                f"servers={servers}, but a node has only {per_node} processes: no rank would train."
                " Start more processes, or fewer servers."
            )
        return cls(rank // per_node, local, world // per_node, per_node - servers, servers)

    @property
    def server(self) -> int | None:
        """Number of this server among the servers of all nodes; None for a rank that trains."""
        number = self.local - self.trainers
        return None if number < 0 else self.node * self.servers + number

    def make_trainer_environment(self) -> dict[str, str]:
        """Return the variables that a launcher would give this process if there were no servers."""
        rank = str(self.node * self.trainers + self.local)
        size = str(self.nodes * self.trainers)
        return {
            "RANK": rank,
            "WORLD_SIZE": size,
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": str(self.trainers),
        }


def listen_at(host: str, port: int) -> socket.socket:
    """Open a socket that rank 0 can connect to.

    Raises:
        ConfigError: if no socket can listen at this address.
    """
    try:
        return socket.create_server((host, port), backlog=16)
    except OSError as error:
        raise ConfigError(
            f"a server cannot listen at {host}:{port}: {os.strerror(error.errno or 0)}."
            " Another server may listen there: give each server a separate address."
        ) from error


def serve_alone(listening: socket.socket, device: str | None, wait_seconds: float | None) -> int:
    """Run a server that was started separately, on the device with this name; see `serve`.

    Raises:
        ConfigError: if there is no such device.
    """
    os.environ |= QUIET
    import torch

    from hf_distca.pool.server import serve

    try:
        computing = torch.device(device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=computing)
    except (AssertionError, RuntimeError) as error:
        raise ConfigError(
            f"no server can compute on device {device!r}: {str(error).splitlines()[0]}"
        ) from error
    token = read_token()
    host, port = listening.getsockname()[:2]
    if not token and not ip_address(host).is_loopback:
        sys.stderr.write(
            f"hf-distca: server at {host}:{port} asks for no token, and serves the first client"
            " that connects. Set HF_DISTCA_POOL_TOKEN to the same secret text for this server and"
            " for the ranks that train.\n"
        )
    return serve(listening, token, computing, wait_seconds)


def serve_launched(number: int, attempt: str, wait_seconds: float, local: int) -> NoReturn:
    """Run the server with this number in a launch. It is process `local` of its node."""
    import torch

    from hf_distca.borrowed import TCPStore
    from hf_distca.pool.server import serve

    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    store = TCPStore(
        host, port, None, False, timedelta(seconds=wait_seconds), wait_for_workers=False
    )
    with socket.create_connection((host, port)) as connected:
        address = connected.getsockname()[0]  # other hosts can reach this address
    listening = listen_at(address, 0)
    # The token is published in the store, which only processes of the launch can read.
    token = secrets.token_hex(16)
    store.set(store_key(number, attempt), "{}:{} {}".format(*listening.getsockname()[:2], token))
    # accelerate uses the same rule to choose the device of the ranks that train.
    on_gpu = torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "false") != "true"
    device = torch.device(f"cuda:{local}" if on_gpu else "cpu")
    sys.exit(serve(listening, token, device, wait_seconds))
