"""Commands and tests that load the simulated accelerator as a plugin of torch, like the package of a real device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.parts import PARTS
from tests.device.test_real_device import LEVERS
from tests.simulator.build import missing_requirement

pytestmark = pytest.mark.more

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "tests" / "simulator" / "plugin"  # declares an entry point that torch calls when it is imported


@pytest.fixture
def environment() -> dict[str, str]:
    """Return the environment variables that make the device available in processes."""
    reason = missing_requirement()
    if reason is not None:
        pytest.skip(reason)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (PLUGIN, ROOT / "src", ROOT))), "OMP_NUM_THREADS": "1"}


def test_the_benchmark_for_gpus_completes_all_parts(environment: dict[str, str], tmp_path: Path) -> None:
    words = ["gpu", "--json", "--size", "tiny", "--accelerator", "simulated", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "benchmarks", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert {name: part["status"] for name, part in found["parts"].items()} == dict.fromkeys(PARTS, "complete")
    rows = {name: {row["row"]: row for row in part["rows"]} for name, part in found["parts"].items()}
    assert found["device_type"] == "simulated"
    assert {row["status"] for part in rows.values() for row in part.values()} == {"measured", "unsupported"}
    planner = rows["planner"]["gpt-nano, vanilla"]
    assert planner["allocated_bytes"] == pytest.approx(planner["forecast_allocated_bytes"], rel=0.01)
    assert not planner["counts_operations"], "the allocator of the device was read"


@pytest.mark.slow
@pytest.mark.parametrize(("accelerator", "outcome"), [("simulated", "passed"), ("", "skipped")])
def test_the_tests_for_a_real_device_run(environment: dict[str, str], accelerator: str, outcome: str) -> None:
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "tests" / "device" / "test_real_device.py")]
    settings = {**environment, "ROOMIER_TEST_ACCELERATOR": accelerator}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=settings, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    assert f"{len(LEVERS)} {outcome}" in done.stdout
