"""The example for several ranks trains on two ranks, and bash accepts the SLURM script."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.pool import RankPool

pytestmark = pytest.mark.more

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(*options: str) -> None:
    sys.argv = ["train_gpt.py", *options]
    runpy.run_path(str(EXAMPLES / "train_gpt.py"), run_name="__main__")


def test_it_trains_on_two_ranks(on_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--strategy=zero2", "--devices=2", "--size=gpt-nano", "--steps=4", f"--out={tmp_path}"]
    on_ranks(2, run_example, *options, joins=False)
    printed = capsys.readouterr().out
    [(ranks, step, loss)] = re.findall(r"\b(\d) ranks, step (\d+): val_loss (\S+)$", printed, re.MULTILINE)
    assert (ranks, step) == ("2", "4")
    assert float(loss) < 5.5  # ln 256 = 5.55 is the loss of a uniform guess
    assert len(list(tmp_path.glob("version_*"))) == 1


def test_bash_accepts_the_slurm_script() -> None:
    script = EXAMPLES / "slurm_train.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "train_gpt.py" in script.read_text()
