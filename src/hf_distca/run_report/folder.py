"""`RunFolder`: contents of a run's folder: its record, the log of the Trainer, and timelines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from hf_distca.errors import ReportError
from hf_distca.input_files import read_file
from hf_distca.run_report.rows import RECORD_NAME, Row, RunRow, StepsRow, is_number, read_json, read_row

__all__ = ["PREFIX", "RankTrace", "RunFolder"]

RowKind = TypeVar("RowKind", bound=Row)
PREFIX = "distca/"  # of figures in a log
_STATE = "trainer_state.json"
_MOST_RECORD_BYTES = 2**30  # all plans of a long run
_EXCHANGES = ("dispatch", "return")
_HOW = (
    'Train with attn_implementation="distca" and hf_distca.DistCACallback() among the callbacks of the Trainer, and give the '
    "output_dir of that run."
)


@dataclass(frozen=True)
class RankTrace:
    """Sums over the timeline of one rank.

    Attributes:
        rank: the rank.
        travelled_seconds, waited_seconds: seconds in which messages travelled, and in which nothing
            was computed meanwhile.
        share: part of the messages' time that was hidden; None without messages.
    """

    rank: int
    travelled_seconds: float
    waited_seconds: float
    share: float | None


@dataclass
class RunFolder:
    """Data to report.

    Attributes:
        path: the folder.
        rows: rows of the record; for steps that ran again after a restart, of the last time.
        log: rows of the Trainer's log with figures of distca: the step, and the figures and the
            loss.
        traces: timelines of the ranks that wrote one.
    """

    path: Path
    rows: list[Row] = field(default_factory=list)
    log: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    traces: list[RankTrace] = field(default_factory=list)

    def rows_of(self, kind: type[RowKind]) -> list[RowKind]:
        """Return the rows of one kind."""
        return [row for row in self.rows if isinstance(row, kind)]

    @classmethod
    def read(cls, path: Path) -> RunFolder:
        """Read a folder.

        Raises:
            ReportError: if there is nothing to report, or a file is broken; names the file and a
                remedy.
            OSError: if a file cannot be read.
        """
        if not path.exists():
            raise ReportError(f"there is no folder {path}: give the output_dir of a run.")
        if not path.is_dir():
            raise ReportError(f"{path} is a file: give the folder of a run, {path.parent}.")
        folder, record, state = cls(path), path / RECORD_NAME, _newest_state(path)
        if record.is_file():
            folder._read_record(record)
        if state is not None:
            folder.log = _read_log(state)
        if not folder.rows_of(StepsRow) and not folder.log:
            raise ReportError(_nothing_in(path, record, state))
        folder.traces = sorted(_read_traces(path), key=lambda trace: trace.rank)
        return folder

    def _read_record(self, path: Path) -> None:
        text = read_file(path, _MOST_RECORD_BYTES).decode("utf-8", errors="replace")
        lines = text.splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            if number == len(lines) and not line.endswith("\n"):
                return  # it is being written, or the process was killed there
            row = read_row(line, f"line {number} of {path}")
            if isinstance(row, RunRow):  # what comes after its step runs again
                self.rows = [earlier for earlier in self.rows if isinstance(earlier, RunRow) or earlier.step <= row.step]
            if row is not None:
                self.rows.append(row)


def _nothing_in(path: Path, record: Path, state: Path | None) -> str:
    if record.is_file():
        return f"{record} tells of no micro-batch yet: wait until the run has logged, or look at what ended it."
    if state is not None:
        return f"the log in {state} has no figures of distca. {_HOW}"
    return f"{path} holds neither {RECORD_NAME} nor {_STATE}. {_HOW}"


def _newest_state(path: Path) -> Path | None:
    """Find the Trainer's state; that of the newest checkpoint if the folder itself has none."""
    if (path / _STATE).is_file():
        return path / _STATE
    numbers = {state: state.parent.name.removeprefix("checkpoint-") for state in path.glob(f"checkpoint-*/{_STATE}")}
    states = [state for state, number in numbers.items() if number.isdecimal()]
    return max(states, key=lambda state: int(numbers[state]), default=None)


def _read_log(path: Path) -> list[tuple[int, dict[str, float]]]:
    state = read_json(read_file(path), str(path))
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list):
        raise ReportError(f"{path} is no state of a Trainer: it has no list 'log_history'. Move the file away.")
    rows = []
    for row in history:
        if isinstance(row, dict) and type(row.get("step")) is int:
            numbers = {name: float(value) for name, value in row.items() if is_number(value)}
            figures = {name: value for name, value in numbers.items() if name.startswith(PREFIX) or name == "loss"}
            if figures.keys() - {"loss"}:
                rows.append((row["step"], {name.removeprefix(PREFIX): value for name, value in figures.items()}))
    return rows


def _read_traces(path: Path) -> Iterator[RankTrace]:
    """Read the timelines of the folder, within the run's, that has the newest one."""
    newest = max(path.rglob("rank_*.json"), key=lambda file: file.stat().st_mtime, default=None)
    for file in () if newest is None else newest.parent.glob("rank_*.json"):
        yield from _read_trace(file)


def _read_trace(path: Path) -> Iterator[RankTrace]:
    data = read_json(read_file(path), str(path))
    events = data.get("traceEvents") if isinstance(data, dict) else None
    if not isinstance(events, list):  # of somebody else
        return
    try:
        spans = [event for event in events if event["ph"] == "X"]
        travelled = sum(float(span["dur"]) for span in spans if span["name"] in _EXCHANGES)
        waited = sum(float(span["dur"]) for span in spans if span["name"] == "wait")
        rank = int(path.stem.removeprefix("rank_"))
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise ReportError(f"{path} is no timeline of hf_distca: {error!r}. Move the file away.") from error
    yield RankTrace(rank, travelled / 1e6, waited / 1e6, 1 - waited / travelled if travelled > 0 else None)
