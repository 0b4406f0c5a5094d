"""A server of attention: it takes part in the steps that rank 0 announces, and knows no model.

It plans like every rank, as a rank without tokens, so that it makes the same checks and counts like
the others. Between micro-batches it keeps the state that ranks keep (settings, cost models, plans
that may still be used), but nothing of any call.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from threading import Thread
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch

from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.documents import Documents
from hf_distca.agreement.world_progress import Progress
from hf_distca.borrowed import Store, TCPStore
from hf_distca.doctor.exchange import exchange, versions
from hf_distca.errors import DistCADesyncError
from hf_distca.integration.handle import LayerWork
from hf_distca.integration.session import Session
from hf_distca.integration.work_planner import WorkPlanner
from hf_distca.kernels.base import Scores
from hf_distca.pool.lead import find_pool_ranks
from hf_distca.pool.words import (
    JsonLineConnection,
    read_config,
    read_dtype,
    read_key,
    read_requests,
    read_shares,
    read_step,
)
from hf_distca.runtime.call import AttentionServer, Call
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.members import PoolRanks
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.serving import ServedCall, make_empty_operands

__all__ = ["EndedError", "serve"]

_LOOK_SECONDS = 1.0  # between two looks whether another rank has left
_END_SECONDS = 3.0  # that rank 0, which fails when others do not come, may take to say so
# That whoever connects has to say what it wants.
_HANDSHAKE_SECONDS, _HANDSHAKE_BYTES = 5.0, 1 << 16
_LONGER_SECONDS = 30.0  # that a server may run after rank 0 has ended


class EndedError(BaseException):
    """The end of a server, with reason and exit status.

    Like `KeyboardInterrupt`, it must not be handled as a failure.
    """

    def __init__(self, why: str, status: int = 1) -> None:
        super().__init__(why)
        self.status = status


def serve(listening: socket.socket, device: torch.device, wait_seconds: float | None) -> int:
    """Wait for ranks that train, serve them until they end, and report the work done.

    Args:
        listening: socket to which rank 0 will connect.
        device: device that computes.
        wait_seconds: time that ranks that train may take to connect; None for no limit.

    Returns:
        The exit status: 0 if they ended as they should.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end_by_signal)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    host, port = listening.getsockname()[:2]
    say = partial(_print_line, f"server at {host}:{port}")
    server: Server | None = None
    try:
        say(f"waits on {device} for the ranks that train")
        words = _accept(listening, partial(_refusal_reason, device, say), wait_seconds)
        invitation = _receive_invitation(words, wait_seconds)
        server = Server(
            find_pool_ranks(invitation, _connect_store(invitation), invitation["number"]),
            invitation["seconds"],
            device,
        )
        say(server.role)
        Thread(target=_refuse, args=[listening], name="distca refusals", daemon=True).start()
        Thread(
            target=_outlive_briefly, args=[words, server, say], name="distca end", daemon=True
        ).start()
        if invitation["spare"]:
            signal.signal(signal.SIGTERM, partial(_leave_by_signal, say))
        server.run(words)
    except EndedError as end:
        say(f"{server.done if server else 'served nothing'}; ended: {end}")
        return end.status
    except (DistCADesyncError, EOFError, OSError) as error:
        why = (
            error
            if isinstance(error, DistCADesyncError)
            else f"rank 0 has ended without a word, see its log ({error})"
        )
        say(f"{server.done if server else 'served nothing'}; ended: {why}")
        return 1


class _UsedPlan(NamedTuple):
    """A plan that a micro-batch uses."""

    session: Session
    key: PlanKey
    work: LayerWork


