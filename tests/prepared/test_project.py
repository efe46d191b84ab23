"""Automatic names of checkpoints, as in Accelerate, and their limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils import ProjectConfiguration
from torch import nn

import roomier
from tests.prepared.scripts import forget_accelerate
from tests.ranks.pool import RankPool


def project(**fields: Any) -> ProjectConfiguration:
    return ProjectConfiguration(**{"automatic_checkpoint_naming": True, **fields})


def names_in(folder: Path) -> list[str]:
    return sorted(each.name for each in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize(("limit", "iteration"), [(None, 0), (1, 0), (2, 9)])
def test_names_are_those_of_accelerate(tmp_path: Path, limit: int | None, iteration: int) -> None:
    found = []
    for library in (accelerate, roomier):
        folder = tmp_path / library.__name__
        forget_accelerate()
        own = project(total_limit=limit, iteration=iteration)
        accelerator = library.Accelerator(cpu=True, project_config=own, project_dir=folder)
        accelerator.prepare(nn.Linear(2, 2))
        returned = [Path(accelerator.save_state()).name for _ in range(3)]
        assert (folder / "checkpoints" / returned[-1]).is_dir()
        found.append((names_in(folder), returned, own.iteration, accelerator.save_iteration))
        assert str(own.project_dir) == str(own.logging_dir) == str(accelerator.project_dir) == str(folder)
    assert found[0] == found[1]


def test_the_last_checkpoint_is_loaded_and_the_numbers_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def begun() -> tuple[roomier.Accelerator, Any]:
        accelerator = roomier.Accelerator(cpu=True, project_config=project(project_dir=tmp_path))
        return accelerator, accelerator.prepare(nn.Linear(2, 2))

    accelerator, model = begun()
    with pytest.raises(roomier.RoomierError, match=r"contains no checkpoint.*save_state"):
        accelerator.load_state()
    for number in range(11):  # checkpoints are ordered by number, not by name
        nn.init.constant_(model.module.weight, number)
        accelerator.save_state(tmp_path / "given" if number == 1 else None)
    assert f"checkpoint_1 is written instead of {tmp_path / 'given'}" in capsys.readouterr().err
    accelerator, model = begun()
    with pytest.raises(roomier.RoomierError, match=r"checkpoint_0.* exists.*project_configuration\.iteration"):
        accelerator.save_state()
    accelerator.load_state()
    assert torch.equal(model.module.weight, torch.full((2, 2), 10.0))
    assert accelerator.save_state().endswith("checkpoint_11")


def save_on_ranks(folder: Path) -> list[str]:
    plan = {"parallel": {"strategy": "zero3", "devices": 2, "accelerator": "cpu"}}
    accelerator = roomier.Accelerator(plan=plan, project_config=project(project_dir=folder, total_limit=2))
    accelerator.prepare(nn.Linear(2, 2))
    for _ in range(3):
        accelerator.save_state()
    accelerator.load_state()
    accelerator.wait_for_everyone()
    return names_in(folder)


@pytest.mark.more
def test_ranks_share_the_names(on_ranks: RankPool, tmp_path: Path) -> None:
    assert on_ranks(2, save_on_ranks, tmp_path) == [["checkpoint_1", "checkpoint_2"]] * 2


def test_settings_without_effect_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields: dict[str, Any] = {"automatic_checkpoint_naming": False, "total_limit": 3, "save_on_each_node": True}
    roomier.Accelerator(cpu=True, project_config=project(**fields))
    printed = " ".join(capsys.readouterr().err.split())
    for name in ("project_config.total_limit", "project_config.save_on_each_node"):
        assert name in printed
    with pytest.raises(roomier.PlanError, match="total_limit=0: must be at least 1"):
        roomier.Accelerator(cpu=True, project_config=project(project_dir=tmp_path, total_limit=0))
    with pytest.raises(roomier.PlanError, match=r"automatic_checkpoint_naming.*Accelerator\(project_dir="):
        roomier.Accelerator(cpu=True, project_config=project())
