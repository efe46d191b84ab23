"""``roomier report``: the forecast and the measurement of a run, as a table, JSON and a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roomier.cli.main import main
from tests.planner.page_examples import record

RATES = {"samples_per_s": 32.5, "tokens_per_s": 33280.0}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three runs; the newest has no forecast."""
    for name in ("version_2", "version_10", "version_11"):
        (tmp_path / name).mkdir()
    record(num_ranks=1).write(tmp_path / "version_2")
    record(num_ranks=4).write(tmp_path / "version_10")
    rows = [{"step": 50, "time": 1.0, "loss": 2.0}, {"step": 100, "time": 2.0, **RATES}]
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 150, "ti'
    (tmp_path / "version_10" / "metrics.jsonl").write_text(text)
    return tmp_path


def test_run_is_printed_as_a_table(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(runs / "version_10")]) == 0
    out = capsys.readouterr().out
    found = record(num_ranks=4)
    assert found.line() in out
    assert "rank 3, the largest of 4 ranks" in out
    assert "optimizer state" in out
    assert "speed: 32 samples/s, 33.3 K tokens/s" in out
    assert "A note." in out


def test_folder_of_runs_means_the_newest_run_with_a_forecast(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(runs), "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    assert expected["run"] == str(runs / "version_10")
    assert expected["rates"] == RATES
    assert expected["forecast_bytes"] == record().forecast_bytes
    assert expected["measured_bytes"] == record().measured_bytes
    assert len(expected["measured"]) == 4


def test_page_is_written(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = runs / "report.html"
    assert main(["report", str(runs), "--html", str(page), "--json"]) == 0
    json.loads(capsys.readouterr().out)
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "33.3 K tokens/s" in text
    assert str(runs / "version_10") in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "the following arguments are required: run"),
        (["none"], "run='none': must be a folder. Pass a run folder such as runs/version_0"),
        (["."], "contains no run"),
        (["version_11"], "run='version_11': has neither metrics (metrics.jsonl) nor forecast.json"),
        (["version_2", "--html", "no/such/page.html"], "--html='no/such/page.html': cannot be written"),
        (["version_2", "--hmtl", "x"], "unrecognized arguments"),
    ],
)
def test_invalid_options_give_one_message(
    runs: Path, words: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs / "version_2" if words == ["."] else runs)
    if words == ["."]:
        (runs / "version_2" / "forecast.json").unlink()
    assert main(["report", *words]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": 99}', '{"format": 1, "forecast": {}, "machine": {}}']
)
def test_unreadable_file_is_rejected(runs: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "version_2" / "forecast.json").write_text(text)
    assert main(["report", str(runs / "version_2")]) == 2
    err = capsys.readouterr().err
    assert "cannot be read" in err
    assert "MemoryForecast()" in err
    assert "Traceback" not in err