class Server:
    """Executes the steps that rank 0 announces.

    Each public method is a step, with the announced arguments.

    Sessions, plannings, plans and works have numbers, under which they are known until rank 0 has
    forgotten them.
    """

    def __init__(self, all_seats: PoolRanks, seconds: float, device: torch.device) -> None:
        self._seats, self._device = all_seats, device
        self._group = AttentionGroup.with_servers(all_seats, seconds)
        self._calls: dict[int, ServedCall] = {}
        self._known: dict[int, Any] = {}
        self._meter = Meter()
        self._micro_batches = self._served = 0
        self._began = time.perf_counter()

    def run(self, words: JsonLineConnection) -> NoReturn:
        """Execute the steps that rank 0 announces until it ends.

        Raises:
            EndedError: when it has ended.
            DistCADesyncError: if ranks do not do the same, or do not come.
            EOFError, OSError: if rank 0 has ended without a word.
        """
        try:
            while True:
                step, arguments, forgotten = self._next(words)
                with self._group.reporting(f"taking the step {step!r}"), torch.no_grad():
                    for number in forgotten:
                        self._known.pop(number, None)
                    read_step(self, step)(**arguments)
        except DistCADesyncError:
            with suppress(TimeoutError):
                while (word := words.receive(_END_SECONDS))[0] != "end":
                    pass
                self.end(**word[1])
            raise
        except (EndedError, EOFError, OSError) as end:
            if self._group.monitor is not None and getattr(end, "status", True):
                self._group.monitor.leave(f"ended: {end}")
            raise

    @property
    def role(self) -> str:
        """Role in its group, in words."""
        number, train = self._seats.ranks[self._seats.rank], sum(self._seats.holds)
        return f"is rank {number} of {self._group.size}, and serves the {train} that train"

    @property
    def done(self) -> str:
        """Work that it did, in words."""
        lasted, seconds, sent = (
            max(time.perf_counter() - self._began, 1e-9),
            self._meter.seconds,
            self._meter.sent_bytes / 1e9,
        )
        return (
            f"served {self._served} calls of attention in {self._micro_batches} micro-batches:"
            f" {seconds:.1f} s in kernels of {lasted:.1f} s ({seconds / lasted:.0%}), {sent:.2f} GB"
            " sent"
        )

    def end(self, why: str, status: int) -> NoReturn:
        """End, because rank 0 ends or continues without this server."""
        raise EndedError(why, status)

    def regroup(self, leaving: Sequence[int]) -> None:
        """Join the smaller group that ranks form once other servers have left."""
        self._seats = self._seats.without(leaving)
        self._group = AttentionGroup.with_servers(self._seats, self._group.timeout_seconds)
        for known in self._known.values():
            if isinstance(known, Session):
                known.adopt_group(self._group)

    def begin_session(self, session: int, config: Mapping[str, Any]) -> None:
        """Begin a session with new settings, when ranks do."""
        self._known[session] = begun = Session(read_config(config))
        begun.meter.whole = self._meter
        begun.adopt_group(self._group)

    def configure(self, session: int, config: Mapping[str, Any]) -> None:
        """Change the settings of a session."""
        self._known[session].config = read_config(config)

    def learn_cost(self, session: int, key: Sequence[Any], dtype: str) -> None:
        """Make the cost model of a kind of layer, together with the ranks."""
        which = read_key(key)
        self._known[session].learn_cost(
            which,
            make_empty_operands(which.shape, read_dtype(dtype), self._device).q_THD,
            self._group,
        )

    def begin_plans(
        self, session: int, planning: int, requests: Sequence[Any], place: str, beside: bool
    ) -> None:
        """Take part when ranks announce documents and begin to plan them."""
        asked = read_requests(requests, [None] * len(requests))
        self._known[planning] = self._known[session].planner.begin_plans(
            asked, self._group, place, in_background=beside
        )

    def finish_plans(self, session: int, planning: int, plans: Sequence[int]) -> None:
        """Take part when ranks compare their plans."""
        planned = self._known[session].planner.finish_plans(self._known.pop(planning))
        self._known.update(zip(plans, planned, strict=True))

    def plan_shares(
        self,
        session: int,
        plans: Sequence[int],
        shares: Sequence[Mapping[str, Any]],
        requests: Sequence[Any],
    ) -> None:
        """Plan a dealt batch, as each rank does alone."""
        planned = self._known[session].planner.plan(
            read_requests(requests, read_shares(shares)), self._group
        )
        self._known.update(zip(plans, planned, strict=True))

    def use_plan(self, session: int, plan: int, work: int) -> None:
        """Use a plan for a micro-batch."""
        planned, user = self._known.pop(plan), self._known[session]
        before = user.planner.resume_progress().number
        taken = WorkPlanner(user).use_plan(
            Documents(planned.runs), planned, self._group, self._device
        )
        self._known[work] = _UsedPlan(user, planned.key, taken)
        self._micro_batches += user.planner.resume_progress().number - before

    def gather(self, session: int) -> None:
        """Take part when ranks gather their measurements."""
        self._known[session].planner.resume_progress().gather_measurements(self._group)

    def try_exchange(self, session: int) -> None:
        """Take part in the trial exchange of `hf-distca doctor`, in no session."""
        exchange(versions(), self._device, self._group)

    def begin(self, call: int, work: int, place: str, backward: bool, **layer: Any) -> None:
        """Begin a call, when a layer sends its queries, keys and values."""
        session, key, used = self._known[work]
        operands = make_empty_operands(key.shape, read_dtype(layer["dtype"]), self._device)
        scores = Scores(layer["scale"], used.window, layer["softcap"])
        kernel = session.choose_kernel(operands.q_THD, key.shape, scores)
        server = AttentionServer(
            kernel, scores, used.meter, partial(used.group.reporting, f"computing {place}")
        )
        taken = Call(used.route, used.group.at(place, used.route.forward_exchanges), server)
        if backward:
            taken.begin_backward()
        else:
            used.meter.count(calls=1)
        self._served += 1
        self._calls[call] = ServedCall.begin(taken, operands)

    def serve(self, call: int) -> None:
        """Run the tasks of a layer, and send back the results."""
        self._calls[call].serve()

    def finish(self, call: int) -> None:
        """Finish a call: results have left."""
        self._calls.pop(call).finish()

    def _next(self, words: JsonLineConnection) -> Any:
        """Return the next word of rank 0.

        End if another rank leaves the group before, for rank 0 may hear of that late, or never.
        """
        while True:
            with suppress(TimeoutError):
                return words.receive(_LOOK_SECONDS)
            if self._group.monitor is not None and (word := self._group.monitor.first_failure):
                raise EndedError(word)


