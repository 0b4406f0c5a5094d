"""What distca does with a causal-LM type, found out by running it: proven, proven for unpacked documents, or why not."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

import hf_distca
from compare import PACKED, ROWS, TOLERANCE, Mode, Outcome, alone, difference, packed, padded, quiet, rows, run, takes, without_table
from hf_distca import UnsupportedError
from tiny import build


@dataclass
class Result:
    """What was found out about one type.

    `status` is "proven", "unpacked" (equal for one document a row; packed documents leak or cannot be given),
    "refused" (UnsupportedError), "silent" (ran without calling distca), "wrong" (ran and differs), "broken" (raises another
    error), or "unbuilt".
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


def measure(model_type: str) -> Result:
    """Run the type on this process alone."""
    with quiet(), without_table():
        hf_distca.configure(hf_distca.DistCAConfig())
        result = Result(model_type, "unbuilt")
        try:
            found = _oracle(model_type, result)
        except Exception as error:
            result.reason = _text(error)
            return result
        try:
            _judge(model_type, result, *found)
        except UnsupportedError as error:
            result.status, result.reason = "refused", str(error)
        except Exception as error:
            result.status, result.reason = "broken", _text(error)
        return result


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]


def _oracle(model_type: str, result: Result) -> tuple[torch.dtype, Outcome]:
    """The first of float64 and float32, sdpa and eager, that the model can run."""
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


def _judge(model_type: str, result: Result, dtype: torch.dtype, want: Outcome) -> None:
    tolerance = TOLERANCE[dtype]
    notes = []
    if takes(build(model_type, result.oracle, dtype), "position_ids"):
        got = _ours(model_type, result, dtype, packed, PACKED)
        result.differences["packed"], what = difference(got, want)
        if result.calls and result.differences["packed"] <= tolerance:
            result.status = "proven"
            return
        notes.append(f"packed: {what} differs by {result.differences['packed']:.1e}")
        try:
            stock, _ = run(model_type, result.oracle, dtype, packed, PACKED)
            result.differences["packed, against stock"], _ = difference(got, stock)
            result.differences["packed stock, against alone"], _ = difference(stock, want)
        except Exception as error:
            notes.append(f"stock packed: {_text(error)}")
    else:
        notes.append("takes no position_ids")
    want, _ = run(model_type, result.oracle, dtype, alone, ROWS)
    got = _ours(model_type, result, dtype, rows, ROWS)
    result.differences["rows"], what = difference(got, want)
    result.status = "unpacked" if result.differences["rows"] <= tolerance else "wrong"
    notes.append(f"rows: {what} differs by {result.differences['rows']:.1e}")
    if not result.calls:
        result.status = "silent"
    result.reason = "; ".join(notes)


def _ours(model_type: str, result: Result, dtype: torch.dtype, mode: Mode, lengths: tuple[int, ...]) -> Outcome:
    got, calls = run(model_type, "distca", dtype, mode, lengths)
    result.calls, result.variants = calls.count, tuple(sorted(calls.variants))
    return got
