"""``python -m benchmarks levers --json`` as a command, with a model that is too small for meaningful times."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import levers
from benchmarks.lever_rows import BERT_SIZES, ROWS, keywords_of
from benchmarks.levers import markdown
from roomier.core.errors import RoomierError
from roomier.plan import plan_from_flags

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "benchmarks", "levers", "--json"]


def run(levers: str, folder: Path) -> dict[str, Any]:
    words = ["--model", "bert-tiny", "--seq-len", "64", "--steps", "1", "--repeats", "1", "--threads", "1"]
    words += ["--levers", levers, "--output", str(folder)]
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)  # fails if the output contains other text
    return {**found, "folder": words[-1], "errors": done.stderr}


pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run("vanilla", tmp_path_factory.mktemp("levers"))


def test_both_trainers_run_the_requested_rows(result: dict[str, Any]) -> None:
    check_rows(result, ["vanilla"])


@pytest.mark.slow
def test_both_trainers_run_all_levers_at_once(tmp_path: Path) -> None:
    check_rows(run("vanilla, all", tmp_path), ["vanilla", "all"])


def check_rows(result: dict[str, Any], names: list[str]) -> None:
    turns = [(row["lever"], row["framework"]) for row in result["rows"]]
    assert turns == [(name, framework) for name in names for framework in ("roomier", "transformers")]
    for row in result["rows"]:
        assert "error" not in row, row["error"]
        assert row["samples_per_s"] == pytest.approx(4 / row["step_s"], rel=1e-2)
        assert sum(row["peak_by_kind"].values()) == row["peak_bytes"] > 0


def test_both_trainers_hold_the_same_tensors(result: dict[str, Any]) -> None:
    """Without a lever, both runs have the same model, batch and optimizer, so only a few small tensors differ."""
    ours, theirs = result["rows"][:2]
    assert ours["peak_bytes"] == pytest.approx(theirs["peak_bytes"], rel=0.02)
    assert ours["peak_by_kind"]["optimizer_state"] == theirs["peak_by_kind"]["optimizer_state"]


def test_the_report_is_written(result: dict[str, Any]) -> None:
    folder = Path(result["folder"])
    assert (folder / "levers.png").read_bytes().startswith(b"\x89PNG")
    text = (folder / "levers.md").read_text()
    assert text == markdown(result)
    assert text.count("| vanilla |") == 2
    assert "python -m benchmarks levers" in text


@pytest.mark.parametrize(("device_type", "mode"), [("cpu", "bf16-mixed"), ("cuda", "16-mixed")])
@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_a_plan(name: str, device_type: str, mode: str) -> None:
    plan = plan_from_flags(**keywords_of(name, device_type), accelerator=device_type)
    if ROWS[name].roomier.get("precision") == "16":
        assert plan.precision.mode == mode


def test_transformers_has_the_arguments_of_every_row() -> None:
    from transformers import TrainingArguments

    known = {field.name for field in dataclasses.fields(TrainingArguments)} | {"precision"}
    for name, row in ROWS.items():
        assert set(row.transformers or {}) <= known, name


def test_a_row_without_peer_or_meaning_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levers, "find_spec", lambda name: None if name == "bitsandbytes" else name)
    turns = levers.turns_of("bert-tiny")
    assert ("transformers", "adafactor") in turns
    assert ("transformers", "adam8bit") not in turns
    assert ("roomier", "adam8bit") in turns
    assert ("roomier", "chunked loss") not in turns
    assert ("roomier", "chunked loss") in levers.turns_of("gpt-nano")
    monkeypatch.setattr(levers, "find_spec", lambda name: None if name == "accelerate" else name)
    assert {framework for framework, _ in levers.turns_of("gpt-nano")} == {"roomier"}


def test_unknown_names_are_rejected_before_a_process_starts() -> None:
    with pytest.raises(RoomierError, match=r"--levers=.vanila.: is unknown\. Did you mean .vanilla."):
        levers.turns_of("bert-tiny", "vanila")
    assert set(BERT_SIZES) >= {"bert-large", "bert-base", "bert-tiny"}


def test_a_failing_row_is_reported_and_the_others_remain() -> None:
    runs = [{"step_s": [0.5, 0.25, 0.5], "peak_bytes": 10, "peak_rss_bytes": None, "peak_by_kind": {}}]
    good = levers.row_of("roomier", "vanilla", runs)
    bad = levers.row_of("roomier", "all", [*runs, {"error": "out of memory", "code": -9}])
    assert (good["samples_per_s"], good["peak_bytes"]) == (8.0, 10)
    assert (bad["samples_per_s"], bad["error"]) == (None, "out of memory")
    assert levers.lines({"rows": [good, bad]})[1][2] == "failed"
