"""The example of a custom loop is short, and its loss falls."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


def test_the_loss_falls_in_under_thirty_lines(tmp_path):
    assert len(EXAMPLE.read_text().splitlines()) < 30
    command = [sys.executable, "-W", "error", str(EXAMPLE)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 5
    assert losses[-1] < 0.1 * losses[0]
    assert list(tmp_path.iterdir()) == []
