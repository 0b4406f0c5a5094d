"""The attention group of a rank process, made once: every further one would keep threads of gloo awake."""

from __future__ import annotations

from functools import cache

import torch.distributed as dist

from hf_distca.runtime.group import AttentionGroup


@cache
def shared_group() -> AttentionGroup:
    """The group of all ranks of the pool, or of this process alone."""
    return AttentionGroup.create(timeout_seconds=60) if dist.is_initialized() else AttentionGroup()
