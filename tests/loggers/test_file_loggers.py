"""metrics.jsonl and metrics.csv: format of a row, new columns, and resumed runs."""

import csv
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from roomier.core.errors import RoomierError
from roomier.loggers import CSVLogger, JSONLLogger
from roomier.loggers.files import write_hyperparams


def json_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def csv_rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_json_row_has_step_time_and_metrics_and_is_written_immediately(tmp_path: Path) -> None:
    logger = JSONLLogger()
    logger.start(tmp_path)
    before_s = time.time()
    logger.log_metrics({"loss": 2.5, "acc": 0.25}, step=7)
    [row] = json_rows(tmp_path)  # the logger still has the file open
    assert list(row) == ["step", "time", "loss", "acc"]
    assert (row["step"], row["loss"], row["acc"]) == (7, 2.5, 0.25)
    assert abs(row["time"] - before_s) < 5
    logger.finalize("success")


def test_nonfinite_numbers_are_strings_in_valid_json(tmp_path: Path) -> None:
    logger = JSONLLogger()
    logger.start(tmp_path)
    logger.log_metrics({"a": math.nan, "b": math.inf, "c": -math.inf}, step=1)
    logger.finalize("success")
    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (row["a"], row["b"], row["c"]) == ("NaN", "Infinity", "-Infinity")
    assert math.isnan(float(row["a"]))
    assert float(row["b"]) == math.inf
    assert float(row["c"]) == -math.inf


def test_columns_of_a_table_are_not_formulas(tmp_path: Path) -> None:
    names = ["=cmd|' /C calc'!A0", "+1", "-loss", "@SUM(A1)", "a=b", "recall@5"]
    for step in (1, 2):
        logger = CSVLogger()
        logger.start(tmp_path, resumed_step=step - 1)
        logger.log_metrics(dict.fromkeys(names, -0.5), step=step)
        logger.finalize("success")
    header, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
    columns = next(csv.reader([header]))
    assert columns[2:] == ["'=cmd|' /C calc'!A0", "'+1", "'-loss", "'@SUM(A1)", "a=b", "recall@5"]
    assert [row.split(",")[2:] for row in rows] == [["-0.5"] * 6] * 2


@pytest.mark.parametrize("kind", [JSONLLogger, CSVLogger])
def test_names_with_control_characters_are_rejected(tmp_path: Path, kind: type[JSONLLogger | CSVLogger]) -> None:
    logger = kind(prefix="run")
    logger.start(tmp_path)
    with pytest.raises(RoomierError, match="control characters"):
        logger.log_metrics({"good": 1.0, "\x1b[2J": 1.0}, step=1)
    logger.log_metrics({"später": 1.0, "損失": 2.0}, step=2)
    logger.finalize("success")
    [row] = json_rows(tmp_path) if kind is JSONLLogger else csv_rows(tmp_path)
    assert [float(row["run-später"]), float(row["run-損失"])] == [1.0, 2.0]


@pytest.mark.parametrize("kind", [JSONLLogger, CSVLogger])
def test_metric_named_step_has_another_column(tmp_path: Path, kind: type[JSONLLogger | CSVLogger]) -> None:
    logger = kind()
    logger.start(tmp_path)
    logger.log_metrics({"step": 0.5, "time": 0.25}, step=3)
    logger.finalize("success")
    [row] = json_rows(tmp_path) if kind is JSONLLogger else csv_rows(tmp_path)
    assert int(row["step"]) == 3
    assert (float(row["metric/step"]), float(row["metric/time"])) == (0.5, 0.25)


@pytest.mark.parametrize("kind", [JSONLLogger, CSVLogger])
def test_resumed_run_drops_rows_after_its_step(tmp_path: Path, kind: type[JSONLLogger | CSVLogger]) -> None:
    logger = kind()
    logger.start(tmp_path)
    for step in (10, 20, 20, 30):
        logger.log_metrics({"loss": step / 10}, step)
    logger.finalize("failed")

    logger = kind()
    logger.start(tmp_path, resumed_step=20)
    logger.log_metrics({"loss": 9.0}, 30)
    logger.finalize("success")
    rows = json_rows(tmp_path) if kind is JSONLLogger else csv_rows(tmp_path)
    assert [(int(row["step"]), float(row["loss"])) for row in rows] == [(10, 1.0), (20, 2.0), (20, 2.0), (30, 9.0)]
    assert [path.name for path in tmp_path.iterdir()] == [kind.file_name]


