"""`RunFolder`: the contents of a run's folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hf_distca.agreement.record_rows import RECORD_NAME, Row, RunRow, StepsRow, read_row
from hf_distca.errors import ReportError
from hf_distca.input_files import read_file

RowKind = TypeVar("RowKind", bound=Row)
_MOST_RECORD_BYTES = 2**30  # enough for all plans of a long run


@dataclass(frozen=True)
class RunFolder:
    """The data of a run for the report.

    Attributes:
        path: the folder.
        rows: rows of the record. If a step ran again after a restart, only its latest rows are
            kept.
        broken: numbers of the record's lines that cannot be read.
    """

    path: Path
    rows: list[Row]
    broken: list[int]

    def select_rows(self, kind: type[RowKind]) -> list[RowKind]:
        """Return the rows of one kind."""
        return [row for row in self.rows if isinstance(row, kind)]

    @classmethod
    def read(cls, path: Path) -> RunFolder:
        """Read a folder.

        Raises:
            ReportError: if there is nothing to report, or if the record is broken.
            OSError: if a file cannot be read.
        """
        if not (record := path / RECORD_NAME).is_file():
            raise ReportError(
                f"{path} is not a folder with {RECORD_NAME}. Train with"
                ' attn_implementation="distca" and hf_distca.DistCACallback() among the callbacks'
                " of the Trainer, and give the output_dir of that run. A run on"
                " one rank, or under --observe, leaves no record."
            )
        folder = cls(path, *_read_record(record))
        lines = f" (broken lines: {', '.join(map(str, folder.broken))})" * bool(folder.broken)
        if (folder.rows or folder.broken) and not folder.select_rows(RunRow):
            raise ReportError(
                f"{record} does not tell how the run began, so no page can be made:"
                f" its first row is missing or broken{lines}. A run that begins or resumes"
                " with this output_dir writes a new first row."
            )
        if not folder.select_rows(StepsRow):
            raise ReportError(
                f"{record} has no micro-batch yet{lines}: wait until the run has logged, or look"
                " in its output for the reason why it ended."
            )
        return folder


def _read_record(path: Path) -> tuple[list[Row], list[int]]:
    """Return the rows, and the numbers of broken lines. A killed process may leave such lines."""
    rows, broken = list[Row](), list[int]()
    text = read_file(path, _MOST_RECORD_BYTES).decode("utf-8", errors="replace")
    # Leave out a last line without a line end, because it is still being written, or its writer was
    # killed.
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            row = read_row(line)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            broken.append(number)
            continue
        if isinstance(row, RunRow):  # after a restart, later steps run again
            rows = [other for other in rows if isinstance(other, RunRow) or other.step <= row.step]
        rows += [] if row is None else [row]
    return rows, broken
