"""The logger for wandb, in offline mode. Results are read from the files that wandb would upload."""

import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roomier.core.errors import RoomierError
from roomier.loggers import WandbLogger

wandb = pytest.importorskip("wandb")


def records(folder: Path) -> list[Any]:
    """Return all records that wandb wrote in ``folder``, in the order in which the runs started."""
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # waits until all files are written
    found = []
    for path in sorted(folder.rglob("*.wandb"), key=os.path.getmtime):
        for data in log_entries(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            found.append(record)
    return found


def log_entries(log: bytes) -> Iterator[bytes]:
    """Yield the entries of a log in LevelDB's format: blocks of 32 KiB after a header of wandb."""
    position, parts = 7, b""
    while position + 7 <= len(log):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", log, position)
        parts += log[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a complete record, or the last part of a record
            yield parts
            parts = b""


def rows(folder: Path) -> list[dict[str, Any]]:
    history = [record.history for record in records(folder) if record.WhichOneof("record_type") == "history"]
    return [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in each.item} for each in history]


@pytest.fixture(scope="module", autouse=True)
def switches() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        patch.setenv("WANDB_CONSOLE", "off")
        patch.setenv("WANDB_DISABLE_GIT", "true")
        yield


@pytest.mark.more
def test_fit_resume_and_test_use_one_run(make_trainer, line, loader, tmp_path: Path) -> None:
    logger = WandbLogger("first", offline=True, project="p", tags=["t"], prefix="x")
    trainer = make_trainer(logger=logger, max_steps=2, log_every_n_steps=1, enable_checkpointing=True)
    trainer.fit(line, loader)
    assert trainer.logger is logger
    assert wandb.run is logger.experiment, "the run stays open for the script"
    trainer.test(line, loader)
    run_id = logger.version
    logger.experiment.finish()

    time.sleep(1)  # wandb names the files of a run by its id and the time in seconds
    resumed = WandbLogger(offline=True, project="p")
    longer = make_trainer(logger=resumed, max_steps=3, log_every_n_steps=1, enable_checkpointing=True)
    longer.fit(line, loader, ckpt_path="last")
    assert resumed.version == run_id
    resumed.experiment.finish()

    written = rows(tmp_path)
    losses = [(row["trainer/global_step"], "x-train_loss" in row) for row in written if "train_loss" in str(row)]
    assert losses == [(1, True), (2, True), (3, False)]
    assert any("x-test_loss" in row for row in written)
    kept = records(tmp_path)
    runs = [record.run for record in kept if record.WhichOneof("record_type") == "run"]
    assert {run.run_id for run in runs} == {run_id}
    assert (runs[0].display_name, runs[0].project, list(runs[0].tags)) == ("first", "p", ["t"])
    config = "".join(str(each.config) for each in kept if each.WhichOneof("record_type") == "config")
    assert '"width"' in config


def test_each_logger_opens_a_run_and_a_run_of_the_user_is_reused(tmp_path: Path) -> None:
    first, second = (WandbLogger(offline=True, project="p", save_dir=tmp_path) for _ in range(2))
    first.start(tmp_path / "run_0")
    first.finalize("success")
    second.start(tmp_path / "run_1")
    assert wandb.run.id == second.version != first.version
    second.finalize("success")
    wandb.finish()
    own = wandb.init(project="q", mode="offline", dir=tmp_path)
    third = WandbLogger(offline=True, save_dir=tmp_path)
    third.start(tmp_path / "run_2")
    assert third.experiment is own
    own.finish()


def test_other_ranks_do_not_open_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    logger = WandbLogger(offline=True)
    logger.experiment.log({"a": 1})
    logger.log_metrics({"a": 1.0}, 1)
    logger.watch(None)
    assert wandb.run is None


@pytest.mark.parametrize("arguments", [{"log_model": "all"}, {"anonymous": True}])
def test_unsupported_arguments_are_rejected(arguments: dict[str, Any]) -> None:
    with pytest.raises(RoomierError, match=next(iter(arguments))):
        WandbLogger(**arguments)
