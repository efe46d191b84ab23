"""ServiceLogger: what the loggers of a service share."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from roomier.api.logger import Nothing
from roomier.core.errors import RoomierError
from roomier.loggers.guarded import GuardedLogger
from roomier.loggers.run_ids import read_id, write_id


class ServiceLogger(GuardedLogger):
    """A logger whose runs have an id. The first rank opens one when a fit starts, or when ``experiment`` is first asked
    for. The id is kept in the run folder, so a resumed run goes on in the same run of the service, whose rows of steps
    that are written again stand there twice: services do not forget.

    Args:
        project: that the run belongs to.
        run_id: of a run to go on with; None opens a new one.
    """

    PACKAGE: ClassVar[str]
    """What pip calls it."""

    def __init__(self, project: str, run_id: str | None, prefix: str | None) -> None:
        super().__init__(prefix)
        self._project = project
        self._given_id = run_id
        self._id = run_id
        self._experiment: Any = None
        self._is_in_run = False

    @property
    def experiment(self) -> Any:
        if self.is_silent:
            return Nothing()
        if self._experiment is None:
            self._experiment, self._id = self._open(self._id, is_known=self._id is not None)
        return self._experiment

    @property
    def version(self) -> str | None:
        """The id of the run; None before it is opened."""
        return self._id

    @property
    def project(self) -> str:
        return self._project

    def start(self, run_dir: Path, resumed_step: int | None = None) -> None:
        """Open the run: that which was asked for, else the one that the run folder knows, else its own or a new one."""
        key = f"{self.name} {self._project}"
        kept = read_id(run_dir, key)
        if self._given_id is None and kept is not None and kept != self._id:
            self._close("success")
            self._id = kept
        self._is_in_run = True
        self._begin()
        assert self._id is not None, "it was opened"
        write_id(run_dir, key, self._id)

    def finalize(self, status: str) -> None:
        self._is_in_run = False

    def _begin(self) -> None:
        _ = self.experiment

    @abstractmethod
    def _open(self, run_id: str | None, *, is_known: bool) -> tuple[Any, str]:
        """The run ``run_id``, or a new one, and its id.

        Args:
            is_known: it may be there already.
        """

    def _close(self, status: str) -> None:
        """End the run that is open, if any."""
        self._experiment = None


def missing_package(name: str, package: str, error: ImportError) -> RoomierError:
    action = f"Run: pip install {package}, or pip install 'roomier[loggers]'"
    return RoomierError("logger", name, f"needs a package that is not installed ({error})", action)


def refuse_log_model(log_model: object) -> None:
    """Refuse ``log_model``, which is not built.

    Raises:
        RoomierError: says what to do instead.
    """
    if log_model:
        action = "Upload the folder trainer.checkpoint_callback.best_model_path when fit is over"
        raise RoomierError("log_model", log_model, "checkpoints are folders, which no logger uploads by itself", action)
