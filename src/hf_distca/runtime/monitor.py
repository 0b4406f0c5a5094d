"""Failure propagation between ranks. A rank that gives up tells the other ranks, and wakes those
that wait for it.

Reports (called words in the code) travel through the key-value store of a process group, because a
rank can use the store without other ranks. A rank that gives up writes a report and breaks its
connections. Ranks that wait for it then wake up, read the report and write their own reports. A
process that ends also writes a report, with the error that ended it, if any. A rank without a
report was killed, hangs or runs other code. The text of a report is only shown to users.

Meanwhile a rank may wait in a collective of other code, such as DDP's reduction of gradients. That
collective would report a closed connection late, or end only at its timeout. A thread therefore
polls for the first report and prints it on this rank's stderr.

If a connection breaks while a message is partly received, gloo does not wake the waiting rank,
which then waits until its timeout. A rank that gives up therefore completes its messages under way
first. A rank that is killed cannot do so.

If the node that holds the store fails or cannot be reached, a call of the store ends only when TCP
gives up, after a quarter of an hour. Calls that must not take that long therefore run in a separate
thread, which the caller can abandon.
"""

from __future__ import annotations

import datetime
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from hf_distca.errors import DistCADesyncError, make_printable

if TYPE_CHECKING:
    from hf_distca.runtime.channel import Transfer

NO_NAMES: Mapping[int, str] = MappingProxyType({})

# Seconds that a gloo thread may need when the interpreter ends. Its work takes microseconds, but it
# may have to wait for a processor.
LATE_SECONDS = 0.1
_COUNT = "distca words"  # Key of the number of reports in the store.
_LONGEST_WORD = 400  # Characters of the longest report.
# A store has this many seconds to answer, even after the deadline. Threads have the same time to
# end.
ANSWER_SECONDS = 0.5
BREAK_TAG = 2**31 - 1  # Tags of exchanges are smaller.
_PROBE_TAG = BREAK_TAG - 1  # No rank receives messages with this tag.
# Texts in gloo's errors that mean that all connections are closed. Other errors concern one
# connection.
_ALL_CLOSED = ("Timed out", "Application timeout")
_SILENT = "is silent (dead, stuck, or running something else): look at its log"
_ENDED = "has ended: its script was over, or called sys.exit"
_CLOSED = "has closed its connection without a word: look at its log"
_CLOSED_ERRORS = ("Connection closed", "Connection reset", "Broken pipe")  # texts in gloo's errors
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def compute_reserved_seconds(timeout_seconds: float) -> float:
    """Return the seconds of the timeout that are reserved for reading other ranks' reports."""
    return min(timeout_seconds / 10, 5.0)


class AwaitedThread(threading.Thread):
    """A thread that starts at once. An ending interpreter waits up to half a second for it.

    torch and compiled code release the GIL, and abort the process if they request it while the
    interpreter ends.
    """

    def __init__(self, run: Callable[[], object], name: str) -> None:
        super().__init__(target=run, name=f"distca {name}", daemon=True)
        self.start()


