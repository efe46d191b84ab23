"""``python -m benchmarks gpu`` with tiny models on the CPU: its results file, and parts that fail or take too long."""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from rich.console import Console

from benchmarks.__main__ import main
from benchmarks.gpu import case
from benchmarks.gpu.case import KEY, Results, default_path, facts_of, measure_part
from benchmarks.gpu.parts import PARTS, Part, Setting
from roomier.core.errors import RoomierError

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "benchmarks"]
FACTS = {**dict.fromkeys(KEY, "x"), "machine": {"cpu": "x"}, "command": "python -m benchmarks gpu"}
SETTING = Setting("tiny", "cpu")
# The other parts run in ``make test-more`` on the simulated accelerator (tests/device/test_simulated_plugin.py).
QUICK_PARTS = ("copies", "mfu", "overhead")

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu") / "results.jsonl"


def run_parts(names: Sequence[str], out: Path) -> dict[str, Any]:
    words = ["gpu", "--json", "--size", "tiny", "--accelerator", "cpu", "--parts", ",".join(names)]
    done = subprocess.run([*COMMAND, *words, "--out", str(out)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)  # fails if the output contains other text
    return found


@pytest.fixture(scope="module")
def result(out: Path) -> dict[str, Any]:
    """Return the printed result of the quick parts, which run once for this file."""
    return run_parts(QUICK_PARTS, out)


@pytest.fixture(scope="module")
def long_result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the printed result of the other parts."""
    names = [name for name in PARTS if name not in QUICK_PARTS]
    return run_parts(names, tmp_path_factory.mktemp("long") / "results.jsonl")


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_all_parts_are_complete(result: dict[str, Any]) -> None:
    assert {name: part["status"] for name, part in result["parts"].items()} == dict.fromkeys(QUICK_PARTS, "complete")
    assert result["failed"] == []
    for name, part in result["parts"].items():
        assert part["rows"], name
        assert part["rows_left"] == part["rows_failed"] == []


def test_each_line_contains_machine_commit_and_command(result: dict[str, Any], out: Path) -> None:
    lines = lines_of(out)
    rows = [each for each in lines if each["record"] == "row"]
    assert len(rows) == sum(len(part["rows"]) for part in result["parts"].values())
    assert [each["part"] for each in lines if each["record"] == "end"] == list(QUICK_PARTS)
    for each in lines:
        assert {*KEY, "commit", "machine", "command", "measured_at", "device_type", "status", "took_s"} <= set(each)
        assert each["command"].startswith("python -m benchmarks gpu --json --size tiny")
        assert (each["device_type"], each["num_devices"], each["size"]) == ("cpu", 1, "tiny")


def rows_of(result: dict[str, Any], part: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [each for each in result["parts"][part]["rows"] if each["status"] == "measured"]
    assert rows
    return rows


@pytest.mark.slow
def test_forecasts_of_memory_agree_with_the_measurement(long_result: dict[str, Any]) -> None:
    for row in rows_of(long_result, "planner"):
        assert row["counts_operations"]
        assert row["reserved_bytes"] is None
        assert abs(row["allocated_error"]) < 0.01, row["row"]
        assert sum(row["by_kind"].values()) == row["allocated_bytes"]
        assert row["allocated_error"] == row["forecast_allocated_bytes"] / row["allocated_bytes"] - 1


@pytest.mark.slow
def test_both_trainers_run_in_one_process(long_result: dict[str, Any]) -> None:
    rows = rows_of(long_result, "levers")
    assert [each["row"] for each in rows] == [
        "vanilla, roomier",
        "all, roomier",
        "vanilla, transformers",
        "all, transformers",
    ]
    # Both rows have the same tensors, except for a few small ones.
    assert rows[0]["peak_bytes"] == pytest.approx(rows[2]["peak_bytes"], rel=0.02)
    assert rows[0]["published"] == [8.86, 14949]


def test_a_large_model_runs_with_the_plan_of_the_planner(result: dict[str, Any]) -> None:
    (row,) = rows_of(result, "mfu")
    assert row["tokens_per_s"] == pytest.approx(row["tokens_per_step"] / row["step_s"])
    assert row["tokens_per_step"] == 64
    assert row["call"].startswith("Trainer(")
    assert row["forecast_step_s"] > 0
    assert row["forecast_allocated_bytes"] == pytest.approx(row["allocated_bytes"], rel=0.05)
    assert row["mfu"] is None  # no data sheet contains the peak of a CPU


@pytest.mark.slow
def test_strategies_are_measured(long_result: dict[str, Any]) -> None:
    (row,) = rows_of(long_result, "strategies")
    assert [each["strategy"] for each in row["rows"]] == ["torch_ddp", "single"]
    assert row["rows"][0]["loss"] == pytest.approx(row["rows"][1]["loss"], rel=1e-3)


def test_copies_and_overhead_are_measured(result: dict[str, Any]) -> None:
    for row in rows_of(result, "copies"):
        assert row["bytes_per_s"] == pytest.approx(row["num_bytes"] / row["copy_s"])
    (row,) = rows_of(result, "overhead")
    assert row["overhead_us"] == pytest.approx(
        row["samples_wall_us"]["trainer"][0] - row["samples_wall_us"]["bare"][0], abs=0.01
    )


def test_a_repetition_skips_completed_parts(
    result: dict[str, Any], out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = out.read_bytes()
    monkeypatch.setattr(case, "_run", lambda *arguments: pytest.fail("a completed part was repeated"))
    words = ["gpu", "--size", "tiny", "--accelerator", "cpu", "--parts", ",".join(QUICK_PARTS)]
    assert main([*words, "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert out.read_bytes() == before
    assert printed.err.count("is complete in") == len(QUICK_PARTS)
    assert result["parts"]["overhead"]["rows"][0]["summary"].split()[0] in printed.out


def test_lines_of_a_different_size_or_commit_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "results.jsonl"
    results = Results(path, FACTS)
    results.append("row", "copies", row="a", status="measured")
    results.append("row", "copies", row="b", status="failed")
    results.append("end", "copies", status="complete")
    with path.open("a") as file:
        file.write('{"record": "row", "part": "cop')  # the process was stopped while it wrote this record
    results.append("row", "copies", row="c", status="unsupported")
    assert results.finished_rows("copies") == {"a", "c"}
    assert set(results.rows("copies")) == {"a", "b", "c"}
    for name in KEY:
        assert not Results(path, {**FACTS, name: "y"}).ends("copies")
    assert results.finished_rows("planner") == set()


def test_the_default_file_is_named_after_device_and_commit() -> None:
    facts = {"device": "NVIDIA H100 80GB HBM3", "commit": "0123456789abcdef"}
    assert default_path(facts) == Path("benchmarks/results/gpu-nvidia-h100-80gb-hbm3-0123456789.jsonl")
    assert default_path({**facts, "commit": None}).name == "gpu-nvidia-h100-80gb-hbm3-unknown.jsonl"
    assert set(KEY) <= set(facts_of(SETTING))


class Clock:
    """A clock that advances only when a row runs."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def row(self, duration_s: float) -> Callable[[], dict[str, Any]]:
        def measure() -> dict[str, Any]:
            self.now_s += duration_s
            return {"value": duration_s}

        return measure


def part_of(rows: dict[str, Callable[[], dict[str, Any]]]) -> Any:
    return SimpleNamespace(rows=lambda setting: rows, summary=lambda values: f"{values['value']} s")


def test_no_row_starts_that_would_exceed_the_time_limit(tmp_path: Path) -> None:
    """The rows can use 90 s of the time limit of 100 s. After rows of 20 s and 40 s, a third row would end after 100
    s."""
    results, clock = Results(tmp_path / "results.jsonl", FACTS), Clock()
    part = part_of({name: clock.row(took_s) for name, took_s in (("a", 20), ("b", 40), ("c", 1), ("d", 1))})
    measure_part("planner", part, SETTING, results, 100, clock)
    (end,) = results.ends("planner")
    assert (end["status"], end["rows_left"], end["took_s"]) == ("incomplete", ["c", "d"], 60)
    measure_part("planner", part, SETTING, results, 100, clock)  # a repetition continues with the remaining rows
    assert results.ends("planner")[-1]["status"] == "complete"
    assert clock.now_s == 62
    assert {name: each["took_s"] for name, each in results.rows("planner").items()} == {
        "a": 20,
        "b": 40,
        "c": 1,
        "d": 1,
    }


def test_a_failed_row_is_recorded_and_repeated(tmp_path: Path) -> None:
    results, clock = Results(tmp_path / "results.jsonl", FACTS), Clock()
    rows = {"a": lambda: {}["missing"], "b": clock.row(1), "c": lambda: {"unsupported": "no pinned memory"}}
    measure_part("copies", part_of(rows), SETTING, results, 100, clock)
    (end,) = results.ends("copies")
    assert (end["status"], end["rows_failed"], end["rows_left"]) == ("failed", ["a"], [])
    found = results.rows("copies")
    assert {name: each["status"] for name, each in found.items()} == {
        "a": "failed",
        "b": "measured",
        "c": "unsupported",
    }
    assert found["a"]["error"] == "KeyError: 'missing'"
    measure_part("copies", part_of({**rows, "a": clock.row(1)}), SETTING, results, 100, clock)
    assert results.ends("copies")[-1]["status"] == "complete"
    assert clock.now_s == 2  # the measured row did not run again


@pytest.fixture
def parts_with_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "def rows(setting):\n    {}\ndef summary(values):\n    return 'done'\n"
    bodies = {
        "broken_part": "raise RuntimeError('the driver is missing')",
        "endless_part": "import time; time.sleep(600)",
        "good_part": "return {'only': dict}",
    }
    for name, body in bodies.items():
        (tmp_path / f"{name}.py").write_text(code.format(body))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    limits_s = {"broken_part": 100.0, "endless_part": 0.1, "good_part": 100.0}
    monkeypatch.setattr(case, "PARTS", {name: Part(name, limit_s, limit_s) for name, limit_s in limits_s.items()})


def test_a_failing_part_is_recorded_and_the_others_run(
    parts_with_failures: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.jsonl"
    assert main(["gpu", "--json", "--size", "tiny", "--accelerator", "cpu", "--out", str(path)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["failed"] == ["broken_part", "endless_part"]
    parts = found["parts"]
    assert "ended with code 1" in parts["broken_part"]["error"]
    assert "the driver is missing" in parts["broken_part"]["error"]
    assert "was stopped after 0.1 s" in parts["endless_part"]["error"]
    assert parts["good_part"]["status"] == "complete"
    assert [each["status"] for each in lines_of(path) if each["record"] == "end"] == ["failed", "failed", "complete"]
    console = Console(width=200, record=True, quiet=True)
    console.print(case.table(found))


def test_the_processes_that_a_part_started_are_stopped(tmp_path: Path) -> None:
    child = "[sys.executable, '-c', 'import time; time.sleep(600)']"
    # this process ends before the process that it started
    code = f"import subprocess, sys; print(subprocess.Popen({child}).pid)"
    with (tmp_path / "output").open("w+") as output:
        assert case.run_with_limit([sys.executable, "-c", code], output, 100) == 0
        output.seek(0)
        pid = int(output.read())
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            # a signal takes effect later; if the process never ends, the timeout of all tests ends this loop
            time.sleep(0.01)


def test_the_time_limits_leave_time_for_the_device_tests() -> None:
    assert all(part.limit_s <= 4 * 60 for part in PARTS.values())
    assert sum(part.limit_s for part in PARTS.values()) <= 9 * 60


def test_unknown_parts_and_accelerators_are_rejected(tmp_path: Path) -> None:
    options = argparse.Namespace(size="tiny", accelerator="cpu", parts="planer", out=str(tmp_path / "results.jsonl"))
    with pytest.raises(RoomierError, match=r"--parts='planer': is unknown\. Did you mean 'planner'\?"):
        case.measure(options)
    options.accelerator, options.parts = "warp", ""
    with pytest.raises(RoomierError, match="accelerator='warp'"):
        case.measure(options)
    assert not list(tmp_path.iterdir())
