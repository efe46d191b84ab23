"""``python -m benchmarks overhead --json``: the tests read its complete standard output."""

import io
import statistics
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
from rich.console import Console

from benchmarks import overhead

pytestmark = pytest.mark.more
STEPS, REPEATS = 200, 1


@pytest.fixture(scope="module")
def result(bench: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return bench("overhead", "--json", "--steps", str(STEPS), "--repeats", str(REPEATS))


def test_the_overhead_is_the_difference_of_trainer_and_bare_loop(result: dict[str, Any]) -> None:
    # Only an idle machine can measure the value. Under load, the difference between two short times can be negative.
    # The number of calls, which is checked below, does not depend on the load.
    for kind in ("wall", "cpu"):
        samples = result[f"samples_{kind}_us"]
        both = zip(samples["trainer"], samples["bare"], strict=True)
        expected = statistics.median(trainer - bare for trainer, bare in both)
        assert result["overhead_us" if kind == "wall" else "overhead_cpu_us"] == pytest.approx(expected, abs=0.01)
    assert result["bare_us"] > 20


@pytest.mark.slow
def test_the_trainer_stays_close_to_the_bare_loop(result: dict[str, Any]) -> None:
    assert 0 < result["overhead_cpu_us"] < 200  # the goal is 60 us on an idle machine


def test_few_frames_between_fit_and_training_step(result: dict[str, Any]) -> None:
    assert 1 <= result["frames_to_training_step"] <= 4
    assert len(result["frames"]) == result["frames_to_training_step"]
    assert result["frames"][0].startswith("train/fit.py:")


def test_few_calls_are_made_per_step(result: dict[str, Any]) -> None:
    assert 5 < result["calls_per_step"] < 60


def test_the_measured_trainer_has_default_settings(result: dict[str, Any]) -> None:
    assert set(result["trainer"]["callbacks"]) == {"ProgressBar", "ModelSummary", "ModelCheckpoint"}
    assert len(result["trainer"]["loggers"]) == 2
    assert result["trainer"]["log_every_n_steps"] == 50


def test_a_result_contains_machine_commit_and_command(result: dict[str, Any]) -> None:
    assert result["case"] == "overhead"
    assert result["command"].endswith(f"-m benchmarks overhead --json --steps {STEPS} --repeats {REPEATS}")
    assert {"torch", "roomier", "python", "commit", "has_uncommitted_changes", "measured_at"} <= set(result)
    assert result["machine"]["num_cores"] >= 1
    assert result["machine"]["cpu"]
    for samples in (result["samples_wall_us"], result["samples_cpu_us"]):
        assert {"bare", "trainer"} <= set(samples)
        assert all(len(values) == REPEATS for values in samples.values())


def test_small_costs_are_reported(result: dict[str, Any]) -> None:
    assert {"log_us", "idle_callback_us", "empty_hook_us"} <= set(result)
    assert 0 < result["import_s"] < 30
    assert result["import_torch_s"] > 0


def test_lightning_is_compared_if_it_is_installed(result: dict[str, Any]) -> None:
    is_here = any(find_spec(name) is not None for name in ("lightning", "pytorch_lightning"))
    assert ("lightning" in result) == is_here
    if is_here:
        assert {"log_us", "idle_callback_us", "import_s", "overhead_us"} <= set(result["lightning"])
        assert result["lightning"]["calls_per_step"] > result["calls_per_step"]
        assert {"log_us", "overhead_us"} <= set(result["lightning_module"])


def test_the_table_shows_the_same_figures(result: dict[str, Any]) -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(overhead.table(result))
    text = console.export_text()
    assert f"{result['overhead_us']:.3g} µs" in text
    assert f"torch {result['torch']}" in text
