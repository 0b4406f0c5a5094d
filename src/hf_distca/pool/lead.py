"""The side of the ranks that train: they find their servers, and rank 0 announces each step to
these.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import sys
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import version
from itertools import count
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist

from hf_distca.borrowed import PrefixStore, Store, TCPStore, store_of_world, timeout_of
from hf_distca.errors import ConfigError, DistCADesyncError, DistCAError
from hf_distca.pool.addresses import parse_address, store_key
from hf_distca.pool.words import JsonLineConnection
from hf_distca.runtime.group import AttentionGroup, Members, ServerNotifier
from hf_distca.runtime.members import PoolRanks

__all__ = ["PoolController", "Pool", "find_pool_ranks"]

_log = logging.getLogger("hf_distca")

_ALONE_SECONDS = 1800.0  # that ranks wait for each other, where torch.distributed does not say so
_ASK_SECONDS = 0.2  # between two attempts to reach a server
_ANSWER_SECONDS = 30.0  # that a server has to answer an invitation


@dataclass(eq=False)
class Pool:
    """The servers of a run, as seen by the ranks that train.

    Attributes:
        addresses: ``HOST:PORT`` of servers that were started by themselves.
        nodes, each_node: number of nodes of the launch, and of servers on each.
        attempt: number of the launch's attempt, as its launcher counts.
        wait_seconds: time that servers may take to appear.
        spare: whether training continues without a server that was told to end.
    """

    addresses: tuple[str, ...] = ()
    nodes: int = 0
    each_node: int = 0
    attempt: str = "0"
    wait_seconds: float = 300.0
    spare: bool = False
    _joined: tuple[object, AttentionGroup, PoolRanks] | None = field(default=None, init=False)

    def group(
        self, members: dist.ProcessGroup | Members | None, timeout_seconds: float | None
    ) -> AttentionGroup:
        """Return the group of the ranks of the world and the servers.

        All ranks must call it at the same point.

        Raises:
            ConfigError: on all ranks, if a server does not appear or cannot take part; names its
                address and a remedy.
            DistCADesyncError: if not all of them come in time.
        """
        if self.each_node and not self.nodes:
            raise ConfigError(
                f"servers={self.each_node}, and no launcher has started this process. Start it with"
                " torchrun or accelerate launch: the last processes are servers then. Or start"
                " servers with `hf-distca serve`, and name them by --server-address."
            )
        world = dist.GroupMember.WORLD if dist.is_available() and dist.is_initialized() else None
        if self._joined is not None and self._joined[0] is world and not self._joined[1].has_left:
            return self._joined[1]
        if world is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            return AttentionGroup()  # before ranks have met: this one is alone, as without servers
        if world is None:
            seconds, rank, ranks, backend = timeout_seconds or _ALONE_SECONDS, 0, 1, _lone_backend()
            store: Store = TCPStore(
                "0.0.0.0", 0, None, True, timedelta(seconds=seconds), wait_for_workers=False
            )
        else:
            seconds, rank, ranks = (
                timeout_seconds or timeout_of(world).total_seconds(),
                dist.get_rank(),
                dist.get_world_size(),
            )
            backend, store = (
                dist.get_backend(members if isinstance(members, dist.ProcessGroup) else None),
                store_of_world(),
            )
        lead = None
        if rank == 0:
            lead = PoolController(seconds)
            try:
                invitation = self._invite(lead, store, ranks, backend)
            except DistCAError as error:
                store.set(_INVITATION, json.dumps({"error": str(error)}))
                raise
            store.set(_INVITATION, json.dumps(invitation))
        else:
            invitation = _read_invitation(store, self.wait_seconds + seconds)
        return self._join(world, find_pool_ranks(invitation, store, rank), seconds, lead)

    def without(self, leaving: Sequence[int]) -> AttentionGroup:
        """Return the group of the others, once servers of these indices in it have left.

        All ranks must call it at the same point.
        """
        if self._joined is None:
            raise RuntimeError("servers leave a group that nobody has made")
        world, group, before = self._joined
        lead = None
        if group.lead is not None:
            names = [before.names[before.ranks[index]] for index in leaving]
            _log.warning("%s was told to end: training goes on without it", ", ".join(names))
            lead = group.lead.without(names)
            lead.notify_servers("regroup", {"leaving": leaving})
        return self._join(world, before.without(leaving), group.timeout_seconds, lead)

    def _join(
        self, world: object, all_seats: PoolRanks, seconds: float, lead: ServerNotifier | None
    ) -> AttentionGroup:
        group = AttentionGroup.with_servers(all_seats, seconds, lead)
        if isinstance(lead, PoolController):
            lead.group = group
        self._joined = world, group, all_seats
        return group

    def _invite(
        self, lead: PoolController, store: Store, ranks: int, backend: str
    ) -> dict[str, Any]:
        """Find the servers and tell each where to meet.

        Return the invitation for ranks that train.
        """
        deadline = time.monotonic() + self.wait_seconds
        addresses = [
            _published_address(store, number, self, deadline)
            for number in range(self.nodes * self.each_node)
        ]
        addresses += self.addresses
        if doubled := {address for address in addresses if addresses.count(address) > 1}:
            raise ConfigError(
                f"server {', '.join(sorted(doubled))} is named more than once: give each server an"
                " address of its own."
            )
        device = "cuda" if "nccl" in backend else "cpu"
        names = {
            number: f"rank {number} (server at {address})"
            for number, address in enumerate(addresses, start=ranks)
        }
        for name, address in zip(names.values(), addresses, strict=True):
            lead.servers[name] = lead.connect(address, device, deadline)
        placed = _order_members(ranks, self.nodes, self.each_node, len(addresses))
        invitation = {
            "ranks": placed,
            "holds": [rank < ranks for rank in placed],
            "names": names,
            "backend": backend,
            "meeting": f"distca pool {uuid.uuid4().hex}",
            "seconds": lead.seconds,
            "spare": self.spare,
        }
        host, port = _tcp_address(store)
        for number, words in enumerate(lead.servers.values(), start=ranks):
            words.send(
                {
                    **invitation,
                    "number": number,
                    "host": words.here if host in _ANYWHERE else host,
                    "port": port,
                }
            )
        as_sent: dict[str, Any] = json.loads(json.dumps(invitation))
        return as_sent


_INVITATION = "distca pool"
# Steps that begin something under a number: as long as it is known, the group that it is of is
# needed.
_UNDER_WAY = {"use_plan": "work", "begin_plans": "planning"}
# A store that listens on the host of rank 0.
_ANYWHERE = ("0.0.0.0", "127.0.0.1", "localhost", "::", "::1")


def find_pool_ranks(invitation: Mapping[str, Any], store: Store, rank: int) -> PoolRanks:
    """Return the seats of a group, for the process of this number."""
    ranks = tuple(invitation["ranks"])
    names = {int(number): name for number, name in invitation["names"].items()}
    meeting = PrefixStore(invitation["meeting"], _launch_store(store))
    return PoolRanks(
        ranks, tuple(invitation["holds"]), names, ranks.index(rank), invitation["backend"], meeting
    )


class PoolController:
    """Connection of rank 0 to all servers of a group, which announces each step to them.

    Args:
        seconds: how long a server may take to read a word.

    Attributes:
        servers: the connection to each server, by its name.
        group: the attention group, once it is made.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.servers = seconds, dict[str, JsonLineConnection]()
        self.group: AttentionGroup | None = None
        self._numbers, self._forgotten = count(1), deque[int]()
        self.under_way = set[int]()
        self._before: PoolController | None = None  # of the group that servers are leaving
        atexit.register(self.end)

    def connect(self, address: str, device: str, deadline: float) -> JsonLineConnection:
        """Connect to a server that computes on a device of this type.

        Raises:
            ConfigError: if it does not answer before the deadline, has another version or device,
                or serves another run.
        """
        host, port = parse_address(address)
        start = f"`hf-distca serve --address {address}`"
        while True:
            try:
                words = JsonLineConnection(
                    socket.create_connection((host, port), max(deadline - time.monotonic(), 1.0)),
                    self.seconds,
                )
                break
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise ConfigError(
                        f"no server answers at {address} ({error.strerror or error}). Start it with"
                        f" {start}, and give trainers an address that they can reach."
                    ) from error
                time.sleep(_ASK_SECONDS)
        try:
            words.send({"version": version("hf-distca"), "device": device})
            refusal = words.receive(_ANSWER_SECONDS)["error"]
        except (EOFError, OSError, ValueError, TypeError, LookupError) as error:
            raise ConfigError(
                f"what listens at {address} is no server of hf-distca, or has ended"
                f" ({type(error).__name__}). Start one with {start}, or name another address."
            ) from error
        if refusal is not None:
            raise ConfigError(f"the server at {address} cannot take part: {refusal}")
        return words

    def notify_servers(self, step: str, arguments: Mapping[str, Any]) -> None:
        """Announce a step to all servers, with the numbers of objects that are gone."""
        forgotten = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
        if step in _UNDER_WAY:
            self.under_way.add(arguments[_UNDER_WAY[step]])
        elif step == "finish_plans":
            self.under_way.discard(arguments["planning"])
        self.under_way.difference_update(forgotten)
        if self._before is not None:
            self._before.under_way.difference_update(forgotten)
            if not self._before.under_way:
                self._before.servers = {
                    name: words
                    for name, words in self._before.servers.items()
                    if name not in self.servers
                }
                self._before.end("training goes on without it")
                self._before = None
        for name, words in self.servers.items():
            try:
                words.send([step, arguments, forgotten])
            except OSError as error:
                raise self._lost(name, error) from error

    def number(self, known: object) -> int:
        """See `ServerNotifier.number`."""
        number = next(self._numbers)
        finalize(known, self._forgotten.append, number)  # at any time, in any thread
        return number

    def without(self, leaving: Sequence[str]) -> PoolController:
        """Return the lead of the other servers, once those of these names have left.

        This lead still announces all steps of work that has begun to all of them; leaving servers
        end when none of it is left.
        """
        after = PoolController(self.seconds)
        after.servers = {name: words for name, words in self.servers.items() if name not in leaving}
        after._numbers, after._forgotten, after._before = self._numbers, self._forgotten, self
        return after

    def end(self, why: str = "the run is over") -> None:
        """End the servers, and tell them why, or that this process failed."""
        # An exception that nobody caught.
        failed = self.group is None or self.group.has_left or hasattr(sys, "last_value")
        why = "the run failed, see the log of rank 0" if failed else why
        for words in self.servers.values():
            try:
                words.send(["end", {"why": why, "status": int(failed)}, []])
                words.close()
            except OSError:
                continue  # it has ended already
        self.servers.clear()

    def _lost(self, name: str, error: OSError) -> DistCAError:
        if self.group is None or self.group.monitor is None:
            return DistCADesyncError(
                f"{name} has ended ({error}): look at its log, and start it again."
            )
        return self.group.monitor.give_up(f"telling {name} what comes next", error)


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
            f"rank 0 did not say within {seconds:g} s which servers there are ({error})."
        ) from error
    if "error" in invitation:
        raise ConfigError(invitation["error"])
    return invitation


