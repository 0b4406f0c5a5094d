"""A server: it takes part in what rank 0 names, computes slices of attention, and knows no model.

It plans like every rank, as one that holds no tokens, so that it can check what all ranks check and is counted as they are. It
keeps what ranks keep between micro-batches (settings, cost models, plans that may still be used), and nothing of any call.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from threading import Thread
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch

from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.documents import Documents
from hf_distca.borrowed import Store, TCPStore
from hf_distca.doctor.exchange import exchange, versions
from hf_distca.errors import DistCADesyncError
from hf_distca.integration.handle import Work
from hf_distca.integration.session import Session
from hf_distca.kernels.base import Scores
from hf_distca.pool.lead import seats
from hf_distca.pool.words import Words, read_config, read_dtype, read_key, read_requests, read_shares
from hf_distca.runtime.call import AttentionServer, Call
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.serving import Serving, no_rows

__all__ = ["EndedError", "serve"]

_LOOK_SECONDS = 1.0  # between two looks whether a signal has come, in Python
_HELLO_SECONDS = 10.0  # that whoever connects has to say what it wants


class EndedError(Exception):
    """Why a server ends, and with which status."""

    def __init__(self, why: str, status: int = 1) -> None:
        super().__init__(why)
        self.status = status


def serve(listening: socket.socket, device: torch.device, wait_seconds: float | None) -> int:
    """Wait for ranks that train, serve them until they end, and say what was done.

    Args:
        listening: where rank 0 will connect.
        device: what computes.
        wait_seconds: how long ranks that train may take to come; None for as long as they take.

    Returns:
        The exit status: 0 if they ended as they should.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end_by_signal)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    host, port = listening.getsockname()[:2]
    say = partial(_say, f"server at {host}:{port}")
    server: Server | None = None
    try:
        say(f"waits on {device} for the ranks that train")
        words = _accept(listening, device, wait_seconds, say)
        invitation = words.receive(wait_seconds)
        number, store = invitation["number"], _store(invitation, words.there)
        group = AttentionGroup.with_servers(seats(invitation, store, number), invitation["seconds"])
        say(f"is rank {number} of {group.size}, and serves ranks 0 to {group.holds.count(True) - 1 if group.holds else 0}")
        server = Server(group, device)
        _refuse_others(listening)
        server.run(words)
    except EndedError as end:
        say(f"{server.done if server else 'served nothing'}; ended: {end}")
        return end.status
    except (DistCADesyncError, EOFError, OSError, TimeoutError) as error:
        say(f"{server.done if server else 'served nothing'}; ended: {_why(error)}")
        return 1


class _Used(NamedTuple):
    """A plan that a micro-batch has taken up."""

    session: Session
    key: PlanKey
    work: Work


