from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from two_nodes import Node, two_nodes


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    with two_nodes() as both:
        yield both


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create the folder that both nodes share, with the training script in it."""
    shutil.copy(Path(__file__).with_name("trains_on_nodes.py"), tmp_path / "train.py")
    return tmp_path
