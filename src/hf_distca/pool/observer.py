"""`PoolObserver`: finds the servers of a run, and announces steps to them."""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from hf_distca.borrowed import (
    PrefixStore,
    Store,
    TCPStore,
    get_timeout,
    group_in_store,
    store_of_world,
)
from hf_distca.errors import (
    ConfigError,
    DistCADesyncError,
    DistCAError,
    UnsupportedError,
    make_printable,
)
from hf_distca.pool.addresses import read_token, store_key
from hf_distca.pool.controller import ASK_SECONDS, PoolController, connect_server
from hf_distca.runtime.call import LayerExchange
from hf_distca.runtime.group import AttentionGroup, Phase, get_current_world
from hf_distca.runtime.members import Members

_log = logging.getLogger("hf_distca")

_ALONE_SECONDS = 1800.0  # timeout of a rank without torch.distributed


@dataclass(frozen=True, eq=False)
class PoolRanks:
    """Members of a group of training ranks and servers, as seen by one member.

    Attributes:
        ranks: number of each member, in the order of the group. The number of a member that trains
            is its global rank. Servers have the numbers after these.
        has_tokens: for each member, whether it trains.
        names: names of the servers in errors, by their numbers in `ranks`.
        rank: index of this process in `ranks`.
        backend: name of torch.distributed's backend for tensors.
        store: store that only the members use, to build the group.
    """

    ranks: tuple[int, ...]
    has_tokens: tuple[bool, ...]
    names: Mapping[int, str]
    rank: int
    backend: str
    store: Store

    @classmethod
    def read(cls, invitation: Mapping[str, Any], store: Store, number: int) -> PoolRanks:
        """Read the members from rank 0's invitation, for the process with this number."""
        ranks = tuple(invitation["ranks"])
        return cls(
            ranks,
            tuple(invitation["has_tokens"]),
            {int(server): name for server, name in invitation["names"].items()},
            ranks.index(number),
            invitation["backend"],
            PrefixStore(invitation["meeting"], _launch_store(store)),
        )

    def join(self, seconds: float) -> AttentionGroup:
        """Build the group of the members. Every member must call this, and waits up to `seconds`
        for the others. For errors see `AttentionGroup.create`.
        """
        group = AttentionGroup(
            self.ranks, self.rank, has_tokens=self.has_tokens, timeout_seconds=seconds
        )
        make = partial(group_in_store, (self.ranks, self.rank), self.store)

        def connect(timeout: timedelta) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
            return (
                make(self.backend, timeout, f"distca-data of {group.size}"),
                make("gloo", timeout, f"distca-control of {group.size}"),
            )

        return group.with_communicators(connect, self.names)


