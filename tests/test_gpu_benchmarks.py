"""benchmarks/gpu on a CPU: every part runs and writes plausible figures, and a part that fails or
takes too long leaves the others intact.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import scripts
from benchmark_modules import prepend_benchmarks
from pages import ROOT, words_of

PARTS = (
    *("checkpointing", "host", "emulator", "trainer", "first_script", "kernels", "memory"),
    *("ranks", "parity", "faults", "widths", "curves", "families", "hybrids"),
)


def run_all(out: Path, *options: str, command: list[str] | None = None) -> str:
    command = command or words_of(
        "python benchmarks/gpu/run_all.py --out gpu_figures --placements DIR --seconds 480"
    )
    small = ["--device", "cpu", "--quick", "--out", str(out), "--placements", str(out)]
    small += ["--seconds", "240"]
    return scripts.run([*command, *small, *options], out, timeout=280)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the folder that holds the figures of the parts that have run so far."""
    return tmp_path_factory.mktemp("figures")


def figures(folder: Path, part: str) -> dict[str, Any]:
    """Return the figures of a part, after a run of it if it has not run yet."""
    if not (folder / f"{part}.json").exists():
        run_all(folder, "--only", part)
    read: dict[str, Any] = json.loads((folder / f"{part}.json").read_text())
    assert (read["part"], read["device"], read["quick"]) == (part, "cpu", True)
    assert not read.get("failed"), "parts with ranks have None"
    return read


def test_kernels_agree_with_float32(folder: Path) -> None:
    found = figures(folder, "parity")
    assert found["compared"] == found["passed"] > 0
    unsupported = [case for case in found["cases"] if "unsupported" in case]
    assert {case["scores"] for case in unsupported} == {"softcap", "window and softcap"}
    assert any("sinks" in case["batches"] for case in found["cases"])


def test_emulated_ranks_have_measured_and_estimated_seconds(folder: Path) -> None:
    rows = figures(folder, "emulator")["placements"]
    assert rows
    for row in rows:
        before, after = row["before"], row["after"]
        assert row["query_tokens_moved"] > 0 or row["placement"].endswith("dealt")
        for direction in ("forward", "backward"):
            assert (
                after[direction]["estimated_imbalance"] <= before[direction]["estimated_imbalance"]
            )
            assert len(after[direction]["seconds"]) == row["ranks"]
            assert min(after[direction]["seconds"]) > 0


def test_curves_of_distca_and_sdpa_coincide(folder: Path) -> None:
    found = figures(folder, "curves")
    assert list(found["runs"]) == ["distca", "sdpa", "sdpa, other order"]
    assert {len(run["losses"]) for run in found["runs"].values()} == {3}
    assert found["apart"]["distca"]["largest"] < 1e-3


@pytest.mark.slow
def test_emulated_ranks_end_earlier_after_balancing(folder: Path) -> None:
    """The clock of a busy machine is wrong in some runs, so try up to three times."""
    for attempts_left in (2, 1, 0):
        rows = figures(folder, "emulator")["placements"]
        if not attempts_left or all(row["slowest_after_to_before"] < 1 for row in rows):
            break
        (folder / "emulator.json").unlink()
    assert [row["placement"] for row in rows if row["slowest_after_to_before"] >= 1] == []


@pytest.mark.slow
def test_faults_of_ranks_end_in_desync_errors(folder: Path) -> None:
    for fault in figures(folder, "faults")["faults"].values():
        assert fault["raised"] == "DistCADesyncError"
        assert fault["seconds"] < 30


@pytest.mark.slow
def test_dots1_is_as_far_from_float32_as_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, its router chooses other experts for a token, under sdpa as well."""
    prepend_benchmarks(monkeypatch)
    monkeypatch.syspath_prepend(ROOT / "tests/models")
    import part_families

    found = part_families.one_family(SimpleNamespace(device=torch.device("cpu")), "dots1")
    assert found["distca"]["logits"] > 2 * found["eager"]["logits"], "a token gets other experts"
    for figure, error in found["sdpa"].items():
        assert found["distca"][figure] == pytest.approx(error, rel=0.05)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_second_call_runs_only_the_parts_that_are_left(tmp_path: Path) -> None:
    first = ("parity", "kernels")
    run_all(tmp_path, "--only", *first)
    run_all(tmp_path, "--seconds", "480")
    record = json.loads((tmp_path / "run.json").read_text())
    assert set(record["parts"]) == set(PARTS)
    assert {part["status"] for part in record["parts"].values()} == {"ok"}
    assert record["left_out"] == []
    assert {"torch", "transformers", "processor", "date"} <= record["environment"].keys()
    assert all("--only" in record["parts"][part]["command"] for part in first), (
        "finished parts do not run again"
    )
    for part in ("first_script", "families", "hybrids"):
        assert figures(tmp_path, part)["passed"], part
    assert figures(tmp_path, "trainer")["cases"]["distca, DDP"]["passed"]
    assert figures(tmp_path, "ranks")["ranks"]["2"]["passed"]
    text = write_page(tmp_path)
    assert text.count("\n## ") == len(PARTS)


def test_list_option_prints_every_part(tmp_path: Path) -> None:
    printed = scripts.run(words_of("python benchmarks/gpu/run_all.py --list"), tmp_path)
    assert [line.split()[0] for line in printed.splitlines()] == [*PARTS, "together"]


def write_page(folder: Path) -> str:
    made = folder / "page.md"
    *command, figures = words_of("python benchmarks/gpu/report.py gpu_figures")
    scripts.run([*command, str(folder), "--output", str(made), "--note", "A note."], folder)
    assert figures == "gpu_figures"
    return made.read_text()


def test_page_has_the_parts_that_ran(folder: Path) -> None:
    figures(folder, "parity")
    text = write_page(folder)
    assert "\n## " in text
    assert "A note." in text
    assert "run_all.py" in text


@pytest.mark.slow
def test_stopped_part_leaves_other_parts_intact(tmp_path: Path) -> None:
    run_all(tmp_path, "--only", "kernels")
    with pytest.raises(AssertionError, match=r"run_all.py.* ended with \[1\]"):
        run_all(tmp_path, "--only", "first_script", "--seconds", "1")
    parts = json.loads((tmp_path / "run.json").read_text())["parts"]
    assert {name: part["status"] for name, part in parts.items()} == {
        "kernels": "ok",
        "first_script": "stopped",
    }
