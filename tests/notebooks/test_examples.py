"""The example notebooks run, and they contain the outputs of a run."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.services
nbclient = pytest.importorskip("nbclient", reason="needs nbclient: pip install 'roomier[services]'")
pytest.importorskip("ipykernel", reason="needs ipykernel: pip install 'roomier[services]'")
NOTEBOOKS = sorted(Path("examples/notebooks").absolute().glob("*.ipynb"))
MAX_BYTES = 40_000
LAST_LINES = {"first_model": "2 batches of 50 predictions", "fine_tune": "loss 4.", "plan_70b": " s per step"}


def printed(cell: Any) -> str:
    return "".join(each.get("text", "") for each in cell.outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # a cell runs the command roomier
    nbformat = pytest.importorskip("nbformat")
    assert path.stat().st_size < MAX_BYTES
    notebook = nbformat.read(path, as_version=4)
    stored = [printed(cell) for cell in notebook.cells if cell.cell_type == "code"]
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    found = [printed(cell) for cell in notebook.cells if cell.cell_type == "code"]
    assert [bool(text) for text in found] == [bool(text) for text in stored]
    for text in (found, stored):
        assert LAST_LINES[path.stem] in " ".join(text[-1].split())
