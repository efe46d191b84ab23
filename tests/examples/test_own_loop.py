"""The example of a custom loop is short, and its loss decreases."""

import re
import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.more

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


def test_the_loss_falls_in_under_thirty_lines(tmp_path, monkeypatch, capsys):
    assert len(EXAMPLE.read_text().splitlines()) < 30
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss (\d+\.\d+)", capsys.readouterr().out)]
    assert len(losses) == 5
    assert losses[-1] < 0.1 * losses[0]
    assert list(tmp_path.iterdir()) == []
