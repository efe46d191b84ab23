"""ServiceLogger: base class of the loggers of experiment trackers."""

from __future__ import annotations

from abc import abstractmethod
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from roomier.api.logger import Nothing
from roomier.core.errors import RoomierError
from roomier.loggers.guarded import GuardedLogger, read_id, write_id


class ServiceLogger(GuardedLogger):
    """Base class of loggers that write to a run of a tracking service. The service identifies each run by an id.

    The first rank opens a run when a fit starts or when ``experiment`` is first read. The id is stored in the run
    folder, so a resumed run continues the same run of the service. After a resume, the service contains the rows of
    repeated steps twice, because services do not delete rows.

    Args:
        project: project that contains the run.
        run_id: id of a run to resume; None opens a new run.
        prefix: prefix of each metric's name. A ``-`` separates the prefix from the name.
    """

    PACKAGE: ClassVar[str]
    """Name of the package on PyPI."""

    def __init__(self, project: str, run_id: str | None, prefix: str | None) -> None:
        super().__init__(prefix)
        self._project = project
        self._given_id = run_id
        self._id = run_id
        self._experiment: Any = None
        self._is_in_run = False

    @classmethod
    def _imported(cls, module: str) -> Any:
        """Import a module of the service's package.

        Raises:
            RoomierError: the package is not installed.
        """
        try:
            return import_module(module)
        except ImportError as error:
            action = f"Run: pip install {cls.PACKAGE}, or pip install 'roomier[loggers]'"
            problem = f"requires a package that is not installed ({error})"
            raise RoomierError("logger", cls.name, problem, action) from error

    @property
    def experiment(self) -> Any:
        if self.is_silent:
            return Nothing()
        if self._experiment is None:
            self._experiment, self._id = self._open(self._id, is_known=self._id is not None)
        return self._experiment

    @property
    def version(self) -> str | None:
        """Id of the run; None before the run is opened."""
        return self._id

    @property
    def project(self) -> str:
        """Name of the project."""
        return self._project

    def start(self, run_dir: Path, resumed_step: int | None = None) -> None:
        """Open the run with the given id. Without a given id, open the run with the stored id, the current run, or a
        new run, in this order."""
        key = f"{self.name} {self._project}"
        kept = read_id(run_dir, key)
        if self._given_id is None and kept is not None and kept != self._id:
            self._close("success")
            self._id = kept
        self._is_in_run = True
        self._begin()
        assert self._id is not None, "the run is open"
        write_id(run_dir, key, self._id)

    def finalize(self, status: str) -> None:
        self._is_in_run = False

    def _begin(self) -> None:
        _ = self.experiment

    @abstractmethod
    def _open(self, run_id: str | None, *, is_known: bool) -> tuple[Any, str]:
        """Open the run ``run_id``, or a new run, and return the run with its id.

        Args:
            is_known: True if the run may already exist.
        """

    def _close(self, status: str) -> None:
        """End the run if it is open."""
        self._experiment = None


def refuse_log_model(log_model: object) -> None:
    """Reject ``log_model``, which is not supported.

    Raises:
        RoomierError: ``log_model`` is set.
    """
    if log_model:
        action = "Upload the folder trainer.checkpoint_callback.best_model_path after fit"
        raise RoomierError("log_model", log_model, "is not supported, because checkpoints are folders", action)
