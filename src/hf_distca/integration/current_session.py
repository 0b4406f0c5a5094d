"""The session of this process, and how it is replaced."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hf_distca.config import DistCAConfig
from hf_distca.integration.session import Session

__all__ = ["current_session", "keep_session", "use_session"]

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
    base = _configured
    alike = config is None and group is None
    _session = (
        base if alike else Session(config or base.config, base.given if group is None else group)
    )
    return _session


def keep_session(session: Session) -> Session:
    """Make a session the one that callbacks without settings of their own use, and the current
    one.
    """
    global _configured
    _configured = session
    return use_session()
