"""An attention server: it takes part in the steps that rank 0 announces, and knows no model.

A server makes plans like a rank without tokens, with the same checks and counters. Between
micro-batches it keeps the same state as a rank (settings, cost models, and plans that may still be
used), but nothing that belongs to a single call.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Thread
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.batch_plan import MicroBatchPlan
from hf_distca.agreement.documents import Documents
from hf_distca.agreement.planner import Planner
from hf_distca.errors import DistCADesyncError, make_printable
from hf_distca.integration.handle import LayerPlan, LayerPlanner
from hf_distca.integration.session import Session
from hf_distca.kernels.base import Grads, Outputs, ScoreOptions
from hf_distca.package_versions import list_versions
from hf_distca.pool.door import accept
from hf_distca.pool.meeting import join_group, join_store, publish_server
from hf_distca.pool.protocol import (
    JsonLineConnection,
    read_config,
    read_dtype,
    read_key,
    read_requests,
    read_share,
)
from hf_distca.runtime.call import AttentionServer, LayerExchange, make_empty_operands
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.trial import exchange

_LOOK_SECONDS = 1.0  # pause between two checks for a rank that has left
_END_SECONDS = 3.0  # wait for rank 0's reason why the run failed
_LONGER_SECONDS = 30.0  # a server ends at most this long after rank 0


class EndedError(BaseException):
    """Ends a server, with a reason and an exit status.

    It is a `BaseException`, so that code that handles failures does not catch it.
    """

    def __init__(self, why: str, status: int = 1) -> None:
        super().__init__(why)
        self.status = status


def serve(number: int, local: int, wait_seconds: float) -> NoReturn:
    """Serve the ranks that train until they end. Then log the work done, and exit.

    Args:
        number: index of this server among the servers of the launch.
        local: index of this process on its node.
        wait_seconds: longest time to wait for the ranks that train.
    """
    # accelerate uses the same rule to choose the device of the ranks that train.
    on_gpu = torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "false") != "true"
    device = torch.device(f"cuda:{local}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    store = join_store(wait_seconds)
    listening, token = publish_server(store, number, device.type)
    host, port = listening.getsockname()[:2]

    def log(text: str) -> None:
        sys.stderr.write(make_printable(f"hf-distca: server at {host}:{port} {text}\n"))

    for end_signal in (signal.SIGTERM, signal.SIGINT):
        signal.signal(end_signal, _end_by_signal)
    server: Server | None = None
    try:
        log(f"waits on {device} for the ranks that train")
        connection = accept(listening, token, wait_seconds)
        if connection is None:
            raise EndedError(f"no ranks came within {wait_seconds:g} s")
        invitation = connection.receive(wait_seconds)  # sent when rank 0 has found all servers
        trainers = sum(invitation["has_tokens"])
        rank = trainers + number
        server = Server(join_group(invitation, store, rank), device)
        log(f"is rank {rank} of {len(invitation['ranks'])}, and serves the {trainers} that train")
        Thread(target=_outlive_briefly, args=[connection, server, log], daemon=True).start()
        server.run(connection)
    except (EndedError, DistCADesyncError, EOFError, OSError) as end:
        why = str(end)
        if isinstance(end, EOFError | OSError):
            why = f"rank 0 has ended unexpectedly, see its log ({end})"
        log(f"{server.done if server else 'served nothing'}; ended: {why}")
        sys.exit(getattr(end, "status", 1))


class _UsedPlan(NamedTuple):
    """A plan that layers use for a micro-batch."""

    session: Session
    key: PlanKey
    layer_plan: LayerPlan


class Server:
    """Executes the steps that rank 0 announces.

    Each method in `STEPS` is a step, and gets the announced arguments.

    The server keeps sessions and results of steps under the names that rank 0 gave them. It drops
    an object when rank 0 drops the object with the same name.
    """

    def __init__(self, group: AttentionGroup, device: torch.device) -> None:
        self._device = device
        self._group = group
        self._calls: dict[int, LayerExchange] = {}
        self._known: dict[str, Any] = {}
        self._meter = Meter()
        self._micro_batches = self._served = 0
        self._newest: tuple[str, int] | None = None  # session and number of the micro-batch
        self._began = time.perf_counter()

    def run(self, connection: JsonLineConnection) -> NoReturn:
        """Execute the steps that rank 0 announces, until rank 0 ends.

        Raises:
            EndedError: when rank 0 has ended.
            DistCADesyncError: if ranks take different steps, or if a rank does not come in time.
            EOFError, OSError: if rank 0 has ended without a message.
        """
        try:
            while True:
                step, arguments, serial, forgotten = self._receive_next(connection)
                with self._group.report_errors(f"taking the step {step!r}"), torch.no_grad():
                    for name in forgotten:
                        self._known.pop(name, None)
                    result = STEPS[step](self, **arguments)
                    results = result if isinstance(result, list) else [result]
                    self._known |= {
                        f"{serial}.{n}": known for n, known in enumerate(results) if known
                    }
        except DistCADesyncError:
            with suppress(TimeoutError):
                while (message := connection.receive(_END_SECONDS))[0] != "end":
                    pass
                self.end(**message[1])
            raise
        except (EndedError, EOFError, OSError) as end:
            if self._group.monitor is not None and getattr(end, "status", True):
                self._group.monitor.leave(f"ended: {end}")
            raise

    @property
    def done(self) -> str:
        """Description of the work that this server did."""
        lasted = max(time.perf_counter() - self._began, 1e-9)
        seconds = self._meter.seconds
        sent = self._meter.sent_bytes / 1e9
        return (
            f"served {self._served} calls of attention in {self._micro_batches} micro-batches:"
            f" {seconds:.1f} s in kernels of {lasted:.1f} s ({seconds / lasted:.0%}), {sent:.2f} GB"
            " sent"
        )

    def end(self, why: str, status: int) -> NoReturn:
        """End the server, because rank 0 ends."""
        raise EndedError(why, status)

    def use_settings(self, session: str, config: Mapping[str, Any]) -> None:
        """Use settings in a session from now on, and begin the session if it is new."""
        settings = read_config(config)
        if session not in self._known:
            self._known[session] = begun = Session(settings)
            begun.meter.parent = self._meter
            begun.adopt_group(self._group)
        self._known[session].config = settings

    def make_cost(self, session: str, key: Sequence[Any], query: str) -> None:
        """Take part when ranks make the cost model of a kind of layer."""
        which = read_key(key)
        LayerPlanner(self._known[session]).make_cost(
            which,
            make_empty_operands(which.shape, read_dtype(query), self._device).q_THD,
            self._group,
        )

    def plan_documents(self, session: str, requests: Sequence[Any]) -> list[MicroBatchPlan]:
        """Take part in the step in which ranks announce documents, plan, and compare plans."""
        return self._make_planner(session).plan_documents(read_requests(requests), self._group)

    def plan_share(
        self, session: str, share: Mapping[str, Any], requests: Sequence[Any]
    ) -> list[MicroBatchPlan]:
        """Plan a dealt batch. Every rank makes the same plan without communication."""
        return self._make_planner(session).plan_share(
            read_share(share), read_requests(requests), self._group
        )

    def make_layer_plan(self, session: str, planned: str) -> _UsedPlan:
        """Make the `LayerPlan` for a plan that a micro-batch uses."""
        plan = self._known.pop(planned)
        user = self._known[session]
        none = Documents(np.empty((0, 3), np.int64))
        layer_plan = LayerPlanner(user).make_layer_plan(none, plan, self._group, self._device)
        self._micro_batches += self._newest != (session, plan.number)
        self._newest = session, plan.number
        return _UsedPlan(user, plan.key, layer_plan)

    def gather_measurements(self, session: str) -> None:
        """Take part when ranks gather their measurements."""
        self._make_planner(session).gather_measurements(self._group)

    def exchange(self, has: Mapping[str, str]) -> None:
        """Take part in the trial exchange of `hf-distca doctor`. `has`, the versions of rank 0, is
        not used.
        """
        exchange(list_versions(), self._device, self._group)

    def begin(self, call: int, work: str, label: str, backward: bool, **layer: Any) -> None:
        """Begin a call of attention, for which a layer sends queries, keys and values."""
        session, key, used = self._known[work]
        operands = make_empty_operands(key.shape, read_dtype(layer["dtype"]), self._device)
        scores = ScoreOptions(layer["scale"], used.window, layer["softcap"])
        kernel = session.choose_kernel(operands.q_THD, key.shape, scores)
        server = AttentionServer(kernel, scores, used.meter)
        self._calls[call] = taken = LayerExchange(used.route, used.group, server, None, label)
        if backward:
            taken.begin_backward()
        else:
            used.meter.count(calls=1)
        self._served += 1
        taken.begin_without_rows(operands)

    def serve(self, call: int) -> None:
        """Run the tasks of a layer, and send back the results."""
        self._calls[call].serve()

    def finish(self, call: int) -> None:
        """Finish a call after its results have been sent."""
        taken = self._calls.pop(call)
        taken.finish(Grads if taken.backward else Outputs)

    def _make_planner(self, session: str) -> Planner:
        planner: Planner = self._known[session].planner
        return planner

    def _receive_next(self, connection: JsonLineConnection) -> Any:
        """Return the next message of rank 0.

        If another rank leaves the group before the message arrives, end the server, because rank 0
        may notice this late or never.
        """
        while True:
            with suppress(TimeoutError):
                return connection.receive(_LOOK_SECONDS)
            if self._group.monitor is not None and (failure := self._group.monitor.first_failure):
                raise EndedError(failure)


# All steps that rank 0 can announce, by name.
STEPS: dict[str, Callable[..., object]] = {
    step.__name__: step
    for step in (
        Server.end,
        Server.use_settings,
        Server.make_cost,
        Server.plan_documents,
        Server.plan_share,
        Server.make_layer_plan,
        Server.gather_measurements,
        Server.exchange,
        Server.begin,
        Server.serve,
        Server.finish,
    )
}


def _outlive_briefly(
    connection: JsonLineConnection, server: Server, log: Callable[[str], None]
) -> None:
    """End this process some time after rank 0 has ended. Otherwise, the server would wait forever
    if the message about a rank's failure was lost.
    """
    connection.wait_for_end()
    time.sleep(_LONGER_SECONDS)
    log(
        f"{server.done}; ended: rank 0 has ended unexpectedly, see its log (this server"
        f" waited {_LONGER_SECONDS:g} s longer)"
    )
    os._exit(1)


def _end_by_signal(number: int, _frame: FrameType | None) -> NoReturn:
    raise EndedError(f"stopped by {signal.Signals(number).name}", 128 + number)
