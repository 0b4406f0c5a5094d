"""A small part of transformers' shared tests under distca; `python tests/upstream/run.py` runs all
that hold.
"""

from __future__ import annotations

import io
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest
from run import Outcome, parse, report
from sdist import FILES, PACKAGE, STUBS, SdistError, shared_tests

import scripts
from pages import words_of

SAMPLE = (
    "inference_equivalence or fp32_pad_left or fp32_pad_right or"
    " test_training_gradient_checkpointing or shift_labels"
)


def archive(folder: Path, release: str) -> Path:
    path = folder / f"transformers-{release}.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for file in FILES:
            info = tarfile.TarInfo(f"transformers-{release}/tests/{file}")
            info.size = len(release)
            tar.addfile(info, io.BytesIO(release.encode()))
    return path


@pytest.fixture
def sdist() -> Path:
    """The folder with the real tests; the test skips where they cannot be had."""
    pytest.importorskip(
        "parameterized", reason='transformers\' tests need parameterized: pip install -e ".[test]"'
    )
    try:
        return shared_tests(timeout=60)
    except SdistError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.usefixtures("sdist")
def test_sample_passes_for_dense_and_gpt_oss_like_models(tmp_path: Path) -> None:
    """A sample passes for a dense model and one with sinks, windows and experts."""
    options = ["--family", "qwen3", "--family", "gpt_oss", "--tests", SAMPLE]
    output = scripts.run(
        [*words_of("python tests/upstream/run.py"), *options], tmp_path, timeout=240
    )
    rows = {words[0]: words[1:] for line in output.splitlines() if (words := line.split())}
    for family in ("qwen3", "gpt_oss"):
        passed, _, failed, called, _ = map(int, rows[family])
        assert passed == called >= 12
        assert failed == 0


def test_the_options_on_the_page() -> None:
    verbose = parse(words_of("python tests/upstream/run.py --family gemma2 --verbose")[2:])
    control = parse(words_of("python tests/upstream/run.py --family gemma2 --control")[2:])
    assert [verbose.family, verbose.verbose, verbose.control] == [["gemma2"], True, False]
    assert [control.family, control.verbose, control.control] == [["gemma2"], False, True]


@pytest.mark.parametrize(
    ("outcomes", "code", "text"),
    [
        (
            {"llama": {"test_a": Outcome(calls=2), "test_b": Outcome("skipped", "no GPU")}},
            0,
            "total",
        ),
        ({"llama": {"test_a": Outcome("failed", "3 != 4", calls=2)}}, 1, "llama test_a: 3 != 4"),
        ({"llama": {"test_a": Outcome()}}, 1, "llama: no test called distca"),
        ({}, 1, "total"),
    ],
)
def test_the_exit_code(
    outcomes: dict[str, dict[str, Outcome]],
    code: int,
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert report(outcomes, parse([])) == code
    assert text in capsys.readouterr().out


def test_unpacking_takes_the_shared_tests_and_adds_the_stubs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdist.CACHE", tmp_path / "cache")
    release = version("transformers")
    package = shared_tests(archive(tmp_path, release)) / PACKAGE
    assert sorted(str(f.relative_to(package)) for f in package.rglob("*.py")) == sorted(
        [*FILES, *STUBS]
    )
    assert (package / FILES[0]).read_text() == release
    assert shared_tests() == package.parent, "a second run downloads nothing"


def test_an_archive_of_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdist.CACHE", tmp_path / "cache")
    with pytest.raises(
        SdistError,
        match=r"transformers-0\.1\.tar\.gz is not the source distribution of the installed",
    ):
        shared_tests(archive(tmp_path, "0.1"))
    assert not list((tmp_path / "cache").iterdir())
