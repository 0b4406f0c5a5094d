"""What a step of pipeline stages would take with a core for each process, replayed from processor
time.

On a machine with fewer cores than processes, or with others on it, the clock says little. So a
process notes its processor time between the messages that it sends and waits for, and the step is
put together again from what all have noted: every process goes on as soon as what it waits for was
sent. Messages themselves take the processor time of those who copy them, and no other.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from hf_distca.pipeline import stage_step
from hf_distca.runtime import channel

Message = tuple[str, int, int]  # what it is, from which process and to which


class Event(NamedTuple):
    """What a process did: computed for so many seconds, and then sent these messages or waited for
    them.
    """

    seconds: float
    sends: tuple[Message, ...] = ()
    waits: tuple[Message, ...] = ()


class Recorder:
    """Notes what this process does, from when it is started until it is stopped. Made once in a
    process.
    """

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
        what = transfer.activity  # names step, tick and call, and the same on all ranks
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
        for op in ops:  # the n-th message from one stage to another
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
    """Seconds until the last process is done.

    Args:
        processes: the events of each.

    Raises:
        ValueError: if one waits for what nobody sent.
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
                # What it takes to wait, such as copying what arrived, comes after the wait.
                now[rank] = (
                    max([now[rank], *(sent[message] for message in event.waits)]) + event.seconds
                )
                sent |= dict.fromkeys(event.sends, now[rank])
                at[rank] += 1
                going = True
    for place, events in zip(at, processes, strict=True):
        if place < len(events):
            raise ValueError(f"nobody sent {events[place].waits}")
    return max(now)
