"""`Observer`: the meter of a process, and how rank 0 learns the facts of all ranks.

Ranks put their facts into the store in which they met, and rank 0 reads them: no collective is
called, and a rank that does not come is waited for no longer than some seconds.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from contextlib import suppress

import torch.distributed as dist

from hf_distca.borrowed import PrefixStore, Store, store_of_world
from hf_distca.integration.processes import print_lines
from hf_distca.observe.findings import Findings, find
from hf_distca.observe.watch import BatchFacts, start_watch, stop_watch

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
        self._rank, self._parts = 0, 0
        self._queues: list[deque[BatchFacts]] = [deque()]  # of each rank, until all have come
        self._read = [0]  # parts that were read of each rank
        self._missing: list[int] = []  # ranks that did not come
        self._unread, self._reason, self._attention = 0, "", ""

    def gather(self, *, wait: bool = True, end: bool = False) -> None:
        """Give the facts of this rank to rank 0; on rank 0, read those of all ranks.

        All ranks call it equally often.

        Args:
            wait: on rank 0, wait for the others.
            end: wait for what the device computes.
        """
        facts = self._watch.take(end=end)
        part = self._parts
        self._parts += 1
        with suppress(RuntimeError):  # of a store whose process has ended
            if self._rank:
                if self._store is not None:
                    self._store.set(f"{self._rank}/{part}", json.dumps(facts))
                return
            self._queues[0].extend(facts)
            if self._store is not None and not self._missing:
                self._read_parts(self._store, part, time.monotonic() + _PATIENCE * wait)
                self._missing = [rank for rank, n in enumerate(self._read) if wait and n <= part]
        if self._missing:  # nothing more can be compared
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
        if len(self._watch) > _MOST_BATCHES:
            self.gather(wait=False)

    def _read_parts(self, store: Store, last: int, deadline: float) -> None:
        """Read the facts that other ranks have put into the store up to a part, in their order."""
        self._read[0] = last + 1
        for rank, queue in enumerate(self._queues):
            while self._read[rank] <= last:
                key = f"{rank}/{self._read[rank]}"
                if store.check([key]):
                    queue.extend(BatchFacts(*row) for row in json.loads(store.get(key)))
                    store.delete_key(key)
                    self._read[rank] += 1
                elif time.monotonic() > deadline:
                    break
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
