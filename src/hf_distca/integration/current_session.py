"""The session of this process, and the functions that configure it and read its figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hf_distca.config import DistCAConfig, check_settings
from hf_distca.integration.attention_names import replace_attention
from hf_distca.integration.reports import Metrics, print_summary, read_metrics
from hf_distca.integration.session import Session

_configured: Session | None = None  # has the settings given to `configure`, or default settings
_session: Session | None = None  # the session in use: `_configured`, or the session of a callback


def current_session() -> Session:
    """Return the session of this process. The first use makes it with default settings."""
    return _session or use_session()


def use_session(
    config: DistCAConfig | None = None, group: dist.ProcessGroup | DeviceMesh | None = None
) -> Session:
    """Switch to a session with these settings. Each callback calls this function, because the
    session of another callback may be in use.

    Args:
        config, group: see `configure`. If one of them is None, the value given to `configure` is
            used. If both are None, the session that `configure` made is used.
    """
    global _configured, _session
    if _configured is None:
        _configured = Session(DistCAConfig())
    if config is None and group is None:
        _session = _configured
    else:
        group = _configured.given_group if group is None else group
        _session = Session(config or _configured.config, group)
    return _session


def configure(
    config: DistCAConfig | None = None,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    instead_of: str | None = None,
) -> DistCAConfig:
    """Configure distca in this process, once, before training.

    Every rank must give the same settings.

    Args:
        config: settings; the defaults if None.
        group: the ranks that share core attention, as a process group or a device mesh. By default
            they are the data-parallel ranks of a device mesh: the mesh of a model loaded with
            transformers' `DistributedConfig`, or accelerate's mesh. Without a mesh they are all
            ranks.
        instead_of: "flash_attention_2", "flash_attention_3", "flash_attention_4", "sdpa", or TRL's
            "tree_fa3", for trainers that accept only names they know. From now on, models that this
            process loads with this attention get distca.

    Returns:
        The settings now in use.

    Raises:
        ConfigError: if `config` is not a `DistCAConfig`, or `group` is neither a process group nor
            a device mesh.
        UnsupportedError: if `instead_of` is another name, or a package has replaced the function
            of this name.
    """
    check_settings(config, "configure()")
    session = Session(config or DistCAConfig(), group)
    if instead_of is not None:
        replace_attention(instead_of)
    global _configured
    _configured = session
    return use_session().config


@contextmanager
def balancing(enabled: bool) -> Iterator[None]:
    """Switch balancing on or off for the forwards in a ``with`` block. All ranks must enter and
    leave the block at the same time.
    """
    session = current_session()
    before = session.config
    session.config = replace(before, balance=enabled)
    try:
        yield
    finally:
        session.config = before


def metrics(*, gather: bool = False) -> Metrics:
    """Return sums of estimates and measurements since `configure`; reading does not reset them.

    For custom logs: ``before = metrics()``, and later ``(metrics(gather=True) -
    before).figures()``. All ranks see the same figures, except ``distca/planning_ms``,
    ``distca/server_time_share``, ``distca/states_mb`` and ``distca/late_compiles``, which are this
    rank's own. There are no figures if there is only one rank, or if no model runs distca.

    Args:
        gather: if True, ranks first exchange their measurements, so that the sums contain all
            micro-batches up to here. All ranks must call `metrics` at the same point, after a
            backward. The exchange is one small collective, and waits for the device, like reading
            the loss. If False, nothing is exchanged, and a rank may call `metrics` alone. The sums
            lack measurements of the last micro-batch, and on CUDA of the last two, because ranks
            announce measurements with the documents of later micro-batches.

    Raises:
        DistCADesyncError: with `gather`, if not all ranks call this.
    """
    session = current_session()
    session.times_local_work = True
    if gather:
        session.gather_measurements()
    return read_metrics(session)


def print_last_summary() -> None:
    """Print the balance of the current session on the first rank, if it was not printed before."""
    session = current_session()
    if not session.has_summary:
        print_summary(session.planner.history.total, session)
