from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from measure import Result

_CENSUS: dict[str, Result] = {}
_WORDS = {
    "proven": "proven",
    "packed": "proven",
    "carries state": "proven unpacked",
    "no positions": "proven unpacked",
}


@pytest.fixture(scope="session")
def census() -> dict[str, Result]:
    """What the types of this run showed, by type."""
    return _CENSUS


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _CENSUS:
        counts = Counter(_WORDS.get(result.status, "refused") for result in _CENSUS.values())
        said = ", ".join(
            f"{counts[word]} {word}" for word in (*dict.fromkeys(_WORDS.values()), "refused")
        )
        failed = sum(
            "test_families.py" in report.nodeid
            for report in terminalreporter.stats.get("failed", [])
        )
        terminalreporter.write_line(f"families: {said}, {failed} tests failed")
