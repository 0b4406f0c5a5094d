"""`configure` and `balancing`: settings of this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError
from hf_distca.integration.attention_names import stand_in
from hf_distca.integration.current_session import current_session, keep_session
from hf_distca.integration.session import Session

__all__ = ["balancing", "configure"]


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
        instead_of: "flash_attention_2", "flash_attention_3", "flash_attention_4" or "sdpa", for
            trainers that take only names they know: from now on, models that this process loads
            with this attention get distca.

    Returns:
        The settings now in use.

    Raises:
        ConfigError: if `config` is not a `DistCAConfig`, or `group` neither a process group nor a
            device mesh.
        UnsupportedError: if `instead_of` is another name, or a package has put its own function in
            its place.
    """
    if config is not None and not isinstance(config, DistCAConfig):
        raise ConfigError(
            f"configure() got {config!r}: give it a DistCAConfig, such as"
            " DistCAConfig(tolerance=0.02)."
        )
    if group is not None and not isinstance(group, (dist.ProcessGroup, DeviceMesh)):
        raise ConfigError(
            f"group={group!r}: give it a process group (torch.distributed.new_group), a mesh, or"
            " leave it out."
        )
    if instead_of is not None:
        stand_in(instead_of)
    return keep_session(Session(config or DistCAConfig(), group)).config


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
