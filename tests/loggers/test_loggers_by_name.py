"""``Trainer(logger=...)``: names, objects, lists, and what is refused."""

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


def test_every_run_has_the_two_files_unless_it_says_otherwise() -> None:
    files = [JSONLLogger, CSVLogger]
    assert kinds(True) == files
    assert kinds(False) == kinds(None) == kinds([]) == []
    assert kinds("csv") == [CSVLogger]
    assert kinds("jsonl") == [JSONLLogger]
    assert kinds("tensorboard") == [TensorBoardLogger, *files]
    assert kinds(["tensorboard", "csv"]) == [TensorBoardLogger, CSVLogger]
    assert kinds(Own()) == [Own, *files]
    assert kinds((Own(), Own())) == [Own, Own, *files]


def test_a_logger_object_is_taken_as_it_is() -> None:
    own = Own()
    assert loggers_from_flag(own)[0] is own


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("tensorbord", ["'tensorbord'", "Did you mean 'tensorboard'?"]),
        ("neptune", ["closed in March 2026", "wandb", "mlflow"]),
        (["csv", CSVLogger()], ["metrics.csv would have two writers"]),
        (3, ["neither a name nor a logger"]),
        (Own, ["neither a name nor a logger"]),
        (["csv", 3], ["neither a name nor a logger"]),
    ],
)
def test_what_cannot_be_is_refused_by_name(flag: object, words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        loggers_from_flag(flag)  # type: ignore[arg-type]
    for word in ["logger=", *words]:
        assert word in str(caught.value)


def test_files_of_two_loggers_in_two_folders_do_not_collide(tmp_path: Path) -> None:
    assert kinds(["csv", CSVLogger(tmp_path)]) == [CSVLogger, CSVLogger]


def test_neptune_is_refused_as_an_object_too() -> None:
    with pytest.raises(PlanError, match="closed in March 2026"):
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
def test_a_missing_package_is_told_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str, install: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # what import sees when it is not there
    for switch in ("COMET_DISABLE_AUTO_LOGGING", "MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(switch, "1")  # a logger sets them for its package
    with pytest.raises(RoomierError, match=install):
        loggers_from_flag(name)
