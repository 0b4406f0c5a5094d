"""`metrics`: figures of a process, for loops of any kind."""

from __future__ import annotations

from hf_distca.integration.reports import Metrics, read_metrics
from hf_distca.integration.training.callback import find_session


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
