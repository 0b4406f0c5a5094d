"""How a rank that gives up tells the others, and how those that wait hear of it.

Words travel through the key-value store of a process group, which asks nobody to take part. A rank that gives up writes its
word and breaks its connections, so that ranks which wait for it wake up, read the word and write theirs. A rank that is
silent has died, hangs or runs something else. Words are text and are only shown.

gloo does not wake a wait for a message that is half-way when the connection breaks: it lasts until its timeout. So a rank that
gives up sees the messages under way through before; a rank that dies cannot.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist

from hf_distca.errors import DistCADesyncError

__all__ = ["Watch", "patience"]

_LONGEST_WORD = 400  # characters
_BREAK_TAG = 2**31 - 1  # no message has it
_NOTHING = torch.empty(0, dtype=torch.uint8)


def patience(timeout_seconds: float) -> float:
    """Seconds of the timeout that are left for the words of other ranks."""
    return min(timeout_seconds / 10, 5.0)


class Message(Protocol):
    """Something under way between ranks."""

    def see_through(self, deadline: float) -> None:
        """Wait until it has arrived, or until `time.monotonic()` reaches the deadline. Never raises."""


class Watch:
    """What one rank knows of how far the ranks of its group came together.

    Attributes:
        met: what all ranks did together last.
        under_way: messages that may still travel.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, timeout_seconds: float, links: tuple[dist.ProcessGroup, ...]) -> None:
        self.met = "making the attention group"
        self.under_way: WeakSet[Message] = WeakSet()
        self._ranks, self._rank, self._timeout_seconds, self._links = ranks, rank, timeout_seconds, links
        self._store = links[-1].get_group_store()
        self._word: str | None = None

    @contextmanager
    def reporting(self, doing: str) -> Iterator[None]:
        """Tell the other ranks of an exception inside, which nobody else would tell them of."""
        try:
            yield
        except DistCADesyncError:
            raise  # raised on all ranks, or told already
        except Exception as error:
            self._leave(f"raised {type(error).__name__} while {doing}: {error}", self.deadline())
            raise

    def deadline(self) -> float:
        """When `patience` that begins now ends, as `time.monotonic()` counts."""
        return time.monotonic() + patience(self._timeout_seconds)

    def anyone_left(self) -> bool:
        """Whether a rank has left the group, as far as is known now."""
        try:
            return any(self._store.check([_key(rank)]) for rank in self._ranks)
        except RuntimeError:
            return True  # the store was on a rank that died

    def give_up(self, doing: str, error: Exception) -> DistCADesyncError:
        """Leave the group because others did not come. Takes up to `patience` seconds.

        Returns:
            The error to raise, with what each rank was doing.
        """
        own = self._ranks[self._rank]
        before = f" It had left the group: it {self._word}." if self._word else ""
        deadline = self.deadline()
        self._leave(f"waited in vain while {doing}", deadline)
        words = self._words(deadline)
        others = "; ".join(
            f"rank {rank} {words[rank]}" if rank in words else f"rank {rank} is silent (dead, stuck, or running something else)"
            for rank in self._ranks
            if rank != own
        )
        return DistCADesyncError(
            f"rank {own} waited up to {self._timeout_seconds:g} s for ranks {self._ranks} while {doing}, and not all came."
            f"{before} The others: {others}. All ranks were last together when {self.met}. Every rank must run the same number "
            "of training forwards and backwards through the same layers: look at the other ranks' logs for one that failed, "
            f"stopped early or is still in another step. ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        )

    def _leave(self, word: str, deadline: float) -> None:
        if self._word is not None:
            return
        self._word = word if len(word) <= _LONGEST_WORD else word[:_LONGEST_WORD] + "..."
        with suppress(RuntimeError):  # if the store was on a rank that died
            self._store.set(_key(self._ranks[self._rank]), self._word)
        for message in tuple(self.under_way):
            message.see_through(deadline)
        for link in self._links:
            _break(link)

    def _words(self, deadline: float) -> dict[int, str]:
        words: dict[int, str] = {}
        silent = [rank for rank in self._ranks if rank != self._ranks[self._rank]]
        while silent:
            try:
                heard = [rank for rank in silent if self._store.check([_key(rank)])]
                words.update((rank, self._store.get(_key(rank)).decode(errors="replace")) for rank in heard)
            except RuntimeError:
                break  # as above
            silent = [rank for rank in silent if rank not in words]
            if time.monotonic() >= deadline:
                break
            time.sleep(0.02)
        return words


def _key(rank: int) -> str:
    return f"distca word of rank {rank}"


def _break(link: dist.ProcessGroup) -> None:
    """Close the connections of a gloo group: a wait that times out does it, and nothing else does while messages travel."""
    if link.name() != "gloo":
        return
    # All are closed after the first wait; there is none for a rank whose connection is closed already.
    for peer in range(link.size()):
        with suppress(RuntimeError):
            never = None if peer == link.rank() else dist.irecv(_NOTHING, group=link, group_src=peer, tag=_BREAK_TAG)
            if never is not None:
                never.wait(datetime.timedelta(milliseconds=1))
