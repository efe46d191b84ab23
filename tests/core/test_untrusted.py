"""Files of run folders and users that are pipes, devices, too large or nested too deeply."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from roomier.checkpoint.lightning import LightningFile
from roomier.cli.config_files import check_texts, options_in, read_config
from roomier.core.errors import RoomierError
from roomier.core.untrusted import MAX_TEXT_BYTES, MAX_YAML_BYTES, lines_of, read_text
from roomier.data import TokenDataset
from roomier.engine.weights_file import WeightsFile
from roomier.loggers import CSVLogger, JSONLLogger
from roomier.loggers.guarded import read_id
from roomier.plan import Plan
from roomier.plan.migrate.deepspeed.objects import read_config as read_deepspeed_config
from roomier.planner.hardware.spec import machine_of_file
from roomier.planner.hugging_face import read_config as read_hugging_face_config
from roomier.planner.measured.record import read_record
from roomier.planner.report.run_log import read_logs

READERS: dict[str, Callable[[Path], object]] = {
    "metrics.jsonl": lambda path: JSONLLogger().start(path.parent, 3),
    "metrics.csv": lambda path: CSVLogger().start(path.parent, 3),
    "forecast.json": lambda path: read_record(path.parent),
    "metrics.jsonl of report": lambda path: read_logs([path.parent]),
    "config.json": read_hugging_face_config,
    "deepspeed.json": read_deepspeed_config,
    "plan.json": Plan.of,
    "plan.yaml": Plan.of,
    "machine.json": machine_of_file,
    "machine.yaml": machine_of_file,
    "config.yaml": lambda path: read_config(str(path)),
    "model.safetensors.index.json": WeightsFile,
    "tokens.tok": lambda path: TokenDataset(path, 4),
    "last.ckpt": LightningFile,
}
NESTED = [name for name in READERS if name.endswith((".json", ".yaml"))]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("name", READERS)
def test_only_regular_files_are_read(name: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / name.split(" ")[0]
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises((OSError, RoomierError)) as error:
        READERS[name](path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("name", NESTED)
def test_deep_nesting_is_an_error_that_names_the_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("[" * 300_000)
    with pytest.raises(RoomierError, match="deep") as error:
        READERS[name](path)
    assert path.name in str(error.value) or error.value.received == str(tmp_path)


@pytest.mark.parametrize("name", NESTED)
def test_files_above_the_limit_are_not_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with path.open("wb") as file:
        file.truncate(1 + (MAX_YAML_BYTES if name.endswith(".yaml") else MAX_TEXT_BYTES))
    with pytest.raises(RoomierError, match="Larger than"):
        READERS[name](path)


def test_lines_have_a_limit_and_files_do_not(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"a\nb")
    assert list(lines_of(path)) == [b"a\n", b"b"]
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(OSError, match="A line is longer than 16777216 bytes"):
        list(lines_of(path))
    with pytest.raises(OSError, match="Larger than"):
        read_text(path)


def test_rows_that_are_nested_too_deeply_are_incomplete_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("[" * 300_000 + '\n{"step": 1, "samples_per_s": 2.0}\n')
    assert read_logs([tmp_path])[0].rates == {"samples_per_s": 2.0}
    logger = JSONLLogger()
    logger.start(tmp_path, 3)
    logger.finalize("success")
    assert path.read_text() == '{"step": 1, "samples_per_s": 2.0}\n'
    assert "dropped 1 incomplete row(s)" in capsys.readouterr().err


@pytest.mark.timeout(60)
def test_unreadable_ids_and_pipes_under_temporary_names_do_not_stop_a_run(tmp_path: Path) -> None:
    for name in ("loggers.json", "hparams.json", ".metrics.csv.aside", ".loggers.json.aside"):
        os.mkfifo(tmp_path / name)
    assert read_id(tmp_path, "wandb") is None
    logger = CSVLogger()
    logger.start(tmp_path, 3)
    logger.log_hyperparams({"lr": 1})
    logger.log_metrics({"loss": 1.0}, step=4)
    logger.finalize("success")
    assert (tmp_path / "metrics.csv").read_text().startswith("step,time,loss\n4,")
    assert (tmp_path / "hparams-from-step=3.json").exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("field", ["trainer", "model", "model.net"])
def test_pipes_in_a_configuration_are_rejected_before_they_are_opened(field: str, tmp_path: Path) -> None:
    pipe, config = tmp_path / "pipe.yaml", tmp_path / "config.yaml"
    os.mkfifo(pipe)
    config.write_text(f"{field}: {pipe}\n" if "." not in field else f"model:\n  net: {pipe}\n")
    for arguments in ([f"--{field}", str(pipe)], ["--config", str(config)]):
        with pytest.raises(RoomierError, match=r"Not a regular file|is a pipe") as error:
            check_texts(options_in(arguments))
        assert error.value.field == field
