from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from measure import Result

_CENSUS: dict[str, Result] = {}


@pytest.fixture(scope="session")
def census() -> dict[str, Result]:
    """What the types of this run showed, by type."""
    return _CENSUS


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _CENSUS:
        counts = Counter(
            {"proven": "proven", "unpacked": "proven, one document a row"}.get(r.status, "refused") for r in _CENSUS.values()
        )
        failed = sum(result.status == "wrong" for result in _CENSUS.values())
        terminalreporter.write_line(f"families: {', '.join(f'{n} {name}' for name, n in counts.most_common())}, {failed} wrong")
