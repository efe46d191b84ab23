"""The figures of the documentation show the current forecasts."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.code import ROOT

PICTURES = ROOT / "docs" / "pictures"


@pytest.mark.more
def test_figures_are_current(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(PICTURES / "make.py"), str(tmp_path)], check=True)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert len(drawn) == 6
    committed = {name: (PICTURES / name).read_text() for name in drawn}
    assert drawn == committed, "run python docs/pictures/make.py"