def _accept(
    listening: socket.socket, why_not: Callable[[Any], str | None], wait_seconds: float | None
) -> JsonLineConnection:
    """Accept the connection of a rank 0 that this server can serve.

    Raises:
        EndedError: if none comes in time.
    """
    deadline = math.inf if wait_seconds is None else time.monotonic() + wait_seconds
    while (left := deadline - time.monotonic()) > 0:
        listening.settimeout(None if wait_seconds is None else left)
        with suppress(TimeoutError):
            if (words := _accept_client(listening, why_not)) is not None:
                return words
    raise EndedError(f"no ranks came within {wait_seconds:g} s")


def _accept_client(
    listening: socket.socket, why_not: Callable[[Any], str | None]
) -> JsonLineConnection | None:
    """Accept the next connection.

    Return None if it comes from a stranger or `why_not` gives a reason to refuse it.
    """
    words = JsonLineConnection(listening.accept()[0], _HANDSHAKE_SECONDS)
    try:
        error = why_not(words.receive(_HANDSHAKE_SECONDS, _HANDSHAKE_BYTES))
        words.send({"error": error})
    except (EOFError, OSError, ValueError, RecursionError, TypeError, AttributeError):
        error = "a stranger"
    if error is None:
        return words
    words.close()
    return None


def _refusal_reason(
    device: torch.device, say: Callable[[str], None], asked: Mapping[str, Any]
) -> str | None:
    """Return why this server cannot serve a client that sent this greeting; None if it can."""
    here, there, wanted = version("hf-distca"), asked.get("version"), asked.get("device")
    why = None
    if there != here:
        why = f"it runs hf-distca {here}, and rank 0 {there}. Install one version everywhere."
    elif wanted != device.type:
        why = (
            f"it computes on {device.type}, and rank 0 on {wanted}. Start it with --device"
            f" {wanted}."
        )
    if why is not None:
        say(f"turned ranks away: {why}")
    return why


def _refuse(listening: socket.socket) -> None:
    """Refuse all further connections, because this server is taken."""
    listening.settimeout(None)
    while True:
        _accept_client(
            listening,
            lambda _: "it serves the ranks of another run. Start a server of its own for each run.",
        )


def _outlive_briefly(words: JsonLineConnection, server: Server, say: Callable[[str], None]) -> None:
    """End this process some time after rank 0 has ended: if a rank's failure message is lost, the
    server would wait in vain.
    """
    words.wait_for_end()
    time.sleep(_LONGER_SECONDS)
    say(
        f"{server.done}; ended: rank 0 has ended without a word, see its log ({_LONGER_SECONDS:g} s"
        " ago)"
    )
    os._exit(1)


def _receive_invitation(words: JsonLineConnection, seconds: float | None) -> Mapping[str, Any]:
    """Receive the invitation to the group, once rank 0 has found all servers."""
    invitation = words.receive(seconds)
    if not isinstance(invitation, dict):
        raise EndedError("the run failed before it began, see the log of rank 0")
    return invitation


def _connect_store(invitation: Mapping[str, Any]) -> Store:
    """Connect to the store in which all members meet."""
    seconds = timedelta(seconds=invitation["seconds"])
    try:
        return TCPStore(
            invitation["host"], invitation["port"], None, False, seconds, wait_for_workers=False
        )
    except RuntimeError as error:
        raise EndedError(
            "the store of the ranks that train does not answer at"
            f" {invitation['host']}:{invitation['port']} ({error}). Start them with a --master_addr"
            " that servers can reach."
        ) from error


def _end_by_signal(number: int, _frame: FrameType | None) -> NoReturn:
    raise EndedError(f"told to by {signal.Signals(number).name}", 128 + number)


def _leave_by_signal(say: Callable[[str], None], number: int, _frame: FrameType | None) -> None:
    Progress.is_leaving = True
    signal.signal(number, _end_by_signal)
    say(
        f"was told to end by {signal.Signals(number).name}, and serves until the others go on"
        " without it; again to end at once"
    )


def _print_line(who: str, text: str) -> None:
    sys.stderr.write(f"hf-distca: {who} {text}\n")
    sys.stderr.flush()
