"""MLFlowLogger: logger that writes to an MLflow run."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any, ClassVar

from roomier.core.log import notice
from roomier.loggers.guarded import flat
from roomier.loggers.service import ServiceLogger, refuse_log_model
from roomier.loggers.visuals import MLflowVisuals, Visuals

_STATUSES = {"success": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_NOT_IN_A_NAME = re.compile(r"[^\w/.: -]")
_MAX_CHARACTERS = 500  # Maximum length of a parameter value that all stores accept.
_MAX_PARAMS = 100  # Maximum number of parameters per request.


class MLFlowLogger(ServiceLogger):
    """Logger that writes to an MLflow run. The arguments are the same as in Lightning. The ``mlflow-skinny`` package is
    sufficient.

    Args:
        experiment_name: name of the experiment that contains the run.
        run_name: name of a new run.
        tracking_uri: URI of a server, or ``file:<folder>``; None uses the ``MLFLOW_TRACKING_URI`` environment variable
            if it is set, otherwise ``file:<save_dir>``.
        tags: tags of a new run.
        save_dir: folder that stores the runs if no server is given.
        log_model: must be False, because checkpoints are not uploaded.
        prefix: prefix of each metric's name. A ``-`` separates the prefix from the name.
        artifact_location: location of the artifacts of a new experiment.
        run_id: id of a run to resume.
        synchronous: if True, wait until the server has received each row; None uses the default of ``mlflow``.

    Attributes:
        experiment: the ``MlflowClient``.

    Raises:
        RoomierError: the package is not installed, or ``log_model`` is set.

    Example:
        >>> trainer = roomier.Trainer(logger=MLFlowLogger("gpt", tracking_uri="file:./mlruns"))
    """

    name = "mlflow"
    PACKAGE: ClassVar[str] = "mlflow-skinny"

    def __init__(
        self,
        experiment_name: str = "lightning_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: dict[str, Any] | None = None,
        save_dir: str | Path | None = "./mlruns",
        log_model: bool | str = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
    ) -> None:
        refuse_log_model(log_model)
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"file:{Path(save_dir or './mlruns').absolute()}"
        if uri.startswith("file:"):  # allow the file store, and prevent network access
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        mlflow = self._imported("mlflow")
        super().__init__(experiment_name, run_id, prefix)
        self._make_client, self._entities = mlflow.MlflowClient, mlflow.entities
        self._uri = uri
        self._run_name, self._tags, self._artifact_location = run_name, tags, artifact_location
        self._how = {} if synchronous is None else {"synchronous": synchronous}
        self._experiment_id: str | None = None

    @property
    def run_id(self) -> str | None:
        """Id of the run. Reading this property opens the run."""
        _ = self.experiment
        return self._id

    @property
    def experiment_id(self) -> str | None:
        """Id of the MLflow experiment. Reading this property opens the run."""
        _ = self.experiment
        return self._experiment_id

    @property
    def save_dir(self) -> str | None:
        return self._uri.removeprefix("file:") if self._uri.startswith("file:") else None

    def _open(self, run_id: str | None, *, is_known: bool) -> tuple[Any, str]:
        client = self._make_client(self._uri)
        if run_id is not None:
            run = client.get_run(run_id)
            self._experiment_id = run.info.experiment_id
            client.update_run(run_id, status="RUNNING")
            return client, run_id
        found = client.get_experiment_by_name(self._project)
        if found is not None and found.lifecycle_stage != "deleted":
            self._experiment_id = found.experiment_id
        else:
            self._experiment_id = client.create_experiment(self._project, self._artifact_location)
        run = client.create_run(self._experiment_id, tags=self._tags, run_name=self._run_name)
        return client, str(run.info.run_id)

    def _write_metrics(self, row: dict[str, float], step: int) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [
            self._entities.Metric(_NOT_IN_A_NAME.sub("_", name), value, now_ms, step) for name, value in row.items()
        ]
        self.experiment.log_batch(self.run_id, metrics=metrics, **self._how)

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        """Log new hyperparameters. MLflow does not allow changes to logged hyperparameters, so a notice lists the
        values that differ."""
        client = self.experiment
        texts = {_NOT_IN_A_NAME.sub("_", name): str(value)[:_MAX_CHARACTERS] for name, value in flat(params)}
        known = client.get_run(self.run_id).data.params
        changed = sorted(name for name, text in texts.items() if known.get(name, text) != text)
        if changed:
            notice(
                "logger 'mlflow' keeps the hyperparameters of the first run and ignores the new values: "
                f"{', '.join(changed)}"
            )
        new = [self._entities.Param(name, text) for name, text in texts.items() if name not in known]
        for first in range(0, len(new), _MAX_PARAMS):
            client.log_batch(self.run_id, params=new[first : first + _MAX_PARAMS], **self._how)

    def _visuals(self) -> Visuals:
        return MLflowVisuals(self.name, self.experiment, self.run_id)

    def finalize(self, status: str) -> None:
        super().finalize(status)
        if self._experiment is not None and self._id is not None:
            self._experiment.set_terminated(self._id, _STATUSES.get(status, "FINISHED"))
            self._experiment = None  # the next use opens the run again
