"""`PoolController`: tells servers about each step that ranks take together. Rank 0 announces a step
right before it takes the step itself. Other ranks announce nothing.

The steps are calls of functions that are marked by `mark_joint_step`. `Server` has a method with
the same name and arguments for each of these functions. An argument that servers know is sent as
its name, and a tensor as its dtype. Groups, devices and documents are not sent, because servers
have their own.
"""

from __future__ import annotations

import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
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
from hf_distca.import_hooks import call_at_exit
from hf_distca.integration.handle import LayerPlan
from hf_distca.pool.addresses import parse_address
from hf_distca.pool.protocol import JsonLineConnection
from hf_distca.runtime.call import LayerExchange
from hf_distca.runtime.group import AttentionGroup, Phase

ASK_SECONDS = 0.2  # pause between two attempts to find a server
# Limits on a server's answer.
_ANSWER_SECONDS = 30.0
_ANSWER_BYTES = 1 << 16


class PoolController:
    """Announces the steps of a group to its servers.

    Sessions and results of steps have names, by which later steps refer to them. When this rank
    drops such an object, servers forget their object with the same name.

    Attributes:
        servers: the connection to each server, by the server's name.
        group: the attention group; until it is made, a group of this rank alone.
    """

    def __init__(self) -> None:
        self.servers: dict[str, JsonLineConnection] = {}
        self.group = AttentionGroup()
        self._count = count(1)
        self._forgotten = deque[str]()
        self._names = dict[int, str]()  # names, by the id of the named object
        self._configs = WeakKeyDictionary[Planner, DistCAConfig]()  # settings that servers know
        call_at_exit(self.end)

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
        # Servers must know a layer plan as long as its route exists, because layers call attention
        # with the route. So name the route, not the plan.
        known = result.route if isinstance(result, LayerPlan) else result
        for number, named in enumerate(known if isinstance(known, list) else [known]):
            self._name(named, f"{serial}.{number}")
        return result

    def enter_phase(self, call: LayerExchange, phase: Phase, dtype: torch.dtype | None) -> None:
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
        """Announce a step of the group to its servers, and name the objects that they can forget.
        The names of the step's results contain `serial`. A group without servers announces nothing.

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
                    f"{name} has ended ({error}): look at its log, and start it again."
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

    def _name_session(self, planner: Planner, group: AttentionGroup) -> str:
        """Return the name of the session with this planner. Send its settings to the servers first
        if they do not know them.
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


def connect_server(
    address: str, token: str, device: str, deadline: float, seconds: float
) -> JsonLineConnection:
    """Connect to a server that asks for this token and computes on a device of this type. The
    server may take up to `seconds` to read a message.

    Raises:
        ConfigError: if the server does not answer before the deadline, has another token, version
            or type of device, or serves another run.
    """
    host, port = parse_address(address)
    start = f"`hf-distca serve --address {address}`"
    while True:
        try:
            connection = JsonLineConnection(
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
        connection.send({"token": token, "version": version("hf-distca"), "device": device})
        refusal = connection.receive(_ANSWER_SECONDS, _ANSWER_BYTES)["error"]
    except (EOFError, OSError, ValueError, TypeError, LookupError) as error:
        raise ConfigError(
            f"the process at {address} is not a server of hf-distca, or has ended"
            f" ({type(error).__name__}). Start a server with {start}, or name another address."
        ) from error
    if refusal is not None:
        connection.close()
        raise ConfigError(
            f"the server at {address} cannot take part: {make_printable(str(refusal))}"
        )
    return connection
