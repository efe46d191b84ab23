"""A rank is killed at a random moment, and torchrun restarts the job. The losses equal the losses of an undisturbed
run."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.pool import RankFailed, RankPool
from tests.resume.faulty_job import STEP_S, run
from tests.resume.reshard import train

NUM_STEPS = 24
ROOT = Path(__file__).parents[2]
STRATEGIES = ("zero3", "zero2", "ddp", "zero1")


def run_job(folder: Path, strategy: str, num_ranks: int, killed_rank: int, after_s: float, kind: str) -> str:
    """Run the job under torchrun, which restarts it, and return its output."""
    folder.mkdir()
    job = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "--max-restarts=3"]
    arguments = [str(folder), strategy, str(NUM_STEPS), str(killed_rank), str(after_s), kind]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *job, str(Path(__file__).with_name("faulty_job.py")), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stderr


def check(folder: Path, undisturbed: dict[str, Any]) -> None:
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    # Steps that were repeated after the restart equal the original steps.
    for step, loss, ids in steps:
        assert ids == undisturbed["ids"][step - 1]
        assert loss == pytest.approx(undisturbed["losses"][step - 1], rel=1e-5)
    assert {step for step, _, _ in steps} == set(range(1, NUM_STEPS + 1))
    assert steps[-1][0] == NUM_STEPS


@pytest.fixture(scope="module")
def undisturbed(on_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result: dict[str, Any] = on_ranks(1, train, tmp_path_factory.mktemp("whole"), "single", 1, NUM_STEPS)[0]
    return result


def random_fault(seed: int, num_ranks: int) -> tuple[int, float]:
    """Return a rank and a time in seconds, between the start of the fit and shortly before its end."""
    draw = random.Random(seed)
    return draw.randrange(num_ranks), draw.uniform(0.0, 0.9 * NUM_STEPS * STEP_S)


@pytest.mark.more
@pytest.mark.parametrize(
    ("seed", "kind"),
    [
        (3, "async"),
        pytest.param(2, "waiting", marks=pytest.mark.slow),
        pytest.param(4, "async", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_are_killed_and_restarted(
    seed: int,
    kind: str,
    undisturbed: dict[str, Any],
    on_ranks: RankPool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    arguments = (tmp_path, "zero3", NUM_STEPS, *random_fault(seed, 2), kind)
    with pytest.raises(RankFailed):
        on_ranks(2, run, *arguments)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    on_ranks(2, run, *arguments)
    check(tmp_path, undisturbed)


@pytest.mark.slow  # tests/launch/test_restarted_job.py restarts a small job under torchrun
def test_a_job_on_two_ranks(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    output = run_job(tmp_path / "job", "zero3", 2, *random_fault(1, 2), "async")
    assert "this job was restarted" in output
    check(tmp_path / "job", undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_job_on_four_ranks(seed: int, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    kind = "async" if seed % 3 == 0 else "waiting"
    output = run_job(tmp_path / "job", STRATEGIES[seed % 4], 4, *random_fault(seed, 4), kind)
    assert "this job was restarted" in output
    check(tmp_path / "job", undisturbed)
