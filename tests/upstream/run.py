"""Run transformers' own shared model tests under distca, a family at a time, and print what passed.

    python tests/upstream/run.py

The tests come from the source distribution of the installed transformers, which pip downloads once
into build/upstream (or give it with --sdist). `shared_families.py` names the families and the tests
that are left out, with the reason.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest
from sdist import SdistError, shared_tests
from shared_families import FAMILIES, LEFT_OUT, LEFT_OUT_OF

HERE = Path(__file__).parent
CASES = HERE / "shared_cases.py"
COLUMNS = "{:<14}{:>8}{:>9}{:>8}{:>16}{:>10}"


@dataclass
class Outcome:
    """What became of one test: the last word of each of its parts, and how often it called
    distca.
    """

    word: str = "passed"
    text: str = ""
    calls: int = 0
    seconds: float = 0.0


@dataclass
class Recorder:
    """Outcomes by family and test, as pytest reports them."""

    outcomes: dict[str, dict[str, Outcome]] = field(default_factory=dict)

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        parser.addoption("--control", action="store_true")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        family, test = report.nodeid.split("::")[-2:]
        outcome = self.outcomes.setdefault(family.removeprefix("Test_"), {}).setdefault(
            test, Outcome()
        )
        outcome.seconds += report.duration
        outcome.calls = dict(report.user_properties).get("calls", outcome.calls)
        # A subtest reports under the name of its test: one that failed fails it, one that skipped
        # does not skip it.
        whole = type(report) is pytest.TestReport
        if report.failed or (report.skipped and whole and outcome.word == "passed"):
            outcome.word, outcome.text = report.outcome, _last_line(report)


def _last_line(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    lines = [
        line.removeprefix("E").strip()
        for line in report.longreprtext.splitlines()
        if line.startswith("E ")
    ]
    return next(filter(None, lines), report.longreprtext[-200:])


def main(arguments: list[str] | None = None) -> int:
    """0 if every test passed or skipped itself and every family called distca, else 1; 2 if there
    were no tests to be had.
    """
    options = parse(arguments)
    if find_spec("parameterized") is None:
        print(
            "transformers' tests need the package parameterized: pip install -c constraints.txt -e"
            ' ".[test]"',
            file=sys.stderr,
        )
        return 2
    try:
        folder = shared_tests(options.sdist)
    except SdistError as error:
        print(error, file=sys.stderr)
        return 2
    sys.path[:0] = [str(folder), str(HERE.parent / "models")]
    recorder = Recorder()
    chosen = [f"{CASES}::Test_{family}" for family in options.family or FAMILIES]
    # Markers and warnings of these tests are not ours to be strict about.
    settings = [
        "-o",
        "addopts=",
        "-o",
        "filterwarnings=ignore",
        "-p",
        "no:cacheprovider",
        "-q",
        "--no-header",
        "--tb=short",
    ]
    control = ["--control"] if options.control else []
    code = pytest.main([*chosen, "-k", options.tests, *settings, *control], plugins=[recorder])
    return report(recorder.outcomes, options) or int(
        code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    left_out = [
        *LEFT_OUT.items(),
        *(item for tests in LEFT_OUT_OF.values() for item in tests.items()),
    ]
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="Left out:\n" + "\n".join(f"  {test}\n      {reason}" for test, reason in left_out),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--family", action="append", choices=FAMILIES, help="only this family; may be repeated"
    )
    parser.add_argument(
        "--tests", default="", metavar="EXPRESSION", help="only the tests that pytest's -k selects"
    )
    parser.add_argument(
        "--sdist", type=Path, help="the archive transformers-VERSION.tar.gz, instead of a download"
    )
    parser.add_argument(
        "--control",
        action="store_true",
        help="with transformers' own attention: what fails without distca?",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="also the reasons of what was skipped"
    )
    return parser.parse_args(arguments)


def report(outcomes: dict[str, dict[str, Outcome]], options: argparse.Namespace) -> int:
    """Print the table; 1 if a test failed, a family called distca in no test, or there are no
    tests, else 0.
    """
    print(
        "\n" + COLUMNS.format("family", "passed", "skipped", "failed", "called distca", "seconds")
    )
    everything = {
        f"{family} {test}": o for family, tests in outcomes.items() for test, o in tests.items()
    }
    for family, tests in [*outcomes.items(), ("total", everything)]:
        words = Counter(outcome.word for outcome in tests.values())
        called = sum(outcome.word == "passed" and outcome.calls > 0 for outcome in tests.values())
        seconds = sum(outcome.seconds for outcome in tests.values())
        print(
            COLUMNS.format(
                family, words["passed"], words["skipped"], words["failed"], called, f"{seconds:.0f}"
            )
        )
    print(
        '\n"called distca": of those passed, the tests in which attention was computed by distca at'
        " least once."
    )
    if options.verbose:
        reasons = Counter(o.text for o in everything.values() if o.word == "skipped")
        print(
            "\n".join(
                [
                    "\nskipped:",
                    *(f"{count:>6}  {reason}" for reason, count in reasons.most_common()),
                ]
            )
        )
    failed = [f"{name}: {o.text}" for name, o in everything.items() if o.word == "failed"]
    silent = (
        []
        if options.control
        else [f for f, tests in outcomes.items() if not any(o.calls for o in tests.values())]
    )
    failed += [f"{family}: no test called distca" for family in silent]
    print("\n".join(["", "failed:", *failed] if failed else []))
    return int(bool(failed) or not everything)


if __name__ == "__main__":
    sys.exit(main())