@dataclass(eq=False)
class PoolObserver:
    """The servers of a run, as seen by the ranks that train: a `GroupObserver`.

    Attributes:
        addresses: ``HOST:PORT`` of servers that were started separately.
        nodes, each_node: number of nodes of the launch, and number of servers on each node.
        attempt: number of times that the launcher has restarted the run.
        wait_seconds: time that servers may take to appear.
    """

    addresses: tuple[str, ...] = ()
    nodes: int = 0
    each_node: int = 0
    attempt: str = "0"
    wait_seconds: float = 300.0
    # On ranks other than 0, this controller has no connections to servers.
    controller: PoolController = field(default_factory=PoolController, init=False)
    _joined: tuple[object, AttentionGroup] | None = field(default=None, init=False)

    def take_step(self, step: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """See `GroupObserver.take_step`."""
        return self.controller.take_step(step, *args, **options)

    def enter_phase(
        self, call: LayerExchange, phase: Phase, dtype: torch.dtype | None = None
    ) -> None:
        """See `GroupObserver.enter_phase`."""
        self.controller.enter_phase(call, phase, dtype)

    def make_group(
        self,
        members: dist.ProcessGroup | Members | None,
        size: int | None,
        timeout_seconds: float | None,
    ) -> AttentionGroup:
        """Return the group of the ranks of the world and the servers.

        All ranks must call it at the same point.

        Raises:
            UnsupportedError: if the group would not have all ranks of the world.
            ConfigError: on all ranks, if a server does not appear or cannot take part. The error
                names the server's address and a remedy.
            DistCADesyncError: if a rank or a server does not come in time.
        """
        _check_members(members, size)
        if self.each_node and not self.nodes:
            raise ConfigError(
                f"servers={self.each_node}, but no launcher has started this process. Start it with"
                " torchrun or accelerate launch: the last processes of each node become servers. Or"
                " start servers with `hf-distca serve`, and name them by --server-address."
            )
        world = get_current_world()
        if self._joined is not None and self._joined[0] is world and not self._joined[1].has_left:
            return self._joined[1]
        if world is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            return AttentionGroup()  # each rank computes alone until all have met
        if world is None:
            seconds = timeout_seconds or _ALONE_SECONDS
            rank = 0
            ranks = 1
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            store = _make_store_alone(timedelta(seconds=seconds), launched=self.nodes > 0)
        else:
            seconds = timeout_seconds or get_timeout(world).total_seconds()
            rank = dist.get_rank()
            ranks = dist.get_world_size()
            backend = dist.get_backend(members if isinstance(members, dist.ProcessGroup) else None)
            store = store_of_world()
        self.controller = PoolController()
        if rank == 0:
            try:
                self._invite(store, seconds, ranks, backend)
            except DistCAError as error:
                store.set(_INVITATION, json.dumps({"error": str(error)}))
                raise
        invitation = _read_invitation(store, self.wait_seconds + seconds)
        group = PoolRanks.read(invitation, store, rank).join(seconds)
        self.controller.group = group
        self._joined = world, group
        return group

    def _invite(self, store: Store, seconds: float, ranks: int, backend: str) -> None:
        """Find the servers. Tell servers and ranks that train where to meet."""
        tcp = _launch_store(store)
        if not isinstance(tcp, TCPStore):
            raise ConfigError(
                f"torch.distributed was started with a {type(tcp).__name__}, which servers cannot"
                " reach: start it over TCP, as torchrun and accelerate launch do."
            )
        deadline = time.monotonic() + self.wait_seconds
        servers = self.controller.servers
        published = [
            *(
                self._find_published(store, number, deadline)
                for number in range(self.nodes * self.each_node)
            ),
            *((address, read_token()) for address in self.addresses),
        ]
        addresses = [address for address, _ in published]
        if doubled := {address for address in addresses if addresses.count(address) > 1}:
            raise ConfigError(
                f"server {', '.join(sorted(doubled))} is named more than once: give each server a"
                " separate address."
            )
        device = "cuda" if "nccl" in backend else "cpu"
        names = {
            number: f"rank {number} (server at {address})"
            for number, address in enumerate(addresses, start=ranks)
        }
        for name, (address, token) in zip(names.values(), published, strict=True):
            servers[name] = connect_server(address, token, device, deadline, seconds)
        placed = _order_members(ranks, self.nodes, self.each_node, len(addresses))
        invitation = {
            "ranks": placed,
            "has_tokens": [rank < ranks for rank in placed],
            "names": names,
            "backend": backend,
            "meeting": f"distca pool {uuid.uuid4().hex}",
            "seconds": seconds,
        }
        for number, connection in enumerate(servers.values(), start=ranks):
            connection.send(
                {
                    **invitation,
                    "number": number,
                    "host": connection.local_address if tcp.host in _ANYWHERE else tcp.host,
                    "port": tcp.port,
                }
            )
        store.set(_INVITATION, json.dumps(invitation))

    def _find_published(self, store: Store, number: int, deadline: float) -> tuple[str, str]:
        """Find the address and the token of a server of the launch."""
        key = store_key(number, self.attempt)
        while not _launch_store(store).check([key]):
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"server {number} of {self.nodes * self.each_node} did not start within"
                    f" {self.wait_seconds:g} s: look at the log of the last {self.each_node}"
                    f" processes of node {number // self.each_node}, or raise --server-wait."
                )
            time.sleep(ASK_SECONDS)
        address, token = _launch_store(store).get(key).decode().split()
        return address, token


_INVITATION = "distca pool"
# A store whose host has one of these names is on the host of rank 0.
_ANYWHERE = ("0.0.0.0", "127.0.0.1", "localhost", "::", "::1")


def _read_invitation(store: Store, seconds: float) -> dict[str, Any]:
    """Read rank 0's invitation to the group.

    Raises:
        ConfigError: if rank 0 has not found the servers.
    """
    try:
        store.wait([_INVITATION], timedelta(seconds=seconds))
        invitation: dict[str, Any] = json.loads(store.get(_INVITATION))
    except RuntimeError as error:
        raise DistCADesyncError(
            f"rank 0 did not name the servers within {seconds:g} s ({error}): look at its log."
        ) from error
    if "error" in invitation:
        raise ConfigError(make_printable(invitation["error"]))
    return invitation


def _make_store_alone(timeout: timedelta, *, launched: bool) -> Store:
    """Return a store for a single rank that trains without a process group. It is the store of the
    rank's launch, in which servers publish their addresses. Without a launch, it is a new store.
    """
    if launched:
        store: Store
        store, *_ = next(iter(rendezvous("env://", timeout=timeout)))
        return store
    return TCPStore("0.0.0.0", 0, None, True, timeout, wait_for_workers=False)


def _check_members(members: dist.ProcessGroup | Members | None, size: int | None) -> None:
    """Check that all ranks will be in one group with the servers.

    Raises:
        UnsupportedError: if a group would have fewer ranks; names their number.
    """
    world = tuple(
        range(dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1)
    )
    if isinstance(members, dist.ProcessGroup):
        members = Members.from_group(members)
    ranks = world if members is None else members.ranks
    if size is not None or tuple(sorted(ranks)) != world:
        raise UnsupportedError(
            f"with servers, all {len(world)} ranks must be one attention group, but groups have"
            f" {size or len(ranks)} ranks. Train without servers, or without group_size, tensor"
            " parallelism and pipeline stages."
        )


def _launch_store(store: Store) -> Any:
    """Return the store of a launch, without the wrappers that add prefixes to its keys."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store


def _order_members(ranks: int, nodes: int, each_node: int, servers: int) -> list[int]:
    """Return the numbers of all members in the order of the group: for each node, its ranks that
    train and then its servers; after all nodes, the servers that were started separately.
    """
    node_of = [rank * nodes // ranks for rank in range(ranks)]
    node_of += [min(server // max(each_node, 1), nodes) for server in range(servers)]
    return sorted(range(ranks + servers), key=node_of.__getitem__)