class FailureMonitor:
    """Reports failures of this rank to its group, and reads the reports of other ranks.

    Attributes:
        last_collective: the last collective that all ranks completed.
        ranks: global ranks of the group.
        under_way: transfers that may still be under way.
        pollers: number of ranks that poll the store for reports, including ranks of other groups.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        timeout_seconds: float,
        links: tuple[dist.ProcessGroup, ...],
        names: Mapping[int, str] = NO_NAMES,
    ) -> None:
        self.last_collective = "making the attention group"
        self.under_way: WeakSet[Transfer] = WeakSet()
        self.pollers = max(len(ranks), dist.get_world_size() if dist.is_initialized() else 1)
        self.ranks, self._rank, self._timeout_seconds, self._links = (
            ranks,
            rank,
            timeout_seconds,
            links,
        )
        self._names = {rank: names.get(rank, f"rank {rank}") for rank in ranks}
        self._store = links[-1].get_group_store()
        self._word: str | None = None

    @contextmanager
    def watch_collective(self, activity: str) -> Iterator[None]:
        """Return a context manager for a collective of all ranks.

        Raises:
            DistCADesyncError: if a rank does not come in time.
        """
        try:
            yield
        except RuntimeError as error:
            raise self.give_up(activity, error) from error
        self.last_collective = activity

    @contextmanager
    def report_errors(self, activity: str) -> Iterator[None]:
        """Return a context manager that reports an exception to the other ranks."""
        try:
            yield
        except DistCADesyncError:
            raise  # other ranks raise it too, or know of it
        except BaseException as error:
            self.leave(f"raised {type(error).__name__} while {activity}: {_get_text(error)}")
            raise

    def compute_deadline(self) -> float:
        """Return the deadline for reports that are written or read now, as a value of
        `time.monotonic()`.
        """
        return time.monotonic() + compute_reserved_seconds(self._timeout_seconds)

    @property
    def has_left(self) -> bool:
        """True if this rank has left the group."""
        return self._word is not None

    def leave(self, word: str, deadline: float | None = None) -> None:
        """Leave the group and tell the other ranks why, with a text such as "was told to end".

        Do nothing if this rank has already left. This may take until `time.monotonic()` reaches the
        deadline, by default `self.compute_deadline()`.
        """
        if self._word is not None:
            return
        deadline = self.compute_deadline() if deadline is None else deadline
        self._word = _shorten(word)
        entry = f"{self.ranks[self._rank]} {self._word}"
        _query_store(
            lambda: self._store.set(_make_failure_key(self._store.add(_COUNT, 1)), entry), deadline
        )
        for transfer in tuple(self.under_way):
            transfer.drain(deadline)
        for link in self._links:
            _break_link(link)

    def leave_after_others(self) -> bool:
        """Leave the group if another rank has left it, or if the store does not answer.

        Return whether this rank left.
        """
        counts: list[int] = []
        _query_store(lambda: counts.append(self._store.add(_COUNT, 0)), self.compute_deadline())
        if counts == [0]:
            return False
        self.leave("left because another rank had")
        return True

    def give_up(self, activity: str, error: Exception) -> DistCADesyncError:
        """Leave the group because other ranks did not come.

        This may take as many seconds as `compute_reserved_seconds` returns.

        Returns:
            The error to raise. It says what each rank was doing.
        """
        rank_here = self.ranks[self._rank]
        if self._word:
            happened = (
                f"had left the group of ranks {self.ranks} before {activity}: it"
                f" {self._word.rstrip('.')}. Call hf_distca.configure on all ranks for a new group"
            )
        elif any(text in str(error) for text in _CLOSED_ERRORS):
            happened = f"was {activity} when a connection among ranks {self.ranks} was closed"
        else:
            happened = (
                f"waited up to {self._timeout_seconds:g} s for ranks {self.ranks} while {activity},"
                " and not all came"
            )
        seen = dict.fromkeys(self.ranks, _SILENT) | dict.fromkeys(self._find_closed(), _CLOSED)
        deadline = self.compute_deadline()
        self.leave(f"waited in vain while {activity}", deadline)
        words: dict[int, tuple[int, str]] = {}
        _query_store(partial(self._read_words, words, deadline - LATE_SECONDS), deadline)
        others = self._describe(seen, words)
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        return DistCADesyncError(
            f"{self._names[rank_here]} {happened}. The others: {others}. All ranks were"
            f" last together when {self.last_collective}. Every rank must run the same"
            " number of training forwards and backwards through the same layers: look at the other"
            " ranks' logs for one that failed, stopped early or is still in another step."
            f" ({first_line})"
        )

    def _describe(self, seen: Mapping[int, str], words: Mapping[int, tuple[int, str]]) -> str:
        """Describe the other ranks by their reports. If a rank has no report, use its text in
        `seen`.
        """
        texts = {**seen, **{rank: word or _ENDED for rank, word in words.values()}}
        here = self.ranks[self._rank]
        return "; ".join(
            f"{self._names[rank]} {texts[rank]}" for rank in sorted(texts) if rank != here
        ).rstrip(".")

    @property
    def first_failure(self) -> str:
        """Name and report of the first rank that left.

        The text is "" if no rank left, if the first rank ended without an error, or if its report
        is unknown.
        """
        first: list[tuple[int, str] | None] = []
        _query_store(lambda: first.append(self._read(1)), self.compute_deadline())
        rank, word = next(iter(first), None) or (0, "")
        return f"{self._names[rank]} {word}" if word else ""

    def poll(self) -> bool:
        """Print the first report in the store, if another rank wrote it.

        Return whether to poll again.
        """
        if self.has_left:
            return False
        try:
            first = self._read(1)
        except RuntimeError:
            return False  # the process that holds the store has ended
        if first is None:
            return True
        rank, word = first
        if word and rank != self.ranks[self._rank] and not self.has_left:
            _print_error(
                f"{self._names[rank]} has left the attention group of ranks {self.ranks}: it {word}"
            )
            # Over gloo, the rank that left has already broken its links.
            for link in self._links:
                if link.name() != "gloo":
                    _break_link(link)
        return False

    def announce_exit(self, error: BaseException | None) -> bool:
        """Tell the other ranks that this process ends, and with which error.

        After an error, also print which ranks ended earlier. Return whether the store disappears
        when the process that holds it ends. If this rank has already left the group, do nothing and
        return False.
        """
        if self.has_left:
            return False
        if error is not None:
            if closed := self._find_closed():
                words: dict[int, tuple[int, str]] = {}
                with suppress(RuntimeError):
                    self._read_words(words, deadline=0.0)
                others = self._describe(dict.fromkeys(closed, _CLOSED), words)
                _print_error(f"before {self._names[self.ranks[self._rank]]} ended: {others}")
            self.leave(f"ended with {type(error).__name__}: {_get_text(error)}")
        else:
            with suppress(RuntimeError):
                key = _make_failure_key(self._store.add(_COUNT, 1))
                self._store.set(key, f"{self.ranks[self._rank]} ")
        return is_served_by_process(self._store)

    def _find_closed(self) -> list[int]:
        """Find the ranks that are known to have closed a gloo connection to this rank."""
        return [
            rank
            for index, rank in enumerate(self.ranks)
            if index != self._rank
            and any(_is_closed(link, index) for link in self._links if link.name() == "gloo")
        ]

    def _read_words(self, words: dict[int, tuple[int, str]], deadline: float) -> None:
        """Collect the reports of ranks that have left, including this rank.

        Stop when all ranks have left, or when the deadline has passed.
        """
        pause = 0.02
        while True:
            for number in set(range(1, self._store.add(_COUNT, 0) + 1)) - words.keys():
                # A counted report may be missing, because a rank counts its report before it writes
                # it.
                if (word := self._read(number)) is not None:
                    words[number] = word
            if len(words) == len(self.ranks) or time.monotonic() >= deadline:
                return
            time.sleep(min(pause, max(deadline - time.monotonic(), 0.0)))
            pause = min(1.5 * pause, 0.25)

    def _read(self, number: int) -> tuple[int, str] | None:
        """Return rank and text of report `number`; None if no rank of the group has written it."""
        key = _make_failure_key(number)
        if not self._store.check([key]):
            return None
        entry = self._store.get(key).decode(errors="replace")
        writer = next((rank for rank in self.ranks if entry.startswith(f"{rank} ")), None)
        return None if writer is None else (writer, make_printable(entry.partition(" ")[2]))


def _query_store(question: Callable[[], None], deadline: float) -> None:
    """Query a store, and wait at most until the deadline.

    If the store is lost, the query ends without an answer and without an error.
    """

    def ask() -> None:
        with suppress(RuntimeError):
            question()

    try:
        thread = AwaitedThread(ask, "question")
    except RuntimeError:  # Python 3.12 and later start no threads at exit
        ask()
    else:
        thread.join(max(deadline - time.monotonic(), ANSWER_SECONDS))


def is_served_by_process(store: Any) -> bool:
    """Return whether a store disappears when the process that holds it ends.

    A `TCPStore` does, even if stores that add a prefix wrap it.
    """
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return type(store).__name__ == "TCPStore"


def _make_failure_key(number: int) -> str:
    return f"distca word {number}"


def _get_text(error: BaseException) -> str:
    """Return the text of an error, even if its `__str__` raises."""
    try:
        return str(error)
    except Exception as second:
        return f"(its text cannot be printed: {type(second).__name__})"


def _shorten(word: str) -> str:
    """Make a report printable, and shorten it to `_LONGEST_WORD` characters."""
    shown = make_printable(word[: _LONGEST_WORD + 1]).rstrip(": ")
    return shown if len(shown) <= _LONGEST_WORD else shown[:_LONGEST_WORD] + "..."


def _is_closed(link: dist.ProcessGroup, peer: int) -> bool:
    """Return whether a peer is known to have closed its connection, so that gloo cannot send."""
    try:
        dist.isend(_NOTHING, group=link, group_dst=peer, tag=_PROBE_TAG)
    except (RuntimeError, ValueError) as error:  # ValueError: the user has destroyed the group
        return any(text in str(error) for text in _CLOSED_ERRORS)
    return False


def _break_link(link: dist.ProcessGroup) -> None:
    """Wake all ranks and threads that wait for messages of a group.

    A gloo group closes its connections only when a wait times out, so this function lets a short
    wait time out.
    """
    if link.name() != "gloo":
        with suppress(RuntimeError):
            link.abort()
        return
    for peer in range(link.size()):
        try:
            never = (
                None
                if peer == link.rank()
                else dist.irecv(_NOTHING, group=link, group_src=peer, tag=BREAK_TAG)
            )
            if never is not None:
                never.wait(datetime.timedelta(milliseconds=1))
        except RuntimeError as error:
            if any(text in str(error) for text in _ALL_CLOSED):
                return


def _print_error(text: str) -> None:
    """Write a line to this rank's stderr at once, whatever the logging configuration."""
    sys.stderr.write(f"hf_distca: {text}\n")
    sys.stderr.flush()
