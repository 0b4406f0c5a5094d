"""Streams of a fake GPU: which operations may run at the same time, and whether they touch the same
memory.

Each stream has a clock of its own work and of the work on other streams that it knows to be done. A
stream learns of other work where it waits. Two accesses to the same memory, one of them a write,
race if the stream of the later access does not know of the earlier one. Memory without an owner
returns to the stream that allocated it, whose next work may write there. torch's allocator does the
same, and looks at no other stream. So the stream must then know of all work that used the memory.

Not modelled: the duration of work, the inside of NCCL, and operations that use other streams by
themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_distca.runtime import messages

COMPUTE, LINK = "compute", "link"
Clock = dict[str, int]


@dataclass
class _Memory:
    """The last access of each stream to a piece of memory, by the clock of that stream, and the
    stream that gets the memory when it is freed.
    """

    reference: StorageWeakRef
    home: str
    reads: Clock = field(default_factory=dict)
    writes: Clock = field(default_factory=dict)


class Streams(TorchDispatchMode):
    """Records the operations of all streams.

    Attributes:
        current: the stream that operations go to.
        races: descriptions of possible races.
        log: pairs of a stream and its work (waits, exchanges, tasks), in the order of the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = COMPUTE
        self.races: list[str] = []
        self.log: list[tuple[str, str]] = []
        self._clocks: dict[str, Clock] = defaultdict(dict)
        self._memory: dict[int, _Memory] = {}
        self._freed: list[_Memory] = []
        self._made = 0

    @contextmanager
    def installed(self) -> Iterator[Streams]:
        """Replace torch's streams and record operations."""
        streams = self

        class Stream:
            def __init__(self, device: torch.device, priority: int = 0) -> None:
                assert priority < 0, "other ranks wait for the work of this stream"
                streams._made += 1
                self.name = f"stream {streams._made}"

            def wait_stream(self, other: Any) -> None:
                streams.learn(self.name, streams.known(other.name))

        class Current:
            name = property(lambda self: streams.current)

        @contextmanager
        def stream(other: Stream) -> Iterator[None]:
            before, streams.current = streams.current, other.name
            try:
                yield
            finally:
                streams.current = before

        messages._make_stream.cache_clear()
        fakes = {
            "Stream": Stream,
            "stream": stream,
            "current_stream": lambda device=None: Current(),
        }
        with patch.multiple(torch.cuda, **fakes), self:
            yield self
        messages._make_stream.cache_clear()

    def known(self, stream: str) -> Clock:
        """Return the work that is done when all work of a stream until now is done."""
        return dict(self._clocks[stream])

    def learn(self, stream: str, clock: Clock) -> None:
        """Let a stream wait for the work of a clock."""
        mine = self._clocks[stream]
        for other, time in clock.items():
            mine[other] = max(mine.get(other, 0), time)

    def work(
        self, stream: str, what: str, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]
    ) -> None:
        """Give work to a stream."""
        self._bury()
        clock = self._clocks[stream]
        clock[stream] = clock.get(stream, 0) + 1
        for memory in [memory for memory in self._freed if memory.home == stream]:
            self._freed.remove(memory)
            self._check(
                f"{what} on {stream} may write to memory that was freed",
                clock,
                memory.reads,
                memory.writes,
            )
        for tensor in reads:
            memory = self._of(tensor, stream)
            self._check(f"{what} on {stream} reads", clock, memory.writes)
            memory.reads[stream] = clock[stream]
        for tensor in writes:
            memory = self._of(tensor, stream)
            self._check(f"{what} on {stream} writes", clock, memory.reads, memory.writes)
            memory.writes[stream] = clock[stream]

    def _check(self, activity: str, clock: Clock, *accesses: Clock) -> None:
        for access in accesses:
            for other, time in access.items():
                if clock.get(other, 0) < time:
                    self.races.append(f"{activity} what {other} may be using")

    def _of(self, tensor: torch.Tensor, stream: str) -> _Memory:
        reference = StorageWeakRef(tensor.untyped_storage())
        return self._memory.setdefault(reference.cdata, _Memory(reference, stream))

    def _bury(self) -> None:
        for key in [key for key, memory in self._memory.items() if memory.reference.expired()]:
            self._freed.append(self._memory.pop(key))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [value for value in tree_leaves((args, kwargs)) if _on_gpu(value)]
        result = func(*args, **(kwargs or {}))
        arguments = func._schema.arguments
        is_view = any(
            one.alias_info is not None and not one.alias_info.is_write for one in arguments
        )
        if is_view:
            return result
        written = [
            leaf
            for argument, value in zip(arguments, args, strict=False)
            if argument.alias_info is not None
            for leaf in tree_leaves(value)
            if _on_gpu(leaf)
        ]
        made = [value for value in tree_leaves(result) if _on_gpu(value)]
        if given or made:
            self.work(self.current, str(func), given, [*written, *made])
        return result


def _on_gpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


@dataclass
class Link:
    """A channel over NCCL. Its exchanges run on a separate stream, one after another."""

    streams: Streams
    is_gloo = False

    def start(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive_bytes: Mapping[int, int],
        send_bytes: Mapping[int, int],
        purpose: str,
    ) -> Flight:
        """Start an exchange, like `Channel.start`. Check that the sizes match the messages and keep
        alignment.
        """
        for message, sizes in ((received, receive_bytes), (sent, send_bytes)):
            assert message.dtype == torch.uint8
            assert message.shape == (sum(sizes.values()),)
            assert all(size % 16 == 0 for size in sizes.values())
        self.streams.learn(LINK, self.streams.known(self.streams.current))
        self.streams.work(LINK, purpose, [sent], [received])
        self.streams.log.append((self.streams.current, f"launch {purpose}"))
        return Flight(self, purpose, self.streams.known(LINK), (received, sent))


@dataclass
class Flight:
    """An exchange in progress. It holds its messages until a stream waits for it, as torch does."""

    link: Link
    name: str
    clock: Clock
    held: tuple[torch.Tensor, ...]

    def wait(self) -> None:
        """Let the current stream wait."""
        streams = self.link.streams
        streams.learn(streams.current, self.clock)
        streams.log.append((streams.current, f"wait {self.name}"))
