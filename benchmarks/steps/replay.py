"""The time of a step of pipeline stages with one core per process, replayed from processor time.

On a machine with fewer cores than processes, or with other programs, the clock does not show this.
Each process records its processor time between the messages that it sends and waits for. The replay
then reassembles the step: every process continues as soon as the messages it waits for were sent.
Messages take only the processor time of the processes that copy them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from hf_distca.pipeline import stage_step
from hf_distca.runtime import channel

Message = tuple[str, int, int]  # name, source and destination


class Event(NamedTuple):
    """An event of a process: `seconds` of compute, then these messages sent or waited for."""

    seconds: float
    sends: tuple[Message, ...] = ()
    waits: tuple[Message, ...] = ()


class Recorder:
    """Records the events of this process between start and stop. A process makes only one."""

    def __init__(self, rank: int) -> None:
        self.rank, self.events, self._from = rank, list[Event](), None
        self._mails: Counter[tuple[int, int]] = Counter()
        self._expected: dict[int, tuple[Message, ...]] = {}
        self._around(channel.Channel, "start", self._exchange)
        self._around(channel.Transfer, "wait", self._wait)
        self._around(stage_step.Messages, "__init__", self._mail)
        self._around(stage_step.Messages, "wait", self._wait)

    def start(self) -> None:
        self.events, self._from = [], time.process_time()

    def stop(self) -> list[Event]:
        self._note()
        self._from = None
        return self.events

    def _around(self, owner: type[Any], name: str, noted: Callable[..., Any]) -> None:
        method = getattr(owner, name)

        def wrapped(this: Any, *args: Any, **kwargs: Any) -> Any:
            return noted(method, this, *args, **kwargs)

        setattr(owner, name, wrapped)

    def _note(self, sends: Sequence[Message] = (), waits: Sequence[Message] = ()) -> None:
        if self._from is not None:
            now = time.process_time()
            self.events.append(Event(now - self._from, tuple(sends), tuple(waits)))
            self._from = now

    def _exchange(
        self, method: Any, this: Any, received: Any, sent: Any, coming: Any, going: Any, *more: Any
    ) -> Any:
        transfer = method(this, received, sent, coming, going, *more)
        what = transfer.activity  # names step, tick and call, equally on all ranks
        self._expect(
            transfer,
            [
                (what, source, self.rank)
                for source, size in coming.items()
                if size and source != self.rank
            ],
        )
        self._note(
            sends=[(what, self.rank, to) for to, size in going.items() if size and to != self.rank]
        )
        return transfer

    def _mail(self, method: Any, this: Any, ops: Sequence[dist.P2POp]) -> None:
        method(this, ops)
        sends, waits = [], []
        for op in ops:  # counts the messages from one stage to another
            sending = op.op is dist.isend
            ends = (self.rank, op.peer) if sending else (op.peer, self.rank)
            self._mails[ends] += 1
            (sends if sending else waits).append((f"mail {self._mails[ends]}", *ends))
        self._expect(this, waits)
        self._note(sends=sends)

    def _expect(self, sent: Any, waits: Sequence[Message]) -> None:
        self._expected[id(sent)] = tuple(waits)

    def _wait(self, method: Any, this: Any, *args: Any) -> Any:
        self._note()
        result = method(this, *args)
        self._note(waits=self._expected.pop(id(this), ()))
        return result


def replay(processes: Sequence[Sequence[Event]]) -> float:
    """Return the seconds until the last process is done.

    Args:
        processes: the events of each process.

    Raises:
        ValueError: if a process waits for a message that was never sent.
    """
    now, at, sent = [0.0] * len(processes), [0] * len(processes), dict[Message, float]()
    going = True
    while going:
        going = False
        for rank, events in enumerate(processes):
            while at[rank] < len(events) and all(
                message in sent for message in events[at[rank]].waits
            ):
                event = events[at[rank]]
                # The work of waiting, such as copying what arrived, comes after the wait.
                now[rank] = (
                    max([now[rank], *(sent[message] for message in event.waits)]) + event.seconds
                )
                sent |= dict.fromkeys(event.sends, now[rank])
                at[rank] += 1
                going = True
    for place, events in zip(at, processes, strict=True):
        if place < len(events):
            raise ValueError(f"no process sent {events[place].waits}")
    return max(now)
