"""Which collectives a piece of Python code calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from hf_distca.runtime.channel import Channel

COLLECTIVES = ("all_gather", "all_gather_into_tensor", "all_reduce", "broadcast", "barrier")


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Names of the collectives of torch.distributed that Python code calls inside, and exchanges of core attention."""
    names: list[str] = []

    def spy(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: object, **kwargs: object) -> object:
            names.append(name)
            return original(*args, **kwargs)

        return call

    with ExitStack() as undo:
        for name in COLLECTIVES:
            undo.enter_context(patch.object(dist, name, spy(name, getattr(dist, name))))
        undo.enter_context(patch.object(Channel, "start", spy("exchange", Channel.start)))
        yield names
