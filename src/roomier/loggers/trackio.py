"""TrackioLogger: logger that writes to a run of trackio, which stores the run on this machine or in a Hugging Face
Space."""

from __future__ import annotations

import os
import uuid
from typing import Any, ClassVar

from roomier.loggers.guarded import flat
from roomier.loggers.service import ServiceLogger
from roomier.loggers.visuals import TrackioVisuals, Visuals


class TrackioLogger(ServiceLogger):
    """Logger that opens a run with ``trackio.init`` and calls the ``log`` and ``finish`` methods of this run.

    trackio identifies a run by its name and accepts hyperparameters only at the start, so the run is opened when the
    first row or the hyperparameters are logged.

    Args:
        project: name of the project; None uses the ``TRACKIO_PROJECT`` environment variable if it is set, otherwise
            ``"lightning_logs"``.
        name: name of the run; None generates a name.
        space_id: id of the Hugging Face Space that stores the run; None stores the run on this machine.
        prefix: prefix of each metric's name. A ``-`` separates the prefix from the name.
        kwargs: arguments of ``trackio.init``: ``group``, ``private``, ``auto_log_gpu``, ...

    Raises:
        RoomierError: the package is not installed.

    Example:
        >>> trainer = roomier.Trainer(logger=TrackioLogger(project="gpt"))
    """

    name = "trackio"
    PACKAGE: ClassVar[str] = "trackio"

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        *,
        space_id: str | None = None,
        prefix: str = "",
        **kwargs: Any,
    ) -> None:
        trackio = self._imported("trackio")
        super().__init__(project or os.environ.get("TRACKIO_PROJECT") or "lightning_logs", name, prefix)
        self._trackio = trackio
        self._options = {"space_id": space_id, "embed": False, **kwargs}
        self._config: dict[str, Any] | None = None

    def _open(self, run_id: str | None, *, is_known: bool) -> tuple[Any, str]:
        name = run_id or _new_name()
        options = {"resume": "allow", "config": self._config, **self._options}
        return self._trackio.init(project=self._project, name=name, **options), name

    def _begin(self) -> None:
        self._id = self._id or _new_name()  # the first row or the hyperparameters open the run

    def _write_metrics(self, row: dict[str, float], step: int) -> None:
        self.experiment.log(row, step)

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        texts = dict(flat(params))
        if self._experiment is None:
            self._config = texts
            _ = self.experiment
        else:
            self._experiment.config.update(texts)

    def _visuals(self) -> Visuals:
        return TrackioVisuals(self.name, self.experiment)

    def finalize(self, status: str) -> None:
        super().finalize(status)
        self._close(status)

    def _close(self, status: str) -> None:
        if self._experiment is not None:
            self._experiment.finish()
        super()._close(status)


def _new_name() -> str:
    return f"run-{uuid.uuid4().hex[:8]}"
