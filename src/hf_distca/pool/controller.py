"""Announcements of rank 0: every step that ranks take together is named to the servers, right
before this rank takes it. On other ranks there are no servers to name it to.

A step of another room that is marked by `mark_joint_step` is a step of `Server`, with the same
name and arguments. Of an argument that servers have, too, its name is sent; of a tensor, its
dtype; and no group, device or documents, of which servers have their own.
"""

from __future__ import annotations

import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from inspect import signature
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch

from hf_distca.agreement.documents import Documents
from hf_distca.agreement.planner import Planner
from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError, DistCADesyncError, make_printable
from hf_distca.integration.handle import LayerPlan
from hf_distca.late_imports import call_at_exit
from hf_distca.pool.addresses import parse_address
from hf_distca.pool.words import JsonLineConnection
from hf_distca.runtime.call import LayerExchange
from hf_distca.runtime.group import AttentionGroup, Phase

ASK_SECONDS = 0.2  # between two attempts to find a server
# That a server has to answer, and may.
_ANSWER_SECONDS = 30.0
_ANSWER_BYTES = 1 << 16


@dataclass(eq=False)
class ServedGroup:
    """A group with servers, seen from rank 0.

    Attributes:
        servers: the connection to each server, by its name.
        group: the attention group; one of this rank alone before it is made.
        under_way: names of what has begun in it.
    """

    servers: dict[str, JsonLineConnection] = field(default_factory=dict)
    group: AttentionGroup = field(default_factory=AttentionGroup)
    under_way: set[str] = field(default_factory=set)

    def send(self, word: Sequence[object]) -> None:
        """Send a word to all servers.

        Raises:
            DistCADesyncError: if one has ended.
        """
        for name, words in self.servers.items():
            try:
                words.send(word)
            except OSError as error:
                if self.group.monitor is not None:
                    doing = f"telling {name} what comes next"
                    raise self.group.monitor.give_up(doing, error) from error
                raise DistCADesyncError(
                    f"{name} has ended ({error}): look at its log, and start it again."
                ) from error


class PoolController:
    """Announces the steps of groups to their servers.

    Sessions and results of steps have names, by which later steps refer to them. Once one of them
    is gone here, servers forget what they keep under its name.

    Attributes:
        groups: the groups that are still needed, the newest last.
    """

    def __init__(self) -> None:
        self.groups = [ServedGroup()]
        self._count = count(1)
        self._forgotten = deque[str]()
        self._names = dict[int, str]()  # by the id of what is named
        self._configs = WeakKeyDictionary[Planner, DistCAConfig]()  # as announced
        call_at_exit(self.end)

    def leave_behind(self, leaving: Sequence[int], names: Sequence[str]) -> None:
        """Announce new work to the others alone, once servers of these names have left, which are
        at these indices of the group.

        All still hear of work that has begun; leaving servers end when none of it is left.
        """
        servers = self.groups[-1].servers
        self.groups.append(ServedGroup({n: servers[n] for n in servers if n not in names}))
        self.groups[-1].send(["regroup", {"leaving": leaving}, 0, []])

    def take_step(self, step: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """See `GroupObserver.take_step`."""
        given = signature(step).bind(*args, **options).arguments
        group = given["group"]
        if (owner := given.pop("self", None)) is not None:
            given["session"] = self._name_session(getattr(owner, "planner", owner), group)
        said = {
            name: self._names.get(id(value), value)
            for name, value in given.items()
            if not isinstance(value, AttentionGroup | torch.device | Documents)
        }
        serial = next(self._count)
        self.announce(group, step.__name__, said, serial)
        result = step(*args, **options)
        # As long as a route is known, calls of its work may come.
        known = result.route if isinstance(result, LayerPlan) else result
        for number, named in enumerate(known if isinstance(known, list) else [known]):
            self._name(named, f"{serial}.{number}")
        return result

    def enter_phase(self, call: LayerExchange, phase: Phase, dtype: torch.dtype | None) -> None:
        """See `GroupObserver.enter_phase`."""
        said: dict[str, Any] = {"call": id(call)}
        if phase == "begin":
            said |= {
                "work": self._names[id(call.route)],
                "place": call.label,
                "dtype": dtype,
                "scale": call.server.scores.scale,
                "softcap": call.server.scores.softcap,
                "backward": call.backward,
            }
        self.announce(call.group, phase, said)

    def announce(
        self, group: AttentionGroup, step: str, said: Mapping[str, Any], serial: int = 0
    ) -> None:
        """Announce a step to the servers of a group, with the names of what is gone; results get
        names with its serial number.
        """
        forgotten = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
        for served in self.groups:
            if served.group.monitor is group.monitor:
                # As long as a plan is used, its group is needed.
                served.under_way |= {f"{serial}.0"} if step == "make_layer_plan" else set()
                served.send([step, said, serial, forgotten])
            served.under_way.difference_update(forgotten)
        while len(self.groups) > 1 and not self.groups[0].under_way:
            oldest = self.groups.pop(0)
            for name in oldest.servers.keys() - self.groups[0].servers.keys():
                _end_server(oldest.servers[name], "training goes on without it", 0)

    def end(self) -> None:
        """End the servers, and tell them that the run is over, or that this process failed."""
        for served in self.groups:
            group = served.group
            # The last value is an exception that nobody caught.
            failed = group.monitor is None or group.has_left or hasattr(sys, "last_value")
            why = "the run failed, see the log of rank 0" if failed else "the run is over"
            for words in served.servers.values():
                _end_server(words, why, int(failed))
        self.groups.clear()

    def _name_session(self, planner: Planner, group: AttentionGroup) -> str:
        """Return the name of the session with this planner, whose settings servers know then."""
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
            finalize(known, self._forget, id(known))  # at any time, in any thread

    def _forget(self, identity: int) -> None:
        self._forgotten.append(self._names.pop(identity))


def connect_server(
    address: str, token: str, device: str, deadline: float, seconds: float
) -> JsonLineConnection:
    """Connect to a server that asks for this token and computes on a device of this type, and that
    may take so many seconds to read a word.

    Raises:
        ConfigError: if it does not answer before the deadline, has another token, version or
            device, or serves another run.
    """
    host, port = parse_address(address)
    start = f"`hf-distca serve --address {address}`"
    while True:
        try:
            words = JsonLineConnection(
                socket.create_connection((host, port), max(deadline - time.monotonic(), 1.0)),
                seconds,
            )
            break
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"no server answers at {address} ({error.strerror or error}). Start it with"
                    f" {start}, and give trainers an address that they can reach."
                ) from error
            time.sleep(ASK_SECONDS)
    try:
        words.send({"token": token, "version": version("hf-distca"), "device": device})
        refusal = words.receive(_ANSWER_SECONDS, _ANSWER_BYTES)["error"]
    except (EOFError, OSError, ValueError, TypeError, LookupError) as error:
        raise ConfigError(
            f"what listens at {address} is no server of hf-distca, or has ended"
            f" ({type(error).__name__}). Start one with {start}, or name another address."
        ) from error
    if refusal is not None:
        words.close()
        raise ConfigError(
            f"the server at {address} cannot take part: {make_printable(str(refusal))}"
        )
    return words


def _end_server(words: JsonLineConnection, why: str, status: int) -> None:
    with suppress(OSError):  # it may have ended already
        words.send(["end", {"why": why, "status": status}, 0, []])
        words.close()
