"""Files that are broken, endless or too large: the command ends soon with status 2 and one line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from cli_runs import check_one_line, run, write
from hf_distca.agreement.record_rows import RECORD_NAME

sys.path.append(str(Path(__file__).with_name("run_report")))
from some_run import some_rows, write_record

PLACEMENT = {
    "rank_segments": [[[0, 0, 600, 1000], [1, 0, 40]], [[0, 600, 1000, 1000]], [[2, 0, 300, 300]]]
}


def list_readers(tmp_path: Path) -> list[tuple[str, list[str | Path], Path]]:
    """List every file argument: its name, the command and the file."""
    file = tmp_path / "file.json"
    placement = write(tmp_path / "placement.json", PLACEMENT)
    recorded = write_record(tmp_path / "recorded", some_rows())
    scale = ["advise", "--ranks", "2", "--batches", "1", "--lengths"]
    return [
        ("placement", ["plan", file], file),
        ("lengths", ["plan", file, "--deal", "64"], file),
        ("costs", ["plan", placement, "--cost-model", file], file),
        ("drawn", [*scale, file], file),
        ("table", [*scale, tmp_path / "file.parquet"], tmp_path / "file.parquet"),
        ("shape", [*scale, "prolong", "--model", file], file),
        ("record", ["report", recorded, "--json"], recorded / RECORD_NAME),
    ]


@pytest.mark.timeout(60)
def test_pipes_and_devices_are_not_read(tmp_path: Path) -> None:
    for name, command, file in list_readers(tmp_path):
        for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
            file.unlink(missing_ok=True)
            make(file)
            result = run(*command)
            check_one_line(result)
            passed_over = name in ("record", "shape")  # skipped like missing files
            assert ("is a pipe, a socket or a device" in result.stderr) != passed_over, (
                name,
                result.stderr,
            )


def test_input_above_the_limit_is_a_one_line_error(tmp_path: Path) -> None:
    for name, command, file in list_readers(tmp_path):
        if name in ("table", "record", "shape"):
            continue
        file.unlink(missing_ok=True)
        file.touch()
        os.truncate(file, 2**26 + 1)  # the file takes no space on the disk
        check_one_line(run(*command), " MiB, the most that is read")
    placement = write(tmp_path / "many.json", {"lengths": [[1] * (2**18 + 1)]})
    check_one_line(
        run("plan", placement),
        "262145 documents or parts of documents: at most 262144 can be planned",
    )
    lengths = write(tmp_path / "many.json", [1] * (2**18 + 1))
    check_one_line(run("plan", lengths, "--deal", 2**18 + 1), "262145 documents")
    endless = run("plan", "-", given=b" " * (2**24 + 1))
    check_one_line(endless, "standard input: holds more than 16 MiB")
