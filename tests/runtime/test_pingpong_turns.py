from __future__ import annotations

import contextvars
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch.distributed._composable import checkpoint as by_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import forks
from hf_distca.runtime.pingpong import (
    find_checkpointed_parts,
    run_nano_batches,
    yield_to_other_nano_batch,
)

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


def walk(name: str, steps: int, seen: list[str]) -> str:
    for number in range(steps):
        seen.append(f"{name}{number}")
        yield_to_other_nano_batch()
    return name


@pytest.mark.parametrize(("first", "second"), [(0, 0), (2, 2), (3, 1), (1, 3)])
def test_nano_batches_take_turns(first: int, second: int) -> None:
    seen: list[str] = []
    halves = partial(walk, "a", first, seen), partial(walk, "b", second, seen)
    assert run_nano_batches(*halves, "cpu") == ("a", "b")
    turns = max(first, second)
    expected = [
        f"{name}{n}"
        for n in range(turns)
        for name, steps in (("a", first), ("b", second))
        if n < steps
    ]
    assert seen == expected


def test_a_yield_outside_of_nano_batches_does_nothing() -> None:
    yield_to_other_nano_batch()


def test_each_nano_batch_has_its_own_modes_and_the_callers_context() -> None:
    VARIABLE.set("the caller's")

    def half() -> list[object]:
        modes: list[object] = [VARIABLE.get()]
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            yield_to_other_nano_batch()
            modes += seen()
            yield_to_other_nano_batch()
        yield_to_other_nano_batch()
        return [*modes, *seen()]

    def seen() -> list[bool]:
        return [
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_cache_enabled(),
        ]

    expected = ["the caller's", False, True, False, True, False, True]
    assert run_nano_batches(half, half, "cpu") == (expected, expected)
    assert seen() == [True, False, True]


def test_each_nano_batch_has_its_own_hooks_on_saved_tensors() -> None:
    """Hooks are nested and around attention, as with activation checkpointing. The hooks of the
    caller stay below them.
    """
    packed: list[str] = []

    def hooks(name: str) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(
            lambda t: packed.append(name) or t, lambda t: t
        )

    def save() -> None:
        torch.ones((), requires_grad=True).exp()

    def half(name: str) -> None:
        save()
        yield_to_other_nano_batch()
        with hooks(f"{name} outer"):
            with hooks(f"{name} inner"):
                yield_to_other_nano_batch()
                save()
                yield_to_other_nano_batch()
            yield_to_other_nano_batch()
            save()
        yield_to_other_nano_batch()
        save()

    with hooks("the caller's"):
        run_nano_batches(partial(half, "a"), partial(half, "b"), "cpu")
        save()
    save()
    both = [f"{name} {place}" for place in ("inner", "outer") for name in "ab"]
    assert packed == ["the caller's"] * 2 + both + ["the caller's"] * 3


def test_a_nano_batch_that_disables_hooks_affects_no_other() -> None:
    def allowed() -> bool:
        return torch._C._autograd._saved_tensors_hooks_is_enabled()

    def forbids() -> list[bool]:
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            yield_to_other_nano_batch()
            seen = [allowed()]
        yield_to_other_nano_batch()
        return [*seen, allowed()]

    def checkpoints() -> list[bool]:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            seen = [allowed()]
            yield_to_other_nano_batch()
        return [*seen, allowed()]

    assert run_nano_batches(forbids, checkpoints, "cpu") == ([False, True], [True, True])
    assert allowed()


def test_checkpointed_parts_of_a_layer_are_found() -> None:
    layer = torch.nn.Module()
    layer.attention, layer.mlp, layer.norm = (torch.nn.Linear(2, 2) for _ in range(3))
    assert find_checkpointed_parts(layer) == []
    layer.attention = checkpoint_wrapper(layer.attention)
    by_hooks(layer.mlp)
    assert find_checkpointed_parts(layer) == [layer.attention, layer.mlp]
    assert find_checkpointed_parts(layer.mlp) == []
    wrapped = checkpoint_wrapper(layer)._checkpoint_wrapped_module
    assert find_checkpointed_parts(wrapped) == [layer.attention, layer.mlp]


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_one_nano_batch_unwinds_the_other(failing: int) -> None:
    unwound: list[int] = []

    def half(place: int) -> None:
        try:
            with torch.no_grad():
                yield_to_other_nano_batch()
                if place == failing:
                    raise ZeroDivisionError(place)
                yield_to_other_nano_batch()
                yield_to_other_nano_batch()
        finally:
            unwound.append(place)

    with pytest.raises(ZeroDivisionError) as caught:
        run_nano_batches(partial(half, 0), partial(half, 1), "cpu")
    assert unwound == [failing, 1 - failing]
    assert caught.traceback[-1].name == "half"
    assert torch.is_grad_enabled()


def fail_during_a_checkpoint(failing: int, inside: bool) -> None:
    """Raise in one nano-batch while the other checkpoints, inside the caller's hooks or not."""

    def attention(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        yield_to_other_nano_batch()
        yield_to_other_nano_batch()
        return y * x

    def half(place: int) -> torch.Tensor:
        if place == failing:
            yield_to_other_nano_batch()
            raise ZeroDivisionError(place)
        return checkpoint(attention, torch.ones(1, requires_grad=True), use_reentrant=False)

    packed: list[torch.Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t)
        if inside
        else nullcontext()
    ):
        with pytest.raises(ZeroDivisionError):
            run_nano_batches(partial(half, 0), partial(half, 1), "cpu")
        before = len(packed)
        torch.ones((), requires_grad=True).exp()
        assert len(packed) == before + int(inside), "only the caller's hooks are active again"
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def fail_in_all_ways() -> None:
    for failing, inside in product((0, 1), (False, True)):
        fail_during_a_checkpoint(failing, inside)


def test_an_error_during_a_checkpoint_restores_the_callers_hooks() -> None:
    """This runs in another process: removing hooks from the wrong stack may end the process."""
    process = forks.start(fail_in_all_ways)
    process.join(60)
    assert process.exitcode == 0
