"""``kill -9`` at random moments, including moments after each resume: no committed checkpoint is lost, and results are
identical."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.covering import few

SCRIPT = Path(__file__).with_name("trained_and_killed.py")


@pytest.mark.parametrize(
    ("num_kills", "update"),
    few(
        [
            (3, "speculative"),
            (8, "none"),
            *(
                pytest.param(30, update, marks=pytest.mark.slow)
                for update in ("none", "plain", "deferred", "speculative")
            ),
        ]
    ),
)
def test_killed_runs_are_equal_to_undisturbed_runs(num_kills: int, update: str, tmp_path: Path) -> None:
    """With optimizer states on disk, the undisturbed run is a run without offloading."""
    seed = 20
    command = [sys.executable, "-W", "error", str(SCRIPT), str(tmp_path), str(seed), str(num_kills), update]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    logs = "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(tmp_path.glob("*.log")))
    assert done.returncode == 0, f"with seed {seed}: {done.stderr}\n{logs}"
    found = json.loads(done.stdout)
    assert found["kills"] == num_kills
    assert found["kills_in_save"] > 0 or num_kills < 8
    assert found["num_read_meanwhile"] > 0
    # On a busy machine, several kills can precede the next checkpoint.
    assert len(set(found["resumed_at"])) > num_kills // 4 or num_kills < 8, "the runs resumed at several positions"
