"""benchmarks/eight_gpus on two CPU processes: an arm that differs or dies becomes a row, and the
page has every case.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import scripts
from benchmark_modules import import_benchmark
from pages import ROOT

FOLDER = ROOT / "benchmarks" / "eight_gpus"
README = (FOLDER / "README.md").read_text()
# One arm lets documents attend to earlier ones on the same rank. Another dies while timed.
FAULTY = """
import os, sys
sys.path.insert(0, {folder!r})
import eight_gpus
eight_gpus.prepare(eight_gpus.read_arguments().out.resolve())
import eight_models, eight_rank, torch
make, take = eight_models.Batches.make, eight_rank.Rank.time

def leaky(self, arm, rows, *more):
    batch = make(self, arm, rows, *more)
    if arm.place == "capped":
        bounds = batch["cu_seq_lens_q"][[0, -1]]
        batch |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), bounds)
    return batch

def deadly(self):
    if self.arm.place == "dealt" and self.rank == 1:
        os._exit(7)
    return take(self)

eight_models.Batches.make, eight_rank.Rank.time = leaky, deadly
eight_gpus.main()
"""


def read_rows(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    read: dict[str, dict[str, Any]] = json.loads((folder / f"{name}.json").read_text())
    return read


def read_cells(page: str, title: str) -> list[str]:
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {title} |")]
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_arm_that_differs_or_dies_has_a_row_with_the_reason(tmp_path: Path) -> None:
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY.format(folder=str(FOLDER)))
    chosen = ["--models", "qwen3_8b", "--lengths", "long_tail"]
    arms = ["packed", "given", "dealt", "capped", "ring"]
    command = ["python", str(script), "--dry-run", "--out", "figures", *chosen]
    printed = scripts.run([*command, "--arms", *arms], tmp_path, timeout=280)
    assert printed.index("predicted for") < printed.index("losses")
    rows = read_rows(tmp_path / "figures", "qwen3_8b--long_tail")
    assert {arm: row.get("parity") for arm, row in rows.items()} == {
        "packed": True,
        "given": True,
        "dealt": True,
        "capped": False,
        "ring": None,
    }
    assert rows["capped"]["losses_off"] < 1e-2 < rows["capped"]["gradients_off"]
    assert "seconds" not in rows["capped"]
    assert rows["dealt"]["failed"] == "steps, forwards: ranks ended, with these codes: {1: 7}"
    assert {"forwards", "backwards"} == rows["given"]["seconds"].keys()
    assert rows["given"]["figures"]["distca/exchanged_mb_per_layer"] > 0
    assert (tmp_path / "figures" / rows["given"]["trace"]).stat().st_size > 1000
    page = (tmp_path / "figures" / "page.md").read_text()
    assert "not equal: no time is shown" in read_cells(
        page, "longest first, at most 1.25 of the tokens"
    )
    assert read_cells(page, "hf-distca, as given")[-2] != "", "predicted"
    assert "not installed" in page


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_second_dry_run_completes_the_files_of_the_first(tmp_path: Path) -> None:
    assert "benchmarks/eight_gpus/run.sh --dry-run\n" in README
    command = [FOLDER / "run.sh", "--dry-run", "--out", str(tmp_path)]
    subprocess.run([*command, "--seconds", "0"], check=True)
    assert "no time yet" in (tmp_path / "page.md").read_text()
    predicted = (tmp_path / "predictions--qwen3_8b--equal.json").read_text()
    subprocess.run(command, check=True)
    assert predicted == (tmp_path / "predictions--qwen3_8b--equal.json").read_text()
    names = [path.name for path in tmp_path.glob("*--*.json") if "predictions" not in path.name]
    assert len(names) == 4
    for name in names:
        rows = read_rows(tmp_path, name.removesuffix(".json"))
        assert len(rows) == 10
        for arm, row in rows.items():
            assert "absent" in row or (row["parity"] and len(row["seconds"]) == 2), (name, arm)
    assert "no time yet" not in (tmp_path / "page.md").read_text()


def test_rows_of_a_step_hold_every_token_once() -> None:
    lengths = import_benchmark("eight_lengths")
    documents = [5, 3, 9, 1]
    assert lengths.rows_of_step(documents, 2, 8, 0) == [[5, 3], [8]]
    assert lengths.rows_of_step(documents, 2, 8, 1) == [[1, 1, 5, 1], [2, 6]]


def test_shipped_lengths_equal_the_output_of_their_script() -> None:
    shipped = {path.stem: json.loads(path.read_text()) for path in FOLDER.glob("lengths/*.json")}
    assert import_benchmark("eight_lengths").make_sets() == shipped


@pytest.mark.parametrize("place", ["in order", "placed", "rebalanced", "capped"])
def test_every_document_lies_on_one_rank(place: str) -> None:
    arms = import_benchmark("eight_arms")
    rows = [[64], [16] * 4, [32, 32], [8] * 8]
    placed = arms.place_documents(rows, place, 64, lambda lengths: lengths**2.0)
    assert sorted(number for of_rank in placed for number in of_rank) == list(range(15))
    assert len(placed) == 4
