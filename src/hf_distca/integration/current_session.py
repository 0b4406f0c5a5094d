"""The session of this process, and how it is configured and replaced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hf_distca.config import DistCAConfig, check_settings
from hf_distca.integration.attention_names import replace_attention
from hf_distca.integration.reports import print_summary
from hf_distca.integration.session import Session

_configured: Session | None = None  # by `configure`, or with the defaults
_session: Session | None = None  # in use: that one, or one of a callback with settings of its own


def current_session() -> Session:
    """Return the session of this process, made with default settings at the first use."""
    return _session or use_session()


def use_session(
    config: DistCAConfig | None = None, group: dist.ProcessGroup | DeviceMesh | None = None
) -> Session:
    """Make a session with these settings the current one: the session of a callback, which no other
    callback inherits.

    Args:
        config, group: see `configure`, which also supplies a missing one; without both, use the
            session that `configure` made.
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
            the data-parallel ranks of the mesh of a model loaded with transformers'
            `DistributedConfig`, or of accelerate's device mesh, else all ranks.
        instead_of: "flash_attention_2", "flash_attention_3", "flash_attention_4", "sdpa", or TRL's
            "tree_fa3", for trainers that take only names they know: from now on, models that this
            process loads with this attention get distca.

    Returns:
        The settings now in use.

    Raises:
        ConfigError: if `config` is not a `DistCAConfig`, or `group` neither a process group nor a
            device mesh.
        UnsupportedError: if `instead_of` is another name, or a package has put its own function in
            its place.
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
    """Switch balancing on or off for the forwards inside. All ranks must enter and leave it at the
    same time.
    """
    session = current_session()
    before = session.config
    session.config = replace(before, balance=enabled)
    try:
        yield
    finally:
        session.config = before


def print_last_summary() -> None:
    """Print the balance of the session in use on the first rank, unless that was done before."""
    session = current_session()
    if not session.has_summary:
        print_summary(session.planner.history.total, session)
