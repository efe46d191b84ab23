"""The example for several ranks trains on two ranks, and bash accepts the SLURM script."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_it_trains_on_two_ranks(tmp_path: Path) -> None:
    options = ["--strategy=zero2", "--devices=2", "--size=gpt-nano", "--steps=4", f"--out={tmp_path}"]
    command = [sys.executable, "-W", "error", str(EXAMPLES / "train_gpt.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    [(ranks, step, loss)] = re.findall(r"^(\d) ranks, step (\d+): val_loss (\S+)$", done.stdout, re.MULTILINE)
    assert (ranks, step) == ("2", "4")
    assert float(loss) < 5.5  # ln 256 = 5.55 is the loss of a uniform guess
    assert len(list(tmp_path.glob("version_*"))) == 1


def test_bash_accepts_the_slurm_script() -> None:
    script = EXAMPLES / "slurm_train.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "train_gpt.py" in script.read_text()
