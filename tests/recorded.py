"""Records the collectives that Python code calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from hf_distca.runtime.channel import Channel
from hf_distca.runtime.group import AttentionGroup

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "broadcast",
    "barrier",
)


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Record the names of the torch.distributed collectives that Python code calls, and the
    exchanges of core attention.
    """
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


class Operations(TorchDispatchMode):
    """Counts the operations of torch by name. A host sync is an operation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_planning() -> Iterator[list[str]]:
    """Record the purposes of the collectives of planning, in the order in which this rank calls
    them.
    """
    seen: list[str] = []

    def spy(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: AttentionGroup, *args: Any, activity: str) -> Any:
            seen.append(f"{name} for {activity}")
            return original(self, *args, activity=activity)

        return call

    with ExitStack() as undo:
        for name in ("gather", "gather_same_length"):
            undo.enter_context(
                patch.object(AttentionGroup, name, spy(name, getattr(AttentionGroup, name)))
            )
        yield seen
