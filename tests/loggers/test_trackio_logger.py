"""The logger for trackio. The tests simulate the signatures of trackio 0.43, because the package requires gradio."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from roomier.loggers import TrackioLogger


class Run:
    def __init__(self, name: str, config: dict[str, Any] | None) -> None:
        self.name, self.config, self.rows, self.is_open = name, dict(config or {}), [], True

    def log(self, metrics: dict, step: int | None = None) -> None:
        assert self.is_open
        self.rows.append((step, metrics))

    def finish(self) -> None:
        self.is_open = False


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], Run]]:
    calls: list[tuple[dict[str, Any], Run]] = []
    trackio = ModuleType("trackio")

    def init(
        project: str,
        name: str | None = None,
        group: str | None = None,
        space_id: str | None = None,
        config: dict | None = None,
        resume: str = "never",
        embed: bool = True,
    ) -> Run:
        run = Run(str(name), config)
        given = {"project": project, "group": group, "space_id": space_id, "resume": resume, "embed": embed}
        calls.append((given, run))
        return run

    trackio.init = init
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    return calls


def test_fit_resume_and_test_use_one_run(make_trainer, line, loader, opened) -> None:
    logger = TrackioLogger("p", group="g")
    trainer = make_trainer(logger=logger, max_steps=2, log_every_n_steps=1, enable_checkpointing=True)
    trainer.fit(line, loader)
    trainer.test(line, loader)
    longer = make_trainer(logger=TrackioLogger("p"), max_steps=3, log_every_n_steps=1, enable_checkpointing=True)
    longer.fit(line, loader, ckpt_path="last")
    (first, fitted), (_, tested), (_, resumed) = opened
    assert first == {"project": "p", "group": "g", "space_id": None, "resume": "allow", "embed": False}
    assert fitted.name == tested.name == resumed.name == logger.version
    assert fitted.config == {"width": 4, "depth": 1}, "trackio accepts hyperparameters when a run starts"
    assert [step for step, row in fitted.rows if "train_loss" in row] == [1, 2]
    assert [step for step, row in resumed.rows if "train_loss" in row] == [3]
    assert "test_loss" in tested.rows[0][1]
    assert not any(run.is_open for _, run in opened)


def test_row_before_hyperparameters_opens_the_run(tmp_path: Path, opened) -> None:
    logger = TrackioLogger(name="mine")
    logger.start(tmp_path)
    assert not opened
    logger.log_metrics({"loss": 1.0}, 1)
    logger.log_hyperparams({"model": {"depth": 2}})
    [(_, run)] = opened
    assert (run.name, run.config, run.rows) == ("mine", {"model/depth": 2}, [(1, {"loss": 1.0})])
