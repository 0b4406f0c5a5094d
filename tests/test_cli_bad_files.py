"""Files that are broken, endless, or somebody else's: one line, exit code 2, and soon."""

from __future__ import annotations

import copy
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.main import get_command
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


def changed(content: Any, *path: str | int, value: Any) -> Any:
    """A copy with another value in one place."""
    content = copy.deepcopy(content)
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return content


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("forward", "flops_per_second"), 1e-320),
        (("backward", "task_seconds"), 1e300),
        (("exchange_seconds",), 10**400),
        (("exchange_bytes_per_second",), 1e-310),
        (("exchange_bytes_per_second",), "fast"),
        (("node_bytes_per_second",), -1),
        (("format",), 2),
        (("tile",), "128"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_rates_that_no_device_has(
    path: tuple[str | int, ...], value: object, tmp_path: Path
) -> None:
    costs = as_file(tmp_path / "costs.json", changed(COSTS, *path, value=value))
    placement = as_file(tmp_path / "placement.json", PLACEMENT)
    one_line(run("plan", placement, "--cost-model", costs), str(costs))
    right = as_file(tmp_path / "costs.json", COSTS)
    assert run("plan", placement, "--cost-model", right).exit_code == 0


def test_profiles_are_gone(tmp_path: Path) -> None:
    """A verb and a setting that were there name what to use instead."""
    one_line(run("profile", "--ranks", "2"), "write a CostModel with its to_json")
    placement = as_file(tmp_path / "placement.json", PLACEMENT)
    for name in ("h100_flash_attn_3", as_file(tmp_path / "own.json", {"format": 2, "kernels": []})):
        one_line(run("plan", placement, "--cost-model", name), "Give what CostModel.to_json wrote")


@pytest.mark.parametrize("rate", ["1e-320", "1e308", "nan"])
def test_links_that_no_device_has(rate: str, tmp_path: Path) -> None:
    one_line(
        run("plan", as_file(tmp_path / "placement.json", PLACEMENT), "--link-gigabytes", rate),
        "GB/s.",
    )


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


def test_records_with_other_tallies(tmp_path: Path) -> None:
    one_line(
        run(
            "report",
            record(tmp_path / "a", lambda row: row["tally"].update(moved=10**400)),
            "--json",
        ),
        "int too large",
    )
    one_line(
        run(
            "report",
            record(tmp_path / "b", lambda row: row["tally"].pop("micro_batches")),
            "--json",
        ),
        "micro_batches",
    )
    ranks = record(tmp_path / "c", lambda row: row["per_rank"].update(tokens=[10**400] * 4))
    one_line(run("report", ranks, "--json"), "is no row of a record")


def test_more_micro_batches_moved_than_there_were(tmp_path: Path) -> None:
    folder = record(tmp_path, lambda row: row["tally"].update(micro_batches=0, moved=1))
    one_line(run("report", folder, "--json"), "is no record of a run")


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
        if name in ("table", "record"):
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


ODD = [
    10**400,
    -1,
    0,
    1e308,
    5e-324,
    float("nan"),
    float("inf"),
    None,
    True,
    "",
    "x" * 5000,
    "\ud800",
    [],
    {},
    [[[]]],
    2**63,
    0.5,
]


def places(content: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every place in nested containers."""
    if path:
        yield path
    items = (
        content.items()
        if isinstance(content, dict)
        else enumerate(content)
        if isinstance(content, list)
        else ()
    )
    for key, value in items:
        yield from places(value, (*path, key))


def mutated(content: Any, chance: random.Random) -> bytes:
    """JSON with some values changed, missing or twice, or its text cut or with other bytes in
    it.
    """
    content = copy.deepcopy(content)
    for _ in range(chance.randint(0, 2)):
        *path, last = chance.choice(list(places(content)))
        place = content
        for key in path:
            place = place[key]
        match chance.randint(0, 4):
            case 0:
                del place[last]
            case 1 if isinstance(place, list):
                place.append(place[last])
            case _:
                place[last] = chance.choice(ODD)
        if not content:
            break
    text = bytearray(json.dumps(content).encode())
    match chance.randint(0, 7):
        case 0:
            del text[chance.randrange(len(text)) :]
        case 1:
            text[chance.randrange(len(text))] = chance.randrange(256)
        case 2:
            at = chance.randrange(len(text))
            text[at:at] = chance.choice(
                [b"9" * 400, b"[" * 3000, b"\x00", b"\xff\xfe", b"NaN", b"-", b'"']
            )
    return bytes(text)


def fuzz(seed: int, count: int, folder: Path) -> None:
    chance = random.Random(seed)
    rows = [
        json.loads(line)
        for line in (write_record(folder, some_rows(2, 2)) / RECORD_NAME).read_text().splitlines()
    ]
    placement, file = as_file(folder / "placement.json", PLACEMENT), folder / "file.json"
    report: list[str | Path] = ["report", folder, "--json"]
    cases: list[tuple[list[str | Path], Path, Any]] = [
        (["plan", file], file, PLACEMENT),
        (["plan", file], file, {"lengths": [[500, 20], [30]]}),
        (["plan", file, "--deal", "64"], file, [100, 20, 8]),
        (["plan", placement, "--cost-model", file], file, COSTS),
        *((report, folder / RECORD_NAME, row) for row in rows),
    ]
    verbs = get_command(app)  # once: that takes longer than what a verb does
    for number in range(count):
        command, path, content = chance.choice(cases)
        sound, text = path.read_bytes() if path.exists() else b"", mutated(content, chance)
        lines = [json.dumps(row).encode() if row is not content else text for row in rows]
        path.write_bytes(
            b"".join(line + b"\n" for line in lines) if path.suffix == ".jsonl" else text
        )
        what = f"case {number}, {command}: {text[:3000]!r}"
        with (
            redirect_stdout(StringIO()),
            redirect_stderr(StringIO()) as said,
            pytest.raises(SystemExit) as ended,
        ):
            verbs.main([str(word) for word in command])
        path.write_bytes(sound)
        errors = said.getvalue()
        if ended.value.code:
            assert (ended.value.code, errors.count("\n")) == (2, 1), what
            assert len(errors) < 700, what
        else:
            assert "nan" not in errors, what
            assert " inf" not in errors, what


def test_no_file_ends_in_a_traceback(tmp_path: Path) -> None:
    fuzz(1, 200, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_none_of_many_files_ends_in_a_traceback(seed: int, tmp_path: Path) -> None:
    fuzz(seed, 2000, tmp_path)
