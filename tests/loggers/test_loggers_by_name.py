"""``Trainer(logger=...)``: names, objects, lists, and invalid values."""

import sys
from pathlib import Path

import pytest

from roomier.api.logger import Logger
from roomier.core.errors import PlanError, RoomierError
from roomier.loggers import CSVLogger, JSONLLogger, NeptuneLogger, TensorBoardLogger, loggers_from_flag


class Own(Logger):
    def log_metrics(self, metrics: object, step: int) -> None: ...


def kinds(flag: object) -> list[type[Logger]]:
    return [type(logger) for logger in loggers_from_flag(flag)]  # type: ignore[arg-type]


def test_default_files() -> None:
    files = [JSONLLogger, CSVLogger]
    assert kinds(True) == files
    assert kinds(False) == kinds(None) == kinds([]) == []
    assert kinds("csv") == [CSVLogger]
    assert kinds("jsonl") == [JSONLLogger]
    assert kinds("tensorboard") == [TensorBoardLogger, *files]
    assert kinds(["tensorboard", "csv"]) == [TensorBoardLogger, CSVLogger]
    assert kinds(Own()) == [Own, *files]
    assert kinds((Own(), Own())) == [Own, Own, *files]


def test_logger_object_is_not_copied() -> None:
    own = Own()
    assert loggers_from_flag(own)[0] is own


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("tensorbord", ["'tensorbord'", "Did you mean 'tensorboard'?"]),
        ("neptune", ["shut down in March 2026", "wandb", "mlflow"]),
        (["csv", CSVLogger()], ["would write metrics.csv"]),
        (3, ["must be a name or a logger"]),
        (Own, ["must be a name or a logger"]),
        (["csv", 3], ["must be a name or a logger"]),
    ],
)
def test_invalid_values_are_rejected(flag: object, words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        loggers_from_flag(flag)  # type: ignore[arg-type]
    for word in ["logger=", *words]:
        assert word in str(caught.value)


def test_same_logger_in_two_folders(tmp_path: Path) -> None:
    assert kinds(["csv", CSVLogger(tmp_path)]) == [CSVLogger, CSVLogger]


def test_neptune_logger_object_is_rejected() -> None:
    with pytest.raises(PlanError, match="shut down in March 2026"):
        NeptuneLogger(project="a/b")


@pytest.mark.parametrize(
    ("name", "package", "install"),
    [
        ("tensorboard", "torch.utils.tensorboard", r"pip install 'roomier\[tensorboard\]'"),
        ("wandb", "wandb", "pip install wandb"),
        ("comet", "comet_ml", "pip install comet_ml"),
        ("mlflow", "mlflow", "pip install mlflow-skinny"),
        ("trackio", "trackio", "pip install trackio"),
    ],
)
def test_missing_package_error_contains_the_install_command(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str, install: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # simulates a missing package
    for switch in ("COMET_DISABLE_AUTO_LOGGING", "MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(switch, "1")  # the logger sets these variables for its package
    with pytest.raises(RoomierError, match=install):
        loggers_from_flag(name)
