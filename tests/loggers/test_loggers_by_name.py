"""``Trainer(logger=...)``: names, objects, lists, and what is refused."""

import sys

import pytest

from roomier.api.logger import Logger
from roomier.core.errors import PlanError, RoomierError
from roomier.loggers import CSVLogger, JSONLLogger, TensorBoardLogger, loggers_from_flag


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
        ("wandb", ["not built yet", "'tensorboard' or 'csv'", "subclass"]),
        ("mlflow", ["not built yet"]),
        ("comet", ["not built yet"]),
        ("trackio", ["not built yet"]),
        ("neptune", ["closed in March 2026"]),
        (["csv", CSVLogger()], ["metrics.csv would have two writers"]),
        (3, ["neither a name nor a Logger"]),
        (["csv", 3], ["neither a name nor a Logger"]),
    ],
)
def test_what_cannot_be_is_refused_by_name(flag: object, words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        loggers_from_flag(flag)  # type: ignore[arg-type]
    for word in ["logger=", *words]:
        assert word in str(caught.value)


def test_a_missing_package_is_told_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # what import sees when it is not there
    with pytest.raises(RoomierError, match=r"pip install 'roomier\[tensorboard\]'"):
        loggers_from_flag("tensorboard")
