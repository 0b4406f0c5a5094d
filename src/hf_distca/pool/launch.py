"""`LaunchPlace`: tells whether a process of a launch trains or serves. The last processes of each
node become servers, and the other processes form an ordinary world.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hf_distca.errors import ConfigError


class LaunchPlace(NamedTuple):
    """Place of a process in a launch in which the last processes of each node are servers.

    Attributes:
        node, local: index of the node, and index of the process on its node.
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
        """Read the place from the variables of torchrun and `accelerate launch`. Return
        None if neither launcher has started this process.

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
                f" ones are the last ({given}). Use torchrun or accelerate launch."
            )
        if servers >= per_node:
            raise ConfigError(
                f"servers={servers}, but a node has only {per_node} processes: no rank would train."
                " Start more processes, or fewer servers."
            )
        return cls(rank // per_node, local, world // per_node, per_node - servers, servers)

    @property
    def server(self) -> int | None:
        """Index of this server among the servers of all nodes; None for a rank that trains."""
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
