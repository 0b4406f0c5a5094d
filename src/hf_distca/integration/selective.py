"""Keeps core attention out of the sight of selective activation checkpointing.

Selective checkpointing (a `context_fn` with a policy) numbers the operations of a layer in the first forward and finds what it
saved by these numbers in the recompute. The recompute of distca runs no kernel, no exchange and no planning, so the numbers
would shift and later operations of the layer would get each other's results. Nothing is lost: distca keeps its outputs itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from hf_distca.borrowed import dispatch_modes, is_policy_mode, without_dispatch_modes

__all__ = ["unseen_by_policies"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def unseen_by_policies(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let `function` run without dispatch modes where a checkpointing policy is among them."""

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not any(is_policy_mode(mode) for mode in dispatch_modes()):
            return function(*args, **kwargs)
        with without_dispatch_modes():
            return function(*args, **kwargs)

    return call
