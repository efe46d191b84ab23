"""MLFlowLogger: a run of MLflow."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any, ClassVar

from roomier.core.log import notice
from roomier.loggers.guarded import flat
from roomier.loggers.service import ServiceLogger, missing_package, refuse_log_model

_STATUSES = {"success": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_NOT_IN_A_NAME = re.compile(r"[^\w/.: -]")
_MAX_CHARACTERS = 500  # of a parameter, in every store
_MAX_PARAMS = 100  # of one request


class MLFlowLogger(ServiceLogger):
    """Logs to MLflow; arguments are those of Lightning's logger. ``mlflow-skinny`` is enough.

    Args:
        experiment_name: that the run belongs to. run_name: of a new run.
        tracking_uri: of a server, or ``file:<folder>``; None is ``MLFLOW_TRACKING_URI``, else ``file:<save_dir>``.
        tags: of a new run. save_dir: a folder for runs where no server is named (``"./mlruns"``).
        artifact_location: of a new experiment. run_id: of a run to go on with.
        synchronous: whether a call waits until the server has the row. None is what ``mlflow`` does by itself.
        prefix: put in front of each metric's name, with a ``-`` between.

    Attributes:
        experiment: the ``MlflowClient``. run_id, experiment_id: what its methods ask for.

    Raises:
        RoomierError: the package is not installed, or ``log_model`` was asked for, which is not built.
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
        if uri.startswith("file:"):  # it is meant; and a run that keeps to its files asks nothing of the network
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        try:
            from mlflow import MlflowClient, entities
        except ImportError as error:
            raise missing_package(self.name, self.PACKAGE, error) from error
        super().__init__(experiment_name, run_id, prefix)
        self._make_client, self._entities = MlflowClient, entities
        self._uri = uri
        self._run_name, self._tags, self._artifact_location = run_name, tags, artifact_location
        self._how = {} if synchronous is None else {"synchronous": synchronous}
        self._experiment_id: str | None = None

    @property
    def run_id(self) -> str | None:
        """Of the run, which is opened by asking."""
        _ = self.experiment
        return self._id

    @property
    def experiment_id(self) -> str | None:
        """Of what MLflow calls an experiment; opens the run."""
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
        """MLflow takes each once: of a resumed run those of its beginning stay, and a notice names what differs."""
        client = self.experiment
        texts = {_NOT_IN_A_NAME.sub("_", name): str(value)[:_MAX_CHARACTERS] for name, value in flat(params)}
        known = client.get_run(self.run_id).data.params
        changed = sorted(name for name, text in texts.items() if known.get(name, text) != text)
        if changed:
            notice(
                f"logger 'mlflow' keeps the hyperparameters the run began with; given otherwise: {', '.join(changed)}"
            )
        new = [self._entities.Param(name, text) for name, text in texts.items() if name not in known]
        for first in range(0, len(new), _MAX_PARAMS):
            client.log_batch(self.run_id, params=new[first : first + _MAX_PARAMS], **self._how)

    def finalize(self, status: str) -> None:
        super().finalize(status)
        if self._experiment is not None and self._id is not None:
            self._experiment.set_terminated(self._id, _STATUSES.get(status, "FINISHED"))
            self._experiment = None  # what is opened after runs again