def _published_address(store: Store, number: int, pool: Pool, deadline: float) -> str:
    key = store_key(number, pool.attempt)
    while not _launch_store(store).check([key]):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"server {number} of {pool.nodes * pool.each_node} did not start within"
                f" {pool.wait_seconds:g} s: look at the log of the last {pool.each_node} processes"
                f" of node {number // pool.each_node}, or raise --server-wait."
            )
        time.sleep(_ASK_SECONDS)
    return str(_launch_store(store).get(key).decode())


def _launch_store(store: Store) -> Any:
    """Return the store of a launch, without the prefixes that a world has put around it."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store


def _tcp_address(store: Store) -> tuple[str, int]:
    tcp = _launch_store(store)
    if not isinstance(tcp, TCPStore):
        raise ConfigError(
            f"torch.distributed was started with a {type(tcp).__name__}, which servers cannot"
            " reach: start it over TCP, as torchrun and accelerate launch do."
        )
    return tcp.host, tcp.port


def _order_members(ranks: int, nodes: int, each_node: int, servers: int) -> list[int]:
    """Return the numbers of all members in the order of the group: node by node ranks
    that train and their servers, then other servers.
    """
    order: list[int] = []
    for node in range(nodes):
        first, last = (ranks * number // nodes for number in (node, node + 1))
        order += [
            *range(first, last),
            *range(ranks + node * each_node, ranks + (node + 1) * each_node),
        ]
    return order + [number for number in range(ranks + servers) if number not in order]


def _lone_backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"
