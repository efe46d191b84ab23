"""``roomier report RUN...`` without forecasts: metrics, throughput, memory and settings of runs side by side."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from roomier.cli.main import main
from roomier.plan import Plan
from roomier.planner.report.curves import thinned
from tests.planner.browser import look_at
from tests.planner.page_examples import record
from tests.planner.test_page import Balance, text_of

EVIL = "<script>alert(1)</script>"


def write_run(folder: Path, rows: list[dict[str, Any]], tail: str = "", **hyperparameters: Any) -> Path:
    folder.mkdir(parents=True)
    text = "".join(json.dumps({"time": 10.0 + index, **row}) + "\n" for index, row in enumerate(rows))
    (folder / "metrics.jsonl").write_text(text + tail)
    if hyperparameters:
        (folder / "hparams.json").write_text(json.dumps(hyperparameters))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """A complete run, a run that diverged, a killed run with another metric, and a run before its first log step."""
    full = [{"step": step, "loss": 4.0 - step / 100, "samples_per_s": 50.0 + step} for step in range(10, 110, 10)]
    bad = [{"step": step, "loss": "NaN" if step in (30, 50) else 1.0 / step} for step in range(10, 60, 10)]
    other = [{"step": 10, EVIL: 1.0}, {"step": 20, EVIL: 2e9}]
    found = [
        write_run(tmp_path / "a" / "version_0", full, lr=0.1, width=16),
        write_run(tmp_path / "b" / "version_0", bad, lr=0.2, width=16, name=EVIL),
        write_run(tmp_path / "killed", other, tail='{"step": 30, "lo'),
        write_run(tmp_path / "version_7", []),
    ]
    record(num_ranks=1).write(found[0])
    for folder, mode in zip(found, ("32-true", "bf16-mixed"), strict=False):
        (folder / "plan.yaml").write_text(Plan.of({"precision": {"mode": mode}}).to_yaml())
    (found[2] / "plan.yaml").write_text("{")
    return found


def test_runs_are_compared_in_a_table_and_json(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["report", *map(str, runs), str(runs[0])]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert re.search(r"a/version_0 +100 +3 +150 +\S+ GiB +9 s", out)
    assert re.search(r"b/version_0 +50 +nan +4 s", out)
    assert re.search(r"killed +20 +2\.0 B +1 s", out)
    assert re.search(r"version_7 +none", out)
    assert "lr: 0.1 (a/version_0), 0.2 (b/version_0)\n" in out
    assert "plan.precision.mode: 32-true (a/version_0), bf16-mixed (b/version_0)\n" in out
    assert "width" not in out
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [run["steps"] for run in found["runs"]] == [100, 50, 20, 0]
    assert [run["metrics"].get("loss") for run in found["runs"]] == [3.0, "NaN", None, None]
    assert found["runs"][0]["measured_bytes"] == record(num_ranks=1).measured_bytes
    assert found["differences"]["lr"] == {"0.1": ["a/version_0"], "0.2": ["b/version_0"]}


def test_page_draws_one_line_for_each_run_with_gaps(runs: list[Path], tmp_path: Path) -> None:
    assert main(["report", *map(str, runs), "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    balance = Balance()
    balance.feed(page)
    assert balance.open == []
    assert EVIL not in page
    assert not re.search(r"(?:src|href)=|url\(|https?://|<script", page)
    text = text_of(page)
    assert "4 runs" in text
    assert "b/version_0: nan" in text
    [loss] = re.findall(r"<figcaption>loss</figcaption>.*?</figure>", page, re.DOTALL)
    paths = re.findall(r'<path d="(M[^"]+)" fill="none"', loss)
    assert [(path.count("M"), path.count("L"), path.count("h0")) for path in paths] == [(1, 9, 1), (2, 1, 2)]
    assert "(logarithmic)" in page


def test_a_run_without_a_forecast_is_shown_alone(runs: list[Path], tmp_path: Path) -> None:
    assert main(["report", str(runs[1]), "--html", str(tmp_path / "page.html")]) == 0
    assert "Settings that differ" not in (tmp_path / "page.html").read_text()


def test_thinned_curve_keeps_spikes_and_gaps() -> None:
    curve = [(step, 1.0 + step % 7 / 100) for step in range(10_000)]
    curve[5001], curve[7003] = (5001, 99.0), (7003, float("nan"))
    found = thinned(curve, 100)
    assert len(found) <= 201
    assert (5001, 99.0) in found
    assert 7003 in [step for step, _ in found]
    assert found == sorted(found, key=lambda point: point[0])


@pytest.mark.services
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_layout_of_many_runs_with_long_names(runs: list[Path], tmp_path: Path, *, is_dark: bool) -> None:
    rows = [{"step": 1, "loss": 1e-9, "x" * 90: 3.0}, {"step": 2, "loss": 1e9}]
    many = [write_run(tmp_path / "long" / f"{'n' * 70}_{index}" / "version_0", rows, lr=index) for index in range(9)]
    assert main(["report", *map(str, runs + many), "--html", str(tmp_path / "page.html")]) == 0
    for found in look_at((tmp_path / "page.html").read_text(), (390, 1440), tmp_path, is_dark=is_dark):
        assert found["scroll_width"] <= found["width"]
        for fault in ("outside", "clipped", "overlaps", "faint"):
            assert found[fault] == [], f"{fault} at {found['width']} px"
