from __future__ import annotations

import contextvars
from collections.abc import Callable

import pytest
import torch

from hf_distca.runtime.pingpong import run_halves, take_turns

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


def walker(name: str, steps: int, seen: list[str]) -> Callable[[], str]:
    def walk() -> str:
        for number in range(steps):
            seen.append(f"{name}{number}")
            take_turns()
        return name

    return walk


@pytest.mark.parametrize(("first", "second"), [(0, 0), (2, 2), (3, 1), (1, 3)])
def test_halves_take_turns(first: int, second: int) -> None:
    seen: list[str] = []
    assert run_halves(walker("a", first, seen), walker("b", second, seen), "cpu") == ("a", "b")
    turns = max(first, second)
    expected = [f"{name}{n}" for n in range(turns) for name, steps in (("a", first), ("b", second)) if n < steps]
    assert seen == expected


def test_elsewhere_taking_turns_does_nothing() -> None:
    take_turns()


def test_each_half_has_its_own_modes_and_sees_the_callers_context() -> None:
    VARIABLE.set("the caller's")

    def half() -> list[object]:
        modes: list[object] = [VARIABLE.get()]
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            take_turns()
            modes += [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")]
            take_turns()
        take_turns()
        return [*modes, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")]

    expected = ["the caller's", False, True, True, False]
    assert run_halves(half, half, "cpu") == (expected, expected)
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_one_half_unwinds_the_other(failing: int) -> None:
    unwound: list[int] = []

    def half(place: int) -> Callable[[], None]:
        def run() -> None:
            try:
                with torch.no_grad():
                    take_turns()
                    if place == failing:
                        raise ZeroDivisionError(place)
                    take_turns()
                    take_turns()
            finally:
                unwound.append(place)

        return run

    with pytest.raises(ZeroDivisionError) as caught:
        run_halves(half(0), half(1), "cpu")
    assert unwound == [failing, 1 - failing]
    assert caught.traceback[-1].name == "run"
    assert torch.is_grad_enabled()
