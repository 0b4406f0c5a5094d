"""`PoolObserver`: finds the servers of a run, and tells them about each step that ranks take
together. Rank 0 announces a step right before it takes the step itself. Other ranks announce
nothing.

The steps are calls of functions that are marked by `mark_joint_step`. For each of these functions,
`Server` has a method with the same name and arguments. An object that servers know is sent as its
name, and a tensor as its dtype. Groups and devices are not sent, because servers have their own.
Documents are not sent, because servers have none.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from inspect import signature
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist

from hf_distca.agreement.documents import Documents
from hf_distca.agreement.planner import Planner
from hf_distca.borrowed import Store, get_timeout
from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError, DistCADesyncError, DistCAError, UnsupportedError
from hf_distca.import_hooks import call_at_exit
from hf_distca.integration.handle import LayerPlan
from hf_distca.pool.meeting import (
    INVITATION,
    connect_server,
    describe_process,
    find_servers,
    join_group,
    join_store,
    read_invitation,
)
from hf_distca.pool.protocol import JsonLineConnection
from hf_distca.runtime.call import LayerExchange
from hf_distca.runtime.group import AttentionGroup, Phase, get_current_world
from hf_distca.runtime.members import Members

_ALONE_SECONDS = 1800.0  # timeout of a rank without torch.distributed


class PoolObserver:
    """The servers of a run, as seen by a rank that trains: a `GroupObserver`.

    Sessions and results of steps have names, by which later steps refer to them. When this rank
    drops a session or a result, servers drop theirs with the same name.

    Attributes:
        nodes, each_node: number of nodes of the launch, and number of servers on each node. `nodes`
            is 0 if no launcher has started this process.
        wait_seconds: time that servers may take to start.
        servers: on rank 0, the connection to each server, by the server's name.
        group: the attention group; until it is made, a group of this rank alone.
    """

    def __init__(self, nodes: int, each_node: int, wait_seconds: float = 300.0) -> None:
        self.nodes, self.each_node = nodes, each_node
        self.wait_seconds = wait_seconds
        self.servers: dict[str, JsonLineConnection] = {}
        self.group = AttentionGroup()
        self._world: dist.ProcessGroup | None = None  # the world when `group` was made
        self._count = count(1)
        self._forgotten = deque[str]()
        self._names = dict[int, str]()  # names, by the id of the named object
        self._configs = WeakKeyDictionary[Planner, DistCAConfig]()  # the settings that servers have
        call_at_exit(self.end)

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
            ConfigError: on all ranks, if a server does not start or cannot take part.
            DistCADesyncError: if a rank or a server does not come in time.
        """
        _check_members(members, size)
        if not self.nodes:
            raise ConfigError(
                f"servers={self.each_node}, but no launcher has started this process. Start it with"
                " torchrun or accelerate launch: the last processes of each node become servers."
            )
        world = get_current_world()
        if self.group.monitor is not None:
            if self._world is world and not self.group.has_left:
                return self.group
            raise ConfigError(
                "servers take part only in the first process group of a run, and this group has"
                " ended: start the run again."
            )
        if world is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            return AttentionGroup()  # each rank computes alone until all have met
        if world is None:
            seconds = timeout_seconds or _ALONE_SECONDS
            rank = 0
            ranks = 1
            backend = "nccl" if torch.cuda.is_available() else "gloo"
        else:
            seconds = timeout_seconds or get_timeout(world).total_seconds()
            rank = dist.get_rank()
            ranks = dist.get_world_size()
            backend = dist.get_backend(members if isinstance(members, dist.ProcessGroup) else None)
        store = join_store(seconds)
        if rank == 0:
            try:
                self._invite(store, seconds, ranks, backend)
            except DistCAError as error:
                store.set(INVITATION, json.dumps({"error": str(error)}))
                raise
        invitation = read_invitation(store, self.wait_seconds + seconds)
        self.group = join_group(invitation, store, rank)
        self._world = world
        return self.group

    def take_step(self, step: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """See `GroupObserver.take_step`."""
        given = signature(step).bind(*args, **options).arguments
        group = given["group"]
        if (owner := given.pop("self", None)) is not None:
            given["session"] = self._name_session(getattr(owner, "planner", owner), group)
        arguments = {
            name: self._names.get(id(value), value)
            for name, value in given.items()
            if not isinstance(value, AttentionGroup | torch.device | Documents)
        }
        serial = next(self._count)
        self.announce(group, step.__name__, arguments, serial)
        result = step(*args, **options)
        # The name of a layer plan belongs to its route, because layers call attention with the
        # route. Servers then keep the layer plan until this rank drops the route.
        known = result.route if isinstance(result, LayerPlan) else result
        for number, named in enumerate(known if isinstance(known, list) else [known]):
            self._name(named, f"{serial}.{number}")
        return result

    def enter_phase(
        self, call: LayerExchange, phase: Phase, dtype: torch.dtype | None = None
    ) -> None:
        """See `GroupObserver.enter_phase`."""
        arguments: dict[str, Any] = {"call": id(call)}
        if phase == "begin":
            arguments |= {
                "work": self._names[id(call.route)],
                "label": call.label,
                "dtype": dtype,
                "scale": call.server.scores.scale,
                "softcap": call.server.scores.softcap,
                "backward": call.backward,
            }
        self.announce(call.group, phase, arguments)

    def announce(
        self, group: AttentionGroup, step: str, arguments: Mapping[str, Any], serial: int = 0
    ) -> None:
        """Announce a step of the group to its servers, and tell them which objects this rank has
        dropped. The names of the step's results contain `serial`. Do nothing if the group has no
        servers.

        Raises:
            DistCADesyncError: if a server has ended.
        """
        if self.group.monitor is not group.monitor:
            return
        forgotten = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
        for name, connection in self.servers.items():
            try:
                connection.send([step, arguments, serial, forgotten])
            except OSError as error:
                if group.monitor is not None:
                    activity = f"telling {name} what comes next"
                    raise group.monitor.give_up(activity, error) from error
                raise DistCADesyncError(
                    f"{name} has ended ({error}): look at its log, and start the run again."
                ) from error

    def end(self) -> None:
        """End the servers, and tell them whether the run is over or this process failed."""
        # The interpreter sets `last_value` to an exception that nobody caught.
        failed = self.group.monitor is None or self.group.has_left or hasattr(sys, "last_value")
        why = "the run failed, see the log of rank 0" if failed else "the run is over"
        for connection in self.servers.values():
            with suppress(OSError):  # the server may have ended already
                connection.send(["end", {"why": why, "status": int(failed)}, 0, []])
                connection.close()
        self.servers.clear()

    def _invite(self, store: Store, seconds: float, ranks: int, backend: str) -> None:
        """Find the servers, and connect to them. Tell servers and ranks who takes part."""
        ours = describe_process("cuda" if "nccl" in backend else "cpu")
        found = find_servers(store, self.nodes, self.each_node, self.wait_seconds)
        names, connections = dict[int, str](), dict[str, JsonLineConnection]()
        for number, (host, port, token, theirs) in enumerate(found, ranks):
            names[number] = name = f"rank {number} (server at {host}:{port})"
            if theirs != ours:
                raise ConfigError(
                    f"{name} runs {theirs}, but rank 0 runs {ours}. Install one version on all"
                    " nodes, and make GPUs visible to all processes, or to none."
                )
            connections[name] = connect_server(name, (host, port), token, seconds)
        node_of = [rank * self.nodes // ranks for rank in range(ranks)]
        node_of += [server // self.each_node for server in range(len(found))]
        placed = sorted(range(len(node_of)), key=node_of.__getitem__)
        invitation = {
            "ranks": placed,
            "has_tokens": [number < ranks for number in placed],
            "names": names,
            "backend": backend,
            "seconds": seconds,
        }
        for connection in connections.values():
            connection.send(invitation)
        self.servers = connections
        store.set(INVITATION, json.dumps(invitation))

    def _name_session(self, planner: Planner, group: AttentionGroup) -> str:
        """Return the name of the session with this planner. If servers do not know the session's
        settings, send the settings first.
        """
        if id(planner) not in self._names:
            self._name(planner, f"session {next(self._count)}")
        name = self._names[id(planner)]
        if self._configs.get(planner) != planner.config:
            self._configs[planner] = planner.config
            self.announce(group, "use_settings", {"session": name, "config": planner.config})
        return name

    def _name(self, known: object, name: str) -> None:
        if known is not None:
            self._names[id(known)] = name
            finalize(known, self._forget, id(known))  # may be called at any time in any thread

    def _forget(self, identity: int) -> None:
        self._forgotten.append(self._names.pop(identity))


def _check_members(members: dist.ProcessGroup | Members | None, size: int | None) -> None:
    """Check that all ranks will be in one group with the servers.

    Raises:
        UnsupportedError: if a group would not have all ranks of the world.
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
