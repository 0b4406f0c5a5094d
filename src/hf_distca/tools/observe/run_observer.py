"""`Observer`: the meter of a process, which sends its facts to rank 0.

Ranks gather their facts over a separate communicator, at each log and sometimes between logs. If a
rank does not come in time, the ranks stop measuring, and training goes on.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hf_distca.integration.processes import print_lines
from hf_distca.runtime.members import find_launched_per_node, make_communicator
from hf_distca.tools.observe.findings import Findings, Row, find
from hf_distca.tools.observe.watch import BatchFacts, Watch

_PATIENCE = 30.0  # seconds that ranks wait for each other
_MOST_BATCHES = 64  # after so many, gather facts even without a log
_MOST_ROWS = 20_000  # micro-batches in the summary; older ones are dropped


class Observer:
    """A meter of this process. All ranks must begin their meters in the same order."""

    def __init__(self) -> None:
        self._rows: deque[Row] = deque(maxlen=_MOST_ROWS)
        self._since: list[Row] = []  # rows since the last log
        self._watch = Watch(self._follow)
        self._group: dist.ProcessGroup | None = None  # the group of all ranks
        self._rank = self._begun = self._unread = 0
        self._queues: list[deque[BatchFacts]] = [deque()]  # facts of each rank, not yet counted
        self._missing = self._reason = self._attention = ""
        self._began = self._logged = time.perf_counter()
        self.begin = self._watch.start

    def gather(self, *, end: bool = False) -> None:
        """Gather the facts of all ranks, and evaluate them on rank 0. All ranks must call this
        equally often.

        Args:
            end: whether to wait for the device first.
        """
        rows = self._exchange(self._watch.take(end=end))
        if self._rank == 0:
            for queue, facts in zip(self._queues, rows, strict=False):
                queue.extend(BatchFacts(*fact) for fact in facts)
            for number in range(count := min(map(len, self._queues))):
                # Planning takes time, so only the last of the gathered micro-batches is planned.
                self._count([queue.popleft() for queue in self._queues], number == count - 1)

    def take_figures(self) -> dict[str, float]:
        """Return the figures of the micro-batches since the last call, for a log of rank 0."""
        rows, elapsed = self._since, time.perf_counter() - self._logged
        self._since, self._logged = [], time.perf_counter()
        figures = Findings(rows, elapsed).compute_figures() if rows else {}
        return {f"distca/observed_{name}": round(value, 4) for name, value in figures.items()}

    def end(self) -> None:
        """Stop measuring. Rank 0 prints its findings if it has seen a model train."""
        if not hasattr(sys, "last_value"):  # after an error, do not wait for other ranks
            self.gather(end=True)
        self._watch.stop()
        ranks, unseen = len(self._queues), self._watch.unattended
        notes = {
            f"  unread    {self._unread} micro-batches: {self._reason}": self._unread,
            f"  unseen    {unseen} forwards called no causal attention through transformers'"
            " interface: compiled models and custom attention cannot be watched": unseen,
            f"  missing   facts of some ranks ({self._missing}): put the meter on all ranks, which"
            f" must reach each log within {_PATIENCE:g} s of each other": self._missing,
            "  alone     one process has nobody to share with: start one process per GPU, with"
            " torchrun or accelerate launch. On CPUs, accelerate launch --cpu --num_processes 2"
            " starts only one process; to start two, use a config file with"
            " distributed_type: MULTI_GPU and use_cpu: true": ranks == 1,
        }
        lines = [text for text, is_true in notes.items() if is_true]
        if self._rows:
            elapsed = time.perf_counter() - self._began
            lines = Findings(self._rows, elapsed).describe(self._attention) + lines
        if self._rank == 0 and self._begun:
            first = f"distca watched {len(self._rows)} micro-batches on {ranks} rank"
            first += "s, and changed nothing" if ranks > 1 else ", and changed nothing"
            print_lines("\n".join([first, *lines]))

    def _follow(self) -> None:
        """Connect to the other ranks in the first micro-batch, and gather facts in some later
        micro-batches.
        """
        self._begun += 1
        has_world = dist.is_available() and dist.is_initialized()
        if self._group is None and has_world and dist.get_world_size() > 1:
            self._rank, ranks = dist.get_rank(), tuple(range(dist.get_world_size()))
            self._queues = [deque() for _ in ranks]
            try:
                self._group = make_communicator(
                    ranks, "gloo", timedelta(seconds=_PATIENCE), "distca-observed"
                )
            except RuntimeError as error:
                self._give_up(error)
        elif self._begun % _MOST_BATCHES == 0:
            self.gather()

    def _exchange(self, facts: list[BatchFacts]) -> Sequence[Sequence[Any]]:
        """Return the facts of each rank, decoded from JSON. If this rank is alone, return only its
        own facts.
        """
        if self._group is None:
            return [facts]
        try:
            text = json.dumps(facts).encode()
            most = int(np.max(_gather_rows(self._group, np.array([len(text)]))))
            text = text.ljust(most)
            rows = _gather_rows(self._group, np.frombuffer(bytearray(text), dtype=np.uint8))
        except RuntimeError as error:
            self._give_up(error)
            return []
        return [json.loads(row.tobytes()) for row in rows]

    def _give_up(self, error: RuntimeError) -> None:
        """Stop measuring, because nothing can be compared without the facts of all ranks."""
        self._missing, self._group = str(error).partition("\n")[0], None
        self._watch.stop()

    def _count(self, facts: list[BatchFacts], plans: bool) -> None:
        """Add a micro-batch to the findings, from the facts of all ranks."""
        self._attention = facts[0].attention
        if unread := next((fact.unread for fact in facts if fact.unread), ""):
            self._unread += 1
            self._reason = self._reason or unread
        else:
            row = find(facts, find_launched_per_node(len(facts)), plans=plans)
            self._rows.append(row)
            self._since.append(row)


def _gather_rows(group: dist.ProcessGroup, row: np.ndarray[Any, Any]) -> list[Any]:
    """Gather arrays of equal shape from all ranks. This works even after the world has ended, when
    functions of torch.distributed no longer know the group.
    """
    own = torch.from_numpy(row)
    rows = [torch.empty_like(own) for _ in range(group.size())]
    group.allgather([rows], [own]).wait()
    return [row.numpy() for row in rows]
