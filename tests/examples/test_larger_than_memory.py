"""The example of a model larger than memory, with a small model and with 168 million parameters (slow)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.more

EXAMPLE = Path(__file__).parents[2] / "examples" / "larger_than_memory.py"


@pytest.mark.parametrize(
    ("layers", "width", "most_bytes_per_parameter"),
    [(2, 64, None), pytest.param(12, 1024, 8.0, marks=pytest.mark.slow)],
)
def test_it_trains_with_less_memory_than_its_tensors(
    layers: int, width: int, most_bytes_per_parameter: float | None, tmp_path: Path
) -> None:
    options = [f"--layers={layers}", f"--width={width}", "--steps=3", f"--folder={tmp_path}"]
    run = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE), *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "meta device" not in run.stderr  # the model is built in configure_model
    text = r"(\d+) million parameters, (\S+) GiB of .* peak memory (\S+) GiB \((\S+) GiB before"
    [numbers] = re.findall(text, run.stdout)
    parameters, needed_gib, peak_gib, before_gib = map(float, numbers)
    assert needed_gib == pytest.approx(parameters * 1e6 * 16 / 2**30, abs=0.06)
    assert list(tmp_path.glob("*.tmp")) == []
    if most_bytes_per_parameter is not None:  # 16 bytes without offloading
        assert (peak_gib - before_gib) * 2**30 < most_bytes_per_parameter * parameters * 1e6
