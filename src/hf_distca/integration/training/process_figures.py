"""`metrics` and `trace`: figures and timelines of a process, for loops of any kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from hf_distca.integration.reports import Metrics, read_metrics
from hf_distca.integration.training.callback import find_session
from hf_distca.measure.timeline import Trace


def metrics(*, gather: bool = False) -> Metrics:
    """Return sums of estimates and measurements since `configure`; reading does not reset them.

    For custom logs: ``before = metrics()``, and later ``(metrics(gather=True) -
    before).figures()``. All ranks see the same figures, except ``distca/planning_ms``,
    ``distca/server_time_share``, ``distca/states_mb`` and ``distca/late_compiles``, which are of
    this rank. With one rank or another attention implementation there are none.

    Args:
        gather: let ranks exchange their measurements first, so that all micro-batches up to here
            are in the sums. This takes one small collective, for which all ranks must call it at
            the same point, after a backward, and waits for the device, as reading the loss does.
            Without it nothing is exchanged and a rank may read alone: the sums then contain
            measurements announced with the documents of later micro-batches, so the last
            micro-batch is missing, and on CUDA the last two.

    Raises:
        DistCADesyncError: with `gather`, if not all ranks come.
    """
    session = find_session()
    session.times_local_work = True
    if gather:
        session.gather_measurements()
    return read_metrics(session)


@contextmanager
def trace(folder: str | Path | None = None) -> Iterator[Trace]:
    """Record a timeline of core attention: linear, dispatch, server and return spans of both
    nano-batches and directions.

    Open the files at ui.perfetto.dev or chrome://tracing. On CUDA, recording puts events on the
    stream without waiting; writing waits for the device. With a Trainer, put ``trainer.train()``
    inside, for a few steps: every step is recorded, the first ones as well.

    Args:
        folder: folder in which each rank writes ``rank_<number>.json`` at the end; None to write
            nothing. The page of ``hf-distca report`` shows those in the run's ``output_dir``.

    Yields:
        The trace; ``spans`` and ``hidden`` (the part of the messages' time hidden by computation)
        can be read at any time.
    """
    session, recorded = find_session(), Trace()
    before, session.trace = session.trace, recorded
    try:
        yield recorded
    finally:
        session.trace = before
    if folder is not None:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        recorded.write(Path(folder) / f"rank_{rank}.json", rank)
