"""Project of an Accelerator: its folders, and automatic names of checkpoints."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roomier import checkpoint
from roomier.checkpoint.record import RECORD_NAME
from roomier.core.errors import PlanError, RoomierError
from roomier.core.ranks import Ranks

_NAME = re.compile(r"checkpoint_(\d+)")


@dataclass
class Project:
    """Class with the fields of ``accelerate.utils.ProjectConfiguration``. Accelerate's class can be used instead.

    Attributes:
        project_dir: folder of the project, or None.
        logging_dir: folder for logs; if None, ``project_dir``.
        automatic_checkpoint_naming: if True, save checkpoints as ``project_dir/checkpoints/checkpoint_<iteration>``.
        total_limit: maximum number of checkpoints with automatic names; None for no limit.
        iteration: number of the next checkpoint with an automatic name.
        save_on_each_node: whether ``Accelerator.save`` saves on the first rank of each machine instead of only on rank
            0.
    """

    project_dir: str | Path | None = None
    logging_dir: str | Path | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False


def project_of(given: Any, project_dir: str | Path | None) -> Any:
    """Return ``given``, or a new :class:`Project` if ``given`` is None. Missing folders are derived from
    ``project_dir``.

    Raises:
        PlanError: checkpoints are named automatically, but no project folder is set.
    """
    project = Project() if given is None else given
    if project.project_dir is None:
        project.project_dir = project_dir
    if project.logging_dir is None:
        project.logging_dir = project.project_dir
    if project.automatic_checkpoint_naming and project.project_dir is None:
        action = "Pass Accelerator(project_dir='runs/project')"
        raise PlanError("project_config.automatic_checkpoint_naming", True, "requires a project folder", action)
    return project


def next_checkpoint(project: Any, ranks: Ranks) -> Path:
    """Return the folder of the next checkpoint. Every rank must call this function.

    Raises:
        RoomierError: the folder already exists.
    """
    folder = _folder_of(project) / f"checkpoint_{project.iteration}"
    if ranks.on_zero(folder.exists):
        problem = "exists, and automatic naming does not overwrite checkpoints"
        action = "Set accelerator.project_configuration.iteration to the number of the next checkpoint"
        raise RoomierError("save_state", str(folder), problem, action)
    return folder


def remove_oldest(project: Any, newest: Path, ranks: Ranks) -> None:
    """Remove the checkpoints with the lowest numbers if there are more than ``total_limit`` checkpoints.

    Every rank must call this function.

    Args:
        project: object with the fields of :class:`Project`.
        newest: the checkpoint that was written last, which is not removed.
        ranks: all ranks.

    Raises:
        CheckpointError: a checkpoint cannot be removed.
    """
    limit = project.total_limit

    def remove() -> None:
        earlier = [each for each in _saved(project) if each != newest]
        for each in earlier[: max(0, len(earlier) + 1 - limit)]:
            checkpoint.remove(each)

    if limit is not None:
        ranks.on_zero(remove)


def last_checkpoint(project: Any, ranks: Ranks) -> Path:
    """Return the checkpoint with the highest number, and set ``project.iteration`` to the following number. Every rank
    must call this function.

    Raises:
        RoomierError: there is no checkpoint.
    """
    saved = ranks.on_zero(lambda: [str(each) for each in _saved(project)])
    if not saved:
        problem = "contains no checkpoint of roomier"
        raise RoomierError("load_state", str(_folder_of(project)), problem, "Pass a folder, or call save_state first")
    last = Path(saved[-1])
    project.iteration = _number_of(last) + 1
    return last


def _folder_of(project: Any) -> Path:
    return Path(project.project_dir) / "checkpoints"


def _saved(project: Any) -> list[Path]:
    """Return the checkpoints with automatic names, in the order of their numbers."""
    found = (each for each in _folder_of(project).glob("checkpoint_*") if _NAME.fullmatch(each.name))
    return sorted((each for each in found if (each / RECORD_NAME).is_file()), key=_number_of)


def _number_of(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1])
