"""stub"""

from __future__ import annotations

FAMILIES: dict[str, object] = {}


def check_family(model_type: str | None) -> None:
    """Stub."""
