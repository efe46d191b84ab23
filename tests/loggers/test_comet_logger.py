"""The logger for comet_ml, in offline mode. Results are read from the archives that comet_ml would upload."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from roomier.core.errors import RoomierError
from roomier.loggers import CometLogger

pytest.importorskip("comet_ml")


def messages(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = []
    for path in sorted(folder.rglob("*.zip"), key=lambda each: each.stat().st_mtime_ns):
        with zipfile.ZipFile(path) as archive:
            lines = archive.read("messages.json").decode().splitlines()
        found += [json.loads(line)["payload"] for line in lines if json.loads(line)["type"] == kind]
    return found


@pytest.fixture(autouse=True)
def switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COMET_DISABLE_AUTO_LOGGING", "COMET_DISABLE_ANNOUNCEMENT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("COMET_LOGGING_CONSOLE", "ERROR")


@pytest.mark.more
@pytest.mark.filterwarnings("ignore::DeprecationWarning:comet_ml")
def test_fit_and_resume_use_one_experiment(make_trainer, line, loader, tmp_path: Path) -> None:
    quiet = {"log_env_details": False, "log_git_metadata": False, "log_git_patch": False, "parse_args": False}
    logger = CometLogger(project="p", online=False, prefix="x", name="first", **quiet)
    trainer = make_trainer(logger=logger, max_steps=2, log_every_n_steps=1, enable_checkpointing=True)
    trainer.fit(line, loader)
    logger.experiment.end()
    key = logger.version

    resumed = CometLogger(project="p", online=False, **quiet)
    longer = make_trainer(logger=resumed, max_steps=3, log_every_n_steps=1, enable_checkpointing=True)
    longer.fit(line, loader, ckpt_path="last")
    assert resumed.version == key
    resumed.experiment.end()

    metrics = [each["metric"] for each in messages(tmp_path, "metric_msg")]
    losses = [(each["metricName"], each["step"], each["epoch"]) for each in metrics if "loss" in each["metricName"]]
    assert [each for each in losses if "train_loss" in each[0]] == [
        ("x-train_loss", 1, 0),
        ("x-train_loss", 2, 0),
        ("train_loss", 3, 0),
    ]
    parameters = {
        each["param"]["paramName"]: each["param"]["paramValue"] for each in messages(tmp_path, "parameter_msg")
    }
    assert parameters["width"] == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"project_name": "p"}, "Use project"),
        ({"save_dir": "x"}, "Use offline_directory"),
        ({"offline": True}, "online=False"),
        ({"mode": "make"}, "get_or_create"),
        ({"no_such_thing": 1}, "no_such_thing"),
    ],
)
def test_renamed_arguments_are_rejected(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(RoomierError, match=words):
        CometLogger(**arguments)