@pytest.mark.parametrize("kind", [JSONLLogger, CSVLogger])
def test_incomplete_row_is_dropped_with_a_notice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: type[JSONLLogger | CSVLogger]
) -> None:
    logger = kind()
    logger.start(tmp_path)
    logger.log_metrics({"loss": 1.0}, 1)
    logger.log_metrics({"loss": 22.0}, 2)
    logger.finalize("failed")
    path = tmp_path / kind.file_name
    path.write_bytes(path.read_bytes()[:-3])  # simulates a full disk or a power failure

    logger = kind()
    logger.start(tmp_path, resumed_step=2)
    logger.log_metrics({"loss": 3.0}, 3)
    logger.finalize("success")
    rows = json_rows(tmp_path) if kind is JSONLLogger else csv_rows(tmp_path)
    assert [(int(row["step"]), float(row["loss"])) for row in rows] == [(1, 1.0), (3, 3.0)]
    assert "dropped 1 incomplete row" in capsys.readouterr().err


def test_rows_are_appended_without_a_resumed_step(tmp_path: Path) -> None:
    for _ in range(2):
        logger = JSONLLogger()
        logger.start(tmp_path)
        logger.log_metrics({"loss": 1.0}, 5)
        logger.finalize("success")
    assert [row["step"] for row in json_rows(tmp_path)] == [5, 5]


def test_new_csv_columns_keep_existing_rows(tmp_path: Path) -> None:
    logger = CSVLogger()
    logger.start(tmp_path)
    logger.log_metrics({"loss": 1.5}, 1)
    inode = (tmp_path / "metrics.csv").stat().st_ino
    logger.log_metrics({"loss": 1.25}, 2)
    assert (tmp_path / "metrics.csv").stat().st_ino == inode, "rows with known columns are appended"
    logger.log_metrics({"val, loss": math.nan}, 2)
    logger.log_metrics({"loss": math.inf, "val, loss": 0.5}, 3)
    logger.finalize("success")
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert lines[0] == 'step,time,loss,"val, loss"'
    rows = csv_rows(tmp_path)
    assert [(row["step"], row["loss"], row["val, loss"]) for row in rows] == [
        ("1", "1.5", ""),
        ("2", "1.25", ""),
        ("2", "", "nan"),
        ("3", "inf", "0.5"),
    ]


def test_csv_columns_of_a_resumed_run_keep_their_order(tmp_path: Path) -> None:
    logger = CSVLogger()
    logger.start(tmp_path)
    logger.log_metrics({"b": 1.0, "a": 2.0}, 1)
    logger.finalize("failed")
    logger = CSVLogger()
    logger.start(tmp_path, resumed_step=1)
    logger.log_metrics({"a": 3.0, "b": 4.0}, 2)
    logger.finalize("success")
    assert (tmp_path / "metrics.csv").read_text().splitlines()[0] == "step,time,b,a"
    assert [(row["a"], row["b"]) for row in csv_rows(tmp_path)] == [("2.0", "1.0"), ("3.0", "4.0")]


@pytest.mark.parametrize("kind", [JSONLLogger, CSVLogger])
def test_hyperparameters_are_written_next_to_the_rows(tmp_path: Path, kind: type[JSONLLogger | CSVLogger]) -> None:
    logger = kind()
    logger.start(tmp_path)
    logger.log_hyperparams({"lr": 0.1, "model": {"depth": 2}, "path": Path("x")})
    logger.finalize("success")
    params = json.loads((tmp_path / "hparams.json").read_text())
    assert params["lr"] == 0.1
    assert params["model"] == {"depth": 2}
    assert "x" in params["path"]


def test_hyperparameter_names_that_json_cannot_represent(tmp_path: Path) -> None:
    write_hyperparams(tmp_path, {"outer": [{(1, 2): 0.1, 3: "x", None: {Path("a"): 1}}], "lr": 0.5})
    params = json.loads((tmp_path / "hparams.json").read_text())
    assert params == {"outer": [{"(1, 2)": 0.1, "3": "x", "null": {"a": 1}}], "lr": 0.5}


def test_resumed_run_keeps_the_hyperparameters_of_the_first_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for resumed_step, rate in ((None, 0.1), (20, 0.1), (40, 0.5)):
        for logger in (JSONLLogger(), CSVLogger()):
            logger.start(tmp_path, resumed_step)
            logger.log_hyperparams({"lr": rate})
            logger.finalize("success")
    assert json.loads((tmp_path / "hparams.json").read_text()) == {"lr": 0.1}
    assert json.loads((tmp_path / "hparams-from-step=40.json").read_text()) == {"lr": 0.5}
    assert not (tmp_path / "hparams-from-step=20.json").exists(), "both hyperparameters are equal"
    assert capsys.readouterr().err.count("the new values are in hparams-from-step=40.json") == 1
