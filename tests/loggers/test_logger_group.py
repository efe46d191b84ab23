"""A logger that fails is disabled with a notice. Other loggers and the run continue."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from roomier.api.logger import Logger
from roomier.loggers import LoggerGroup


class Recorder(Logger):
    name = "recorder"

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start(self, run_dir: Path, resumed_step: int | None = None) -> None:
        self.calls.append(("start", run_dir, resumed_step))

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.calls.append((dict(metrics), step))

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self.calls.append(dict(params))

    def finalize(self, status: str) -> None:
        self.calls.append(status)


class Broken(Recorder):
    name = "broken"

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        super().log_metrics(metrics, step)
        raise OSError("No space left on device")

    def finalize(self, status: str) -> None:
        super().finalize(status)
        raise RuntimeError("still broken")


def test_each_logger_receives_each_call_in_order(tmp_path: Path) -> None:
    first, second = Recorder(), Recorder()
    group = LoggerGroup([first, second])
    group.start(tmp_path, 5)
    group.log_hyperparams({"lr": 1})
    group.log_metrics({"loss": 2.0}, 6)
    group.finalize("success")
    assert first.calls == [("start", tmp_path, 5), {"lr": 1}, ({"loss": 2.0}, 6), "success"]
    assert second.calls == first.calls
    assert (list(group), len(group)) == ([first, second], 2)


def test_each_logger_receives_a_copy() -> None:
    class Takes(Recorder):
        def log_metrics(self, metrics: Any, step: int) -> None:
            metrics.clear()

        def log_hyperparams(self, params: Any) -> None:
            params.clear()

    given, last = {"loss": 2.0}, Recorder()
    group = LoggerGroup([Takes(), last])
    group.log_hyperparams(given)
    group.log_metrics(given, 1)
    assert last.calls == [{"loss": 2.0}, ({"loss": 2.0}, 1)]
    assert given == {"loss": 2.0}


def test_failed_logger_is_disabled_with_one_notice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken, good = Broken(), Recorder()
    group = LoggerGroup([broken, good])
    group.start(tmp_path)
    for step in (1, 2, 3):
        group.log_metrics({}, step)
    group.finalize("success")
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    for word in ("'broken' (Broken)", "log_metrics", "OSError: No space left on device"):
        assert word in err
    assert [call for call in broken.calls if isinstance(call, tuple)] == [("start", tmp_path, None), ({}, 1)]
    assert broken.calls[-1] == "success", "finalize is called to release resources"
    assert good.calls[1:-1] == [({}, 1), ({}, 2), ({}, 3)]


def test_keyboard_interrupt_is_not_a_failure() -> None:
    class Interrupted(Recorder):
        def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LoggerGroup([Interrupted()]).log_metrics({}, 1)
