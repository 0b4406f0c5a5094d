"""The notebook of the examples runs unchanged, in a separate kernel: two processes train, and it
draws the balance.
"""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from pages import ROOT


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # jupyter's packages raise some
def test_notebook_trains_two_processes_and_draws_a_picture(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs the extra 'test'")
    nbclient = pytest.importorskip("nbclient", reason="needs the extra 'test'")
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), (
        "the notebook must be committed without outputs"
    )
    client = nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    assert "distca/imbalance_measured_before" in printed
    pictures = [
        output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 1
    assert base64.b64decode(pictures[0]).startswith(b"\x89PNG")
