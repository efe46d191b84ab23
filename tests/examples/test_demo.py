"""The demo script in a separate process, with a small model and a part of its data, or unchanged (slow)."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
SMALL_DEMO = Path(__file__).parent / "programs" / "small_demo.py"


def run_demo(script: Path, folder: Path, num_steps: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(script), "--num-steps", str(num_steps)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("script", "num_steps", "is_enough"),
    [
        pytest.param(SMALL_DEMO, 160, True, marks=pytest.mark.more),
        pytest.param(DEMO, 8, False, marks=pytest.mark.slow),
        pytest.param(DEMO, 96, True, marks=pytest.mark.slow),
    ],
)
def test_the_demo_trains_resumes_and_samples(tmp_path: Path, script: Path, num_steps: int, is_enough: bool) -> None:
    (tmp_path / "runs" / "demo" / "version_7").mkdir(parents=True)  # a folder of an earlier demo is replaced
    done = run_demo(script, tmp_path, num_steps)
    assert done.returncode == (0 if is_enough else 1), done.stderr

    (run,) = (tmp_path / "runs" / "demo").glob("version_*")
    assert run.name == "version_0"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "train_loss" in row]
    assert steps == sorted(set(steps)), "the resumed run continues at the step at which the first one stopped"
    assert steps[-1] == num_steps

    last_line = done.stdout.splitlines()[-1]
    told = re.fullmatch(r"demo: val_loss (\d+\.\d\d) -> (\d+\.\d\d)", last_line)
    assert told is not None, last_line
    first, last = map(float, told.groups())
    assert first == pytest.approx(7.62, abs=0.15)  # ln 2048 = 7.62 is the loss of a uniform guess
    assert last == pytest.approx([row["val_loss"] for row in rows if "val_loss" in row][-1], abs=0.006)
    assert (first - last >= 1.5) is is_enough

    assert (run.parent / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert re.search(r"--- sample\ndef .{50}", done.stdout, re.DOTALL)
