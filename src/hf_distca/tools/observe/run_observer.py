"""`Observer`: the meter of a process, and how rank 0 learns the facts of all ranks.

Ranks put their facts into the store in which they met, and rank 0 reads them: no collective is
called, and a rank that does not come is waited for no longer than some seconds.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, deque
from contextlib import suppress

import torch.distributed as dist

from hf_distca.borrowed import PrefixStore, Store, store_of_world
from hf_distca.integration.processes import print_lines
from hf_distca.tools.observe.findings import Findings, find
from hf_distca.tools.observe.watch import BatchFacts, start_watch, stop_watch

_PATIENCE = 5.0  # seconds that rank 0 waits for facts of the others
_MOST_BATCHES = 256  # that wait for a log, before they are gathered without one


class Observer:
    """The meter of this process, which watches from now on; all ranks make theirs in one order."""

    _count_made = 0

    def __init__(self) -> None:
        Observer._count_made += 1
        self._name = f"hf_distca_observe/{Observer._count_made}"
        self._total = self._since = Findings()
        self._watch = start_watch(self._follow)
        self._store: Store | None = None
        self._rank, self._logs = 0, 0
        self._parts = 0  # that this rank has put into the store
        self._queues: list[deque[BatchFacts]] = [deque()]  # of each rank, until all have come
        self._read = [0]  # parts that were read of each rank
        self._heard = Counter[int]()  # logs that each rank had reached with the last of them
        self._missing: list[int] = []  # ranks that did not come
        self._unread, self._reason, self._attention = 0, "", ""

    def gather(self, *, is_log: bool = True, end: bool = False) -> None:
        """Give the facts of this rank to rank 0; on rank 0, read those of all ranks.

        Args:
            is_log: this is a log, to which all ranks come equally often; rank 0 waits for the
                others.
            end: wait for what the device computes.
        """
        facts = self._watch.take(end=end)
        self._logs += is_log
        store = self._store
        with suppress(RuntimeError):  # of a store whose process has ended
            if self._rank and store is not None:
                store.set(f"{self._rank}/{self._parts}", json.dumps((self._logs, facts)))
                self._parts += 1
            if self._rank:
                return
            self._queues[0].extend(facts)
            if store is not None and not self._missing:
                deadline = time.monotonic() + _PATIENCE * is_log
                for rank in range(1, len(self._queues)):
                    self._read_parts(store, rank, deadline)
                self._missing = [rank for rank, n in enumerate(self._read) if rank and not n]
                self._missing *= is_log
        if self._missing:  # nothing can be compared
            stop_watch(self._watch)
        while all(self._queues):
            self._count([queue.popleft() for queue in self._queues])

    def take_figures(self) -> dict[str, float]:
        """Return the figures since they were last taken, for a log of rank 0."""
        findings = self._since
        self._since = Findings()
        return {name: round(value, 4) for name, value in findings.compute_figures().items()}

    def end(self) -> None:
        """Watch no more; say on rank 0 what was found, if any model was seen to train."""
        self.gather(end=True)
        stop_watch(self._watch)
        ranks = len(self._queues)
        total = self._total
        notes = (
            (self._unread, f"  unread    {self._unread} micro-batches: {self._reason}"),
            (
                self._watch.unattended,
                f"  unseen    {self._watch.unattended} forwards called no causal attention through"
                " transformers' interface: compiled models and attention of their own cannot be"
                " watched",
            ),
            (
                self._missing,
                f"  missing   facts of ranks {self._missing}: put the meter on them, too",
            ),
            (
                ranks == 1,
                "  alone     one process has nobody to share with: start one for each GPU, with"
                " torchrun or accelerate launch",
            ),
        )
        lines = [text for count, text in notes if count]
        if self._rank or not (total.batches or lines):
            return
        if total.batches:
            lines = total.describe(self._attention) + lines
        first = (
            f"distca watched {total.batches} micro-batches on {ranks} rank{'s' * (ranks > 1)}, and"
            " changed nothing"
        )
        print_lines("\n".join([first, *lines]))

    def _follow(self) -> None:
        """Join the other ranks once they have met; gather now and then where nothing is logged."""
        if self._store is None and dist.is_available() and dist.is_initialized():
            self._rank, ranks = dist.get_rank(), dist.get_world_size()
            self._store = PrefixStore(self._name, store_of_world())
            self._queues = [deque() for _ in range(ranks)]
            self._read = [0] * ranks
            self.gather(is_log=False)  # so that rank 0 knows who has the meter
        if len(self._watch) > _MOST_BATCHES:
            self.gather(is_log=False)

    def _read_parts(self, store: Store, rank: int, deadline: float) -> None:
        """Read what another rank has put into the store; wait for its part of this log."""
        while True:
            key = f"{rank}/{self._read[rank]}"
            if store.check([key]):
                self._heard[rank], rows = json.loads(store.get(key))
                self._queues[rank].extend(BatchFacts(*row) for row in rows)
                store.delete_key(key)
                self._read[rank] += 1
            elif self._heard[rank] >= self._logs or time.monotonic() > deadline:
                return
            else:
                time.sleep(0.005)

    def _count(self, facts: list[BatchFacts]) -> None:
        """Add a micro-batch to the findings, from the facts of all ranks."""
        unread = next((fact.unread for fact in facts if fact.unread), "")
        self._attention = facts[0].attention
        if unread:
            self._unread += 1
            self._reason = self._reason or unread
            return
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        findings = find(
            facts,
            per_node if per_node and len(facts) % per_node == 0 else None,
            plans=self._total.may_plan,
        )
        self._total += findings
        self._since += findings
