from __future__ import annotations

import json
from pathlib import Path

import pytest
from some_run import some_rows, write_record

from cli_runs import check_one_line, run, run_well
from pages import words_of


def test_report_writes_a_page_and_prints_its_figures(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run_well("report", write_record(tmp_path / "run", some_rows()), "--output", page)
    *cards, last = result.stdout.splitlines()
    assert [" -> " in card for card in cards] == [True, False, False], "the gain comes first"
    assert last == f"The page: {page}"
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_json_option_writes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_record(tmp_path / "run", some_rows())
    result = run_well("report", folder, "--step", 2, "--json")
    figures = json.loads(result.stdout)
    assert figures["plan"]["step"] == 2
    assert figures["steps"][3]["step"] == 4
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_wrong_input_is_a_one_line_error(tmp_path: Path, options: tuple[str, ...]) -> None:
    check_one_line(
        run("report", tmp_path / "none", *options), "is not a folder with _distca_run.jsonl"
    )
    check_one_line(run("report", tmp_path, *options), "is not a folder with _distca_run.jsonl")
    folder = write_record(tmp_path / "run", some_rows())
    check_one_line(
        run("report", folder, "--step", 9, *options), "Plans of these steps were kept: 1, 2, 3, 4."
    )
    (folder / "_distca_run.jsonl").write_text("{\n")
    check_one_line(run("report", folder, *options), "does not tell how the run began")


def test_unwritable_page_is_a_one_line_error(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "run", some_rows())
    check_one_line(
        run("report", folder, "--output", tmp_path / "none" / "page.html"), "No such file"
    )


@pytest.mark.parametrize(
    ("words", "page"),
    [
        (words_of("hf-distca report outputs/finetune_long_documents"), "report.html"),
        (
            words_of(
                "hf-distca report outputs/finetune_long_documents --step 4 --output step_4.html"
            ),
            "step_4.html",
        ),
        (words_of("hf-distca report outputs/finetune_long_documents --json"), None),
    ],
)
def test_report_commands_of_the_pages_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], page: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    write_record(tmp_path / "outputs" / "finetune_long_documents", some_rows())
    run_well(*words[1:])
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == (
        [] if page is None else [page]
    )
