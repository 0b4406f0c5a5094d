"""Files that are broken, endless, or somebody else's: one line, exit code 2, and soon."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from hf_distca.agreement.record_rows import RECORD_NAME
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.tools.cli import app

sys.path.append(str(Path(__file__).with_name("run_report")))
from some_run import some_rows, write_record

COSTS = json.loads(CostModel.make_analytic(AttentionShape(8, 2, 64, 64, 2)).to_json())
PLACEMENT = {
    "rank_segments": [[[0, 0, 600, 1000], [1, 0, 40]], [[0, 600, 1000, 1000]], [[2, 0, 300, 300]]]
}


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def one_line(result: Result, message: str = "") -> None:
    assert isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert message in result.stderr
    assert len(result.stderr) < 700


def as_file(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize("rate", [1e-320, 10**400, "fast"], ids=["tiny", "huge", "text"])
def test_rates_that_no_device_has(rate: object, tmp_path: Path) -> None:
    costs = as_file(tmp_path / "costs.json", {**COSTS, "exchange_bytes_per_second": rate})
    placement = as_file(tmp_path / "placement.json", PLACEMENT)
    one_line(run("plan", placement, "--cost-model", costs), str(costs))
    one_line(run("plan", placement, "--link-gigabytes", "1e-320"), "GB/s.")


def test_profiles_are_gone(tmp_path: Path) -> None:
    """A verb and a setting that were there name what to use instead."""
    one_line(run("profile", "--ranks", "2"), "write a CostModel with its to_json")
    placement = as_file(tmp_path / "placement.json", PLACEMENT)
    for name in ("h100_flash_attn_3", as_file(tmp_path / "own.json", {"format": 2, "kernels": []})):
        one_line(run("plan", placement, "--cost-model", name), "Give what CostModel.to_json wrote")


def record(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A record whose rows of steps are changed."""
    write_record(folder, some_rows())
    file = folder / RECORD_NAME
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        if row["row"] == "steps":
            change(row)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row["tally"].update(moved=10**400), "int too large"),
        (lambda row: row["tally"].pop("micro_batches"), "is no record of a run"),
        (lambda row: row["per_rank"].update(tokens=[10**400] * 4), "tells of no micro-batch"),
        (lambda row: row["tally"].update(micro_batches=0, moved=1), "is no record of a run"),
    ],
)
def test_records_with_other_rows(
    change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    one_line(run("report", record(tmp_path, change), "--json"), message)


def test_a_table_whose_names_are_no_text(tmp_path: Path) -> None:
    file = tmp_path / "data.parquet"
    pq.write_table(pa.table({"input_ids": [[1, 2, 3]]}), file)
    file.write_bytes(file.read_bytes().replace(b"input_ids", b"input_\xff\xfes"))
    one_line(run("advise", "--lengths", file, "--ranks", 2), f"{file} cannot be read as a table")


def test_a_page_with_a_name_that_is_no_text(tmp_path: Path) -> None:
    folder = write_record(Path(os.fsdecode(os.fsencode(tmp_path) + b"/run\xff")), some_rows())
    page = Path(os.fsdecode(os.fsencode(tmp_path) + b"/page\xff.html"))
    result = run("report", folder, "--output", page)
    assert result.exit_code == 0, result.exception
    assert "<h1>run?</h1>" in page.read_text()


def test_a_long_value_is_not_repeated(tmp_path: Path) -> None:
    one_line(
        run("plan", as_file(tmp_path / "placement.json", {"lengths": [["x" * 10**6]]})),
        "must be an integer",
    )


def reading(tmp_path: Path) -> list[tuple[str, list[str | Path], Path]]:
    """Each place from which a verb reads: its name, the command, and the file."""
    file = tmp_path / "file.json"
    placement = as_file(tmp_path / "placement.json", PLACEMENT)
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
def test_what_never_ends_is_not_read(tmp_path: Path) -> None:
    for name, command, file in reading(tmp_path):
        for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
            file.unlink(missing_ok=True)
            make(file)
            result = run(*command)
            one_line(result)
            passed_over = name in ("record", "shape")  # as if they were not there
            assert ("is a pipe, a socket or a device" in result.stderr) != passed_over, (
                name,
                result.stderr,
            )


def test_what_is_too_much_is_said(tmp_path: Path) -> None:
    for name, command, file in reading(tmp_path):
        if name in ("table", "record", "shape"):
            continue
        file.unlink(missing_ok=True)
        file.touch()
        os.truncate(file, 2**26 + 1)  # no block of the disk is used
        one_line(run(*command), " MiB, the most that is read")
    placement = as_file(tmp_path / "many.json", {"lengths": [[1] * (2**18 + 1)]})
    one_line(
        run("plan", placement),
        "262145 documents or parts of documents: at most 262144 can be planned",
    )
    lengths = as_file(tmp_path / "many.json", [1] * (2**18 + 1))
    one_line(run("plan", lengths, "--deal", 2**18 + 1), "262145 documents")
    endless = CliRunner().invoke(app, ["plan", "-"], input=b" " * (2**24 + 1))
    one_line(endless, "standard input: holds more than 16 MiB")
