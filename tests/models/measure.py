"""Measures how distca works with a causal-LM type, by a run on one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from unittest.mock import patch

import torch
from compare import (
    PACKED,
    ROWS,
    TOLERANCE,
    Mode,
    Outcome,
    alone,
    difference,
    packed,
    packed_by_collator,
    packed_with_dense_mask,
    packed_with_mask_of_ones,
    packed_with_numbered_mask,
    padded,
    quiet,
    rows,
    run,
    takes,
    without_table,
)
from tiny import MODEL_TYPES, build, class_of

import hf_distca
from hf_distca import DistCAError, UnsupportedError
from hf_distca.hybrids.recurrent_layers import RECURRENT_MODULES
from hf_distca.integration.handle import ForwardBatch, LayerPlanner
from hf_distca.integration.hooks import nano_batch_layers

# The statuses of types that work, and their names in families.py.
WORKING = {
    "proven": "PROVEN",
    "packed": "PACKED",
    "carries state": "CARRIES_STATE",
    "no positions": "NO_POSITIONS",
}


@dataclass
class Result:
    """The result of one type.

    Attributes:
        status: types with these statuses work:
            "proven": equal for packed, full and padded rows.
            "packed": like "proven"; distca resets recurrent layers at each document.
            "carries state": equal for one document a row; packed documents leak under
                transformers' own attention as well.
            "no positions": equal for one document a row; positions count through packed rows.
            Types with these statuses must be refused: "refused" (UnsupportedError), "silent"
            (distca is not called), "wrong" (results differ), "broken" (another error), "unbuilt"
            (fails without distca).
        halves: whether layers can run as two halves with equal results.
    """

    model_type: str
    status: str
    reason: str = ""
    dtype: str = ""
    oracle: str = ""
    calls: int = 0
    expected_calls: int = 0
    variants: tuple[str, ...] = ()
    differences: dict[str, float] = field(default_factory=dict)
    halves: bool = False


@cache
def measure(model_type: str) -> Result:
    """Run the type without the table of families."""
    with quiet(), without_table():
        hf_distca.configure(hf_distca.DistCAConfig())
        result = Result(model_type, "unbuilt")
        try:
            dtype, want = _run_oracle(model_type, result)
        except Exception as error:
            result.reason = _text(error)
            return result
        try:
            _judge(model_type, result, dtype, want)
            if result.status in WORKING:
                result.halves = _check_halves(model_type, result, dtype, want)
        except UnsupportedError as error:
            result.status, result.reason = "refused", str(error)
        except Exception as error:
            result.status, result.reason = "broken", _text(error)
        return result


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]


def _run_oracle(model_type: str, result: Result) -> tuple[torch.dtype, Outcome]:
    """Run every document alone, in the first dtype and attention that the model supports."""
    errors = []
    for dtype in (torch.float64, torch.float32):
        for implementation in ("sdpa", "eager"):
            try:
                outcome, calls = run(model_type, implementation, dtype, alone, PACKED)
            except Exception as error:
                errors.append(error)
                continue
            result.dtype, result.oracle = str(dtype).removeprefix("torch."), implementation
            result.expected_calls = calls.count // len(PACKED)
            return dtype, outcome
    raise errors[-1]


def _judge(model_type: str, result: Result, dtype: torch.dtype, want: Outcome) -> None:  # noqa: C901 - a case a line
    got = _run_ours(model_type, result, dtype, packed, PACKED)
    if _equal(result, "packed", got, want):
        result.status = "proven"
    elif not result.calls:
        result.status = "silent"
    elif takes(build(model_type, result.oracle, dtype), "position_ids"):
        stock, _ = run(model_type, result.oracle, dtype, packed, PACKED)
        # Equal to stock, but not to documents alone: layers other than attention leak.
        result.status = (
            "carries state" if _equal(result, "packed, against stock", got, stock) else "wrong"
        )
    else:
        stock, _ = run(model_type, result.oracle, dtype, packed_with_dense_mask, PACKED)
        result.status = (
            "no positions"
            if _equal(result, "packed, against a dense mask", got, stock)
            else "wrong"
        )
    fitting, _ = run(model_type, result.oracle, dtype, alone, ROWS)
    if not _equal(result, "rows", _run_ours(model_type, result, dtype, rows, ROWS), fitting):
        result.status = "wrong"
    if not _equal_padded(
        model_type, result, "padded", _run_ours(model_type, result, dtype, padded, PACKED), want
    ):
        result.status = "wrong"
    if result.status == "proven":
        ways = {
            "packed with a mask of ones": packed_with_mask_of_ones,
            "packed by the collator": packed_by_collator,
        }
        if not all(
            _equal(result, way, _run_ours(model_type, result, dtype, ways[way], PACKED), want)
            for way in ways
        ):
            result.status = "wrong"
        elif class_of(model_type).__module__.split(".")[2] in RECURRENT_MODULES:
            result.status = "packed"
    if not result.calls:
        result.status = "silent"
    elif result.expected_calls not in (0, result.calls):
        result.status, result.reason = (
            "wrong",
            f"{result.calls} calls of distca where sdpa gets {result.expected_calls}",
        )


def judge_numbered_masks(model_type: str) -> str:
    """Return "exact" if a mask that numbers documents separates them, "refused", or the error."""
    result = measure(model_type)
    dtype = getattr(torch, result.dtype)
    with quiet():
        want, _ = run(model_type, result.oracle, dtype, alone, PACKED)
        try:
            got, _ = run(model_type, "distca", dtype, packed_with_numbered_mask, PACKED)
        except UnsupportedError as error:
            return "refused" if "attention_mask numbers" in str(error) else str(error)
    value, what = difference(got, want)
    return "exact" if value <= TOLERANCE[dtype] else f"{what} differs by {value:.1e}"


@contextmanager
def in_halves() -> Iterator[None]:
    """Let the layers of all types run as halves, also on one rank."""
    with (
        patch.object(LayerPlanner, "uses_nano_batches", lambda self, batch, training: training),
        patch.object(ForwardBatch, "cannot_overlap", False),
        patch.object(nano_batch_layers, "PING_PONG_FAMILIES", frozenset(MODEL_TYPES)),
    ):
        hf_distca.configure(hf_distca.DistCAConfig(ping_pong=True))
        try:
            yield
        finally:
            hf_distca.configure(hf_distca.DistCAConfig())


def _check_halves(model_type: str, result: Result, dtype: torch.dtype, want: Outcome) -> bool:
    """Return whether layers run as halves, with equal results for all rows that work."""
    modes = {"halves of a document": alone, "halves of padded rows": padded}
    if result.status in ("proven", "packed"):
        modes["halves of packed documents"] = packed
    reason = result.reason
    try:
        with in_halves():
            runs = {
                name: run(model_type, "distca", dtype, mode, PACKED) for name, mode in modes.items()
            }
    except (RuntimeError, IndexError) as error:
        # The outputs cannot be joined, or shapes in the model do not fit a half. All other errors
        # are faults of distca.
        if isinstance(error, DistCAError) and not isinstance(error, UnsupportedError):
            raise
        return False
    equal = all(
        _equal_padded(model_type, result, name, got, want)
        if modes[name] is padded
        else _equal(result, name, got, want)
        for name, (got, _) in runs.items()
    )
    result.reason = reason
    # A document of one token cannot be cut, but every layer that called once must call twice.
    return equal and runs["halves of a document"][1].count > result.expected_calls * len(PACKED)


def _equal(result: Result, mode: str, got: Outcome, want: Outcome) -> bool:
    result.differences[mode], what = difference(got, want)
    equal = result.differences[mode] <= TOLERANCE[getattr(torch, result.dtype)]
    if not equal:
        result.reason = f"{mode}: {what} differs by {result.differences[mode]:.1e}"
    return equal


def _run_ours(
    model_type: str, result: Result, dtype: torch.dtype, mode: Mode, lengths: tuple[int, ...]
) -> Outcome:
    got, calls = run(model_type, "distca", dtype, mode, lengths)
    result.calls, result.variants = (
        calls.count,
        tuple(sorted(calls.variants | set(result.variants))),
    )
    return got


def _equal_padded(model_type: str, result: Result, mode: str, got: Outcome, want: Outcome) -> bool:
    """Return whether padded rows equal documents alone, or stock rows with the same rounding."""
    reason = result.reason
    if _equal(result, mode, got, want):
        return True
    stock, _ = run(model_type, result.oracle, getattr(torch, result.dtype), padded, PACKED)
    if not _equal(result, f"{mode}, against stock", got, stock):
        return False
    result.reason = reason
    return True
