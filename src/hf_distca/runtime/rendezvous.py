"""A gathering of integers for which no rank waits: it proceeds while the ranks compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from hf_distca.errors import DistCADesyncError
from hf_distca.runtime.monitor import AwaitedThread, FailureMonitor
from hf_distca.schedule.layout import IntArray


class Rendezvous:
    """Rows of integers on their way from all ranks.

    Args:
        rows: (ranks, width) tensor that receives them; the first number of a row is its length.
        work: the collective that fills it; None if it is done.
        on_arrival: called with the rows once they have arrived, in a thread of its own. It raises
            `DistCADesyncError` if they show that the ranks do different things; then `monitor`
            wakes this rank from its wait for the others.
        monitor: of the group; None for a group without messages.
        doing: description of what the ranks are doing, for errors.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        work: dist.Work | None,
        on_arrival: Callable[[Sequence[IntArray]], object],
        monitor: FailureMonitor | None,
        doing: str,
    ) -> None:
        self._rows, self._work, self._on_arrival, self._monitor, self._doing = (
            rows,
            work,
            on_arrival,
            monitor,
            doing,
        )
        self._lost: RuntimeError | None = None  # of the collective: others did not come
        self._failure: Exception | None = None  # of what was to be done with the rows
        self._thread = AwaitedThread(self._attend, "meeting")

    @property
    def is_done(self) -> bool:
        """True if it is over, with or without success. Never waits.

        Raises:
            DistCADesyncError: if the ranks do not do the same, or not all came.
            Exception: any other error that `on_arrival` raised.
        """
        if self._thread.is_alive():
            return False
        if self._lost is not None:
            raise (
                self._lost
                if self._monitor is None
                else self._monitor.give_up(self._doing, self._lost)
            )
        if self._failure is not None:
            raise self._failure
        return True

    @property
    def rows(self) -> list[IntArray]:
        """Row of each rank; only when it is done."""
        return [row[1 : 1 + row[0]] for row in self._rows.numpy()]

    def wait(self) -> None:
        """Wait until it is over; errors are those of `is_done`."""
        self._thread.join()
        _ = self.is_done

    def _attend(self) -> None:
        try:
            if self._work is not None:
                self._work.wait()
        except RuntimeError as error:
            self._lost = error
            if self._monitor is not None:
                self._monitor.report_timeout(self._doing, error)
            return
        try:
            self._on_arrival(self.rows)
        except Exception as error:
            # A thread would drop it, and ranks that were never compared would pass for equal.
            self._failure = error
            if self._monitor is not None and isinstance(error, DistCADesyncError):
                self._monitor.abort_with(error)
