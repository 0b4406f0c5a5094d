"""When a stage runs which micro-batch, and which calls of attention the stages make together then.

A *tick* is a forward or a backward of one micro-batch on every stage that has one. All stages are in a forward tick, or all in a
backward tick, so that one plan holds the attention of all of them. In round i, stage s of p runs forward micro-batch i - s and
then backward micro-batch i - 2 (p - 1) + s. That is as many ticks as 1F1B takes; stage s holds the activations of at most
2 (p - s) - 1 micro-batches, where 1F1B holds p - s.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

__all__ = ["Tick", "Turn", "merged", "ticks"]

T = TypeVar("T", bound=Hashable)


class Tick(NamedTuple):
    """What all stages do at once.

    Attributes:
        number: of the tick in its step, from 0.
        backward: whether it is one of backward.
        micro_batches: of each stage, None for those without one.
    """

    number: int
    backward: bool
    micro_batches: tuple[int | None, ...]

    @property
    def busy(self) -> list[bool]:
        """Whether each stage has a micro-batch."""
        return [at is not None for at in self.micro_batches]

    def __str__(self) -> str:
        running = ((stage, at) for stage, at in enumerate(self.micro_batches) if at is not None)
        named = ", ".join(f"micro-batch {at} on stage {stage}" for stage, at in running)
        return f"{'backward' if self.backward else 'forward'} tick {self.number} ({named})"


def ticks(stages: int, micro_batches: int, *, backward: bool = True) -> list[Tick]:
    """The ticks of a step, in their order.

    Args:
        stages: how many stages there are.
        micro_batches: how many there are.
        backward: whether there are backward ticks, as in training.
    """
    found: list[Tick] = []
    for round_ in range(micro_batches + 2 * (stages - 1)):
        forward = [round_ - stage for stage in range(stages)]
        back = [round_ - 2 * (stages - 1) + stage for stage in range(stages)]
        for direction, numbers in ((False, forward), (True, back)):
            held = tuple(at if 0 <= at < micro_batches else None for at in numbers)
            if (backward or not direction) and any(at is not None for at in held):
                found.append(Tick(len(found), direction, held))
    return found


@dataclass(frozen=True)
class Turn(Generic[T]):
    """A call of attention that stages make together.

    Attributes:
        kind: what they have in common.
        calls: of each stage, which of its own calls it is, in the order of its forward; None for those that have no part in it.
    """

    kind: T
    calls: tuple[int | None, ...]


def merged(stages: Sequence[Sequence[T]]) -> list[Turn[T]]:
    """The calls of all stages in one order, in which as many stages as can take part in each.

    Only calls of one kind can be made together. The kind that most stages have next goes first; it need not lead to the fewest
    turns, but does so where stages have the same kinds of layers in the same order, up to their number.

    Args:
        stages: the kinds of each stage's calls, in the order of its forward.
    """
    at, turns = [0] * len(stages), list[Turn[T]]()
    while any(place < len(kinds) for place, kinds in zip(at, stages, strict=True)):
        following = [kinds[place] if place < len(kinds) else None for place, kinds in zip(at, stages, strict=True)]
        kind = max((one for one in dict.fromkeys(following) if one is not None), key=following.count)
        turns.append(Turn(kind, tuple(at[stage] if one == kind else None for stage, one in enumerate(following))))
        at = [place + (one == kind) for place, one in zip(at, following, strict=True)]
    return turns
