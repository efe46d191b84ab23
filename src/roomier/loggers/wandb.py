"""WandbLogger: logger that writes to a run of Weights & Biases."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.loggers.files import with_names
from roomier.loggers.service import ServiceLogger, refuse_log_model
from roomier.loggers.visuals import WANDB_STEP, Visuals, WandbVisuals


class WandbLogger(ServiceLogger):
    """Logger that writes to a run of Weights & Biases, with ``trainer/global_step`` as the x-axis. The arguments are
    the same as in Lightning.

    After a fit, the run remains open, for example for ``wandb.log`` or ``logger.experiment``. The run ends when the
    process ends, when ``wandb.finish()`` is called, or when another WandbLogger opens a run.

    Args:
        name: name of the run.
        save_dir: folder of wandb's files; None uses the run folder.
        version: id of a run to resume.
        offline: if True, write only files, without network access, for a later upload with ``wandb sync``.
        dir: same as ``save_dir``.
        id: same as ``version``.
        anonymous: must be None, because wandb removed this argument.
        project: name of the project; None uses the ``WANDB_PROJECT`` environment variable if it is set, otherwise
            ``"lightning_logs"``.
        log_model: must be False, because checkpoints are not uploaded.
        experiment: the run that ``wandb.init`` returned.
        prefix: prefix of each metric's name. A ``-`` separates the prefix from the name.
        kwargs: arguments of ``wandb.init``: ``entity``, ``group``, ``tags``, ...

    Raises:
        RoomierError: the package is not installed, or ``log_model`` or ``anonymous`` is set.

    Example:
        >>> trainer = roomier.Trainer(logger=WandbLogger(name="gpt", offline=True))
    """

    name = "wandb"
    PACKAGE: ClassVar[str] = "wandb"

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | Path | None = None,
        version: str | None = None,
        offline: bool = False,
        dir: str | Path | None = None,
        id: str | None = None,
        anonymous: bool | None = None,
        project: str | None = None,
        log_model: bool | str = False,
        experiment: Any = None,
        prefix: str = "",
        **kwargs: Any,
    ) -> None:
        refuse_log_model(log_model)
        if anonymous is not None:
            raise RoomierError("anonymous", anonymous, "is no longer supported by wandb", "Remove it")
        if offline or kwargs.get("mode") == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # wandb reads this variable at import
        wandb = self._imported("wandb")
        super().__init__(project or os.environ.get("WANDB_PROJECT") or "lightning_logs", version or id, prefix)
        self._wandb = wandb
        self._options = {"name": name, **kwargs}
        if offline:
            self._options["mode"] = "offline"
        place = save_dir or dir
        self._place = None if place is None else Path(place)
        if experiment is not None:
            self._experiment, self._id = experiment, experiment.id

    @property
    def save_dir(self) -> str | None:
        return super().save_dir if self._place is None else str(self._place)

    def watch(
        self, model: nn.Module, log: str | None = "gradients", log_freq: int = 100, log_graph: bool = True
    ) -> None:
        """Call ``wandb.watch``, which by default logs histograms of gradients and waits for the device every
        ``log_freq`` steps.

        ``wandb.watch`` registers hooks on the current parameters. If ``zero1`` or a higher strategy then replaces
        the parameters, the hooks no longer run.
        """
        self._guard("watch", lambda: self.experiment.watch(model, log=log, log_freq=log_freq, log_graph=log_graph))

    def _open(self, run_id: str | None, *, is_known: bool) -> tuple[Any, str]:
        wandb = self._wandb
        options = {"project": self._project, "resume": "allow", **self._options}
        running = wandb.run
        owner = None if running is None else _owners.get(running.id)
        if running is not None and running.id != run_id and owner is not None:
            if owner._is_in_run:
                options["reinit"] = "create_new"  # open a run in addition to the active run
            else:
                running.finish()
            running = None
        if running is not None:
            notice(f"logger 'wandb' uses the open run {running.id}. To start a new run, call wandb.finish() first")
            return running, str(running.id)
        place = self._place or self.run_dir
        if place is not None:
            place.mkdir(parents=True, exist_ok=True)
        run = wandb.init(dir=None if place is None else str(place), id=run_id, **options)
        _owners[run.id] = self
        if not self._options.get("sync_tensorboard"):
            run.define_metric(WANDB_STEP)
            run.define_metric("*", step_metric=WANDB_STEP, step_sync=True)
        return run, str(run.id)

    def _write_metrics(self, row: dict[str, float], step: int) -> None:
        self.experiment.log({**row, WANDB_STEP: step})

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        plain = json.loads(json.dumps(with_names(params), default=str))
        self.experiment.config.update(plain, allow_val_change=True)

    def _visuals(self) -> Visuals:
        return WandbVisuals(self.name, self.experiment)

    def _close(self, status: str) -> None:
        if self._experiment is not None and self._id in _owners:
            self._experiment.finish(exit_code=int(status == "failed"))
        super()._close(status)


_owners: dict[str, WandbLogger] = {}  # mapping from the id of each open run to the logger that opened the run
