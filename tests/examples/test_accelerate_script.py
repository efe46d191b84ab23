"""The example for Accelerate runs on one process and with torchrun."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.more

EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate_script.py"


def errors_in(text: str) -> list[float]:
    found = re.findall(r"epoch \d: error (\d+\.\d+) of 241 samples", text)
    assert len(found) == 5
    return [float(each) for each in found]


def test_one_process(tmp_path, monkeypatch, capsys):
    assert len(EXAMPLE.read_text().splitlines()) < 40
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    errors = errors_in(capsys.readouterr().out)
    assert errors[-1] < 0.1 * errors[0]
    assert [each.name for each in (tmp_path / "weights").iterdir()] == ["model.safetensors"]


@pytest.mark.slow
def test_two_processes(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(EXAMPLE)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    errors = errors_in(done.stdout)
    assert errors[-1] < 0.1 * errors[0]
