"""The example of a loop of one's own: short, and it learns."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


def test_it_learns_in_under_thirty_lines(tmp_path):
    assert len(EXAMPLE.read_text().splitlines()) < 30
    command = [sys.executable, "-W", "error", str(EXAMPLE)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 5
    assert losses[-1] < 0.1 * losses[0]
    assert list(tmp_path.iterdir()) == []