class Server:
    """Takes part in the steps that rank 0 names. Each public method is one of them, and gets what was said with it.

    Sessions, plannings, plans and works have numbers, under which they are known until rank 0 has forgotten them.
    """

    def __init__(self, group: AttentionGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._calls: dict[int, Serving] = {}
        self._known: dict[int, Any] = {}
        self._meter = Meter()
        self._micro_batches = self._served = 0
        self._began = time.perf_counter()

    def run(self, words: Words) -> NoReturn:
        """Do what rank 0 says until it ends.

        Raises:
            EndedError: when it has ended.
            DistCADesyncError: if ranks do not do the same, or do not come.
            EOFError, OSError: if rank 0 has ended without a word.
        """
        while True:
            with self._group.reporting("waiting for what comes next"):
                step, arguments, forgotten = _next(words)
            if step == "end":
                failed = arguments["failed"]
                raise EndedError("the run failed, see the log of rank 0" if failed else "the run is over", int(failed))
            with self._group.reporting(f"taking the step {step!r}"), torch.no_grad():
                for number in forgotten:
                    self._known.pop(number, None)
                getattr(self, step)(**arguments)

    @property
    def done(self) -> str:
        """What it did, in words."""
        lasted, seconds, sent = max(time.perf_counter() - self._began, 1e-9), self._meter.seconds, self._meter.sent_bytes / 1e9
        return (
            f"served {self._served} calls of attention in {self._micro_batches} micro-batches: {seconds:.1f} s in kernels of "
            f"{lasted:.1f} s ({seconds / lasted:.0%}), {sent:.2f} GB sent"
        )

    def begin_session(self, session: int, config: Mapping[str, Any]) -> None:
        """Ranks have new settings, and begin to count anew."""
        self._known[session] = begun = Session(read_config(config))
        begun.meter.whole = self._meter
        begun.take_group(self._group)

    def configure(self, session: int, config: Mapping[str, Any]) -> None:
        """Settings change."""
        self._known[session].config = read_config(config)

    def learn_cost(self, session: int, key: Sequence[Any], dtype: str) -> None:
        """Ranks make the cost model of a kind of layer."""
        which = read_key(key)
        self._known[session].learn_cost(which, no_rows(which.shape, read_dtype(dtype), self._device).q_THD, self._group)

    def begin_plans(self, session: int, planning: int, requests: Sequence[Any], place: str, beside: bool) -> None:
        """Ranks announce documents and begin to plan them."""
        asked = read_requests(requests, [None] * len(requests))
        self._known[planning] = self._known[session].planner.begin(asked, self._group, place, beside=beside)

    def finish_plans(self, session: int, planning: int, plans: Sequence[int]) -> None:
        """Ranks compare the plans."""
        made = self._known[session].planner.finish(self._known.pop(planning), self._group)
        self._known.update(zip(plans, made, strict=True))

    def plan_shares(
        self, session: int, plans: Sequence[int], shares: Sequence[Mapping[str, Any]], requests: Sequence[Any]
    ) -> None:
        """Ranks plan a dealt batch, each by itself."""
        made = self._known[session].planner.plan(read_requests(requests, read_shares(shares)), self._group)
        self._known.update(zip(plans, made, strict=True))

    def use_plan(self, session: int, plan: int, work: int) -> None:
        """A micro-batch takes up a plan."""
        planned, user = self._known.pop(plan), self._known[session]
        before = user.planner.progress.number
        taken = user.use_plan(Documents(planned.rows), planned, self._group, self._device)
        self._known[work] = _Used(user, planned.key, taken)
        self._micro_batches += user.planner.progress.number - before

    def gather(self, session: int) -> None:
        """Ranks gather what they measured."""
        self._known[session].planner.progress.gather(self._group)

    def try_exchange(self) -> None:
        """`hf-distca doctor` tries an exchange."""
        exchange(versions(), self._device, self._group)

    def begin(self, call: int, work: int, place: str, backward: bool, **layer: Any) -> None:
        """A layer sends its queries, keys and values."""
        session, key, used = self._known[work]
        operands = no_rows(key.shape, read_dtype(layer["dtype"]), self._device)
        scores = Scores(layer["scale"], used.window, layer["softcap"])
        kernel = session.kernel(operands.q_THD, (key.shape.head_dim, key.shape.value_head_dim), scores, key.shape.ratio)
        server = AttentionServer(kernel, scores, used.meter, partial(self._group.reporting, f"computing {place}"))
        taken = Call(used.route, self._group.at(place, used.route.forward_exchanges), server)
        if backward:
            taken.begin_backward()
        else:
            used.meter.count(calls=1)
        self._served += 1
        self._calls[call] = Serving.begin(taken, operands)

    def serve(self, call: int) -> None:
        """The tasks of a layer are run, and results sent back."""
        self._calls[call].serve()

    def finish(self, call: int) -> None:
        """The results of a layer arrive."""
        self._calls.pop(call).finish()


def _next(words: Words) -> Any:
    """The next word; signals are looked at meanwhile."""
    while True:
        try:
            return words.receive(_LOOK_SECONDS)
        except TimeoutError:
            continue


def _accept(listening: socket.socket, device: torch.device, wait_seconds: float | None, say: Callable[[str], None]) -> Words:
    """The connection of a rank 0 that this server can serve.

    Raises:
        EndedError: if none comes in time.
    """
    deadline = None if wait_seconds is None else time.monotonic() + wait_seconds
    listening.settimeout(_LOOK_SECONDS)
    while deadline is None or time.monotonic() < deadline:
        try:
            connected, _ = listening.accept()
        except TimeoutError:
            continue
        words = Words(connected)
        try:
            asked = words.receive(_HELLO_SECONDS)
            error = _why_not(asked, device)
            words.send({"error": error})
        except (EOFError, OSError, TimeoutError, ValueError, TypeError, AttributeError):
            continue  # a stranger
        if error is None:
            return words
        say(f"turned ranks at {words.there} away: {error}")
        words.close()
    raise EndedError(f"no ranks came within {wait_seconds:g} s")


def _why_not(asked: Mapping[str, Any], device: torch.device) -> str | None:
    """Why this server cannot serve whoever asks so; None if it can."""
    here = version("hf-distca")
    if asked.get("version") != here:
        return f"it runs hf-distca {here}, and rank 0 {asked.get('version')}. Install one version everywhere."
    if asked.get("device") != device.type:
        return f"it computes on {device.type}, and rank 0 on {asked.get('device')}. Start it with --device {asked.get('device')}."
    return None


def _refuse_others(listening: socket.socket) -> None:
    """From now on tell whoever connects that this server is taken."""

    def refuse() -> None:
        while True:
            try:
                connected, _ = listening.accept()
                words = Words(connected)
                words.receive(_HELLO_SECONDS)
                words.send({"error": "it serves the ranks of another run. Start a server of its own for each run."})
                words.close()
            except TimeoutError:
                continue
            except (EOFError, OSError, ValueError):
                if listening.fileno() < 0:
                    return

    Thread(target=refuse, name="distca refusals", daemon=True).start()


def _store(invitation: Mapping[str, Any], there: str) -> Store:
    """The store in which all meet; it is on the host of rank 0 where its address means any host."""
    seconds = timedelta(seconds=invitation["seconds"])
    try:
        return TCPStore(invitation["host"], invitation["port"], None, False, seconds, wait_for_workers=False)
    except RuntimeError as error:
        raise EndedError(
            f"the store of the ranks that train does not answer at {invitation['host']}:{invitation['port']} ({error}). Start "
            "them with a --master_addr that servers can reach."
        ) from error


def _end_by_signal(number: int, _frame: FrameType | None) -> NoReturn:
    raise EndedError(f"told to by {signal.Signals(number).name}", 128 + number)


def _why(error: Exception) -> str:
    if isinstance(error, DistCADesyncError):
        return str(error)
    return f"rank 0 has gone without a word ({type(error).__name__})"


def _say(who: str, text: str) -> None:
    sys.stderr.write(f"hf-distca: {who} {text}\n")
    sys.stderr.flush()
