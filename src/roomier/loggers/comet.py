"""CometLogger: logger that writes to a Comet experiment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from roomier.core.errors import RoomierError
from roomier.loggers.service import ServiceLogger
from roomier.loggers.visuals import CometVisuals, Visuals

_FORMER = {"project_name": "project", "experiment_name": "name", "save_dir": "offline_directory"}
_MODES = (None, "get_or_create", "get", "create")


class CometLogger(ServiceLogger):
    """Logger that writes to a Comet experiment. The arguments are the same as in Lightning.

    Comet's automatic logging of torch is disabled. After a fit, the experiment remains open until the process ends or
    ``logger.experiment.end()`` is called.

    Args:
        api_key: API key; None uses the value of ``comet login`` or ``COMET_API_KEY``.
        workspace: workspace of the project; None uses the default workspace.
        project: name of the project; None uses the ``COMET_PROJECT_NAME`` environment variable if it is set, otherwise
            ``"lightning_logs"``.
        experiment_key: key of an experiment to resume or to create.
        mode: ``"get_or_create"`` (default), ``"get"`` or ``"create"``.
        online: if False, write only archives, without network access, for a later upload with ``comet upload``. The
            archives are written to ``offline_directory``, or to the run folder by default.
        prefix: prefix of each metric's name. A ``-`` separates the prefix from the name.
        kwargs: arguments of ``comet_ml.ExperimentConfig``: ``name``, ``tags``, ``offline_directory``, ``log_code``, ...

    Raises:
        RoomierError: the package is not installed, or an argument is unknown.

    Example:
        >>> trainer = roomier.Trainer(logger=CometLogger(project="gpt", online=False))
    """

    name = "comet"
    PACKAGE: ClassVar[str] = "comet_ml"

    def __init__(
        self,
        *,
        api_key: str | None = None,
        workspace: str | None = None,
        project: str | None = None,
        experiment_key: str | None = None,
        mode: str | None = None,
        online: bool | None = None,
        prefix: str | None = None,
        **kwargs: Any,
    ) -> None:
        for former, today in _FORMER.items():
            if former in kwargs:
                raise RoomierError(former, kwargs[former], f"was renamed to {today}", f"Use {today}")
        if "offline" in kwargs:
            raise RoomierError("offline", kwargs["offline"], "was replaced by online", "Use online=False")
        if mode not in _MODES:
            raise RoomierError("mode", mode, "is unknown", "Use 'get_or_create', 'get' or 'create'")
        # comet_ml reads both environment variables at import. Without these settings, comet_ml replaces functions of
        # torch and requests news from its server.
        os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")
        if online is False:
            os.environ.setdefault("COMET_DISABLE_ANNOUNCEMENT", "1")
        comet_ml = self._imported("comet_ml")
        super().__init__(project or os.environ.get("COMET_PROJECT_NAME") or "lightning_logs", experiment_key, prefix)
        self._comet = comet_ml
        self._start: dict[str, Any] = {"api_key": api_key, "workspace": workspace, "online": online}
        self._mode = mode
        self._config = {"log_code": False, "auto_output_logging": False, "display_summary_level": 0, **kwargs}
        try:
            comet_ml.ExperimentConfig(**self._config)
        except TypeError as error:
            action = "See comet_ml.ExperimentConfig for the valid arguments"
            raise RoomierError("CometLogger", sorted(kwargs), str(error), action) from error

    @property
    def save_dir(self) -> str | None:
        given = self._config.get("offline_directory")
        return super().save_dir if given is None else str(given)

    def _open(self, run_id: str | None, *, is_known: bool) -> tuple[Any, str]:
        config = dict(self._config)
        place = config.get("offline_directory") or (None if self.run_dir is None else self.run_dir / "comet")
        if self._start["online"] is False and place is not None:
            Path(place).mkdir(parents=True, exist_ok=True)
            config["offline_directory"] = str(place)
        is_ours = is_known and run_id != self._given_id  # created by this run
        mode = "get" if is_ours else self._mode or ("get_or_create" if is_known else "create")
        experiment = self._comet.start(
            project=self._project,
            experiment_key=run_id,
            mode=mode,
            experiment_config=self._comet.ExperimentConfig(**config),
            **self._start,
        )
        return experiment, str(experiment.get_key())

    def _write_metrics(self, row: dict[str, float], step: int) -> None:
        epoch = row.pop(f"{self._prefix}epoch", None)
        self.experiment.log_metrics(row, step=step, epoch=None if epoch is None else int(epoch))

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        self.experiment.log_parameters(params)

    def _visuals(self) -> Visuals:
        return CometVisuals(self.name, self.experiment)

    def finalize(self, status: str) -> None:
        super().finalize(status)
        if self._experiment is not None:
            self._experiment.flush()

    def _close(self, status: str) -> None:
        if self._experiment is not None:
            self._experiment.end()
        super()._close(status)
