"""WandbLogger: a run of Weights & Biases."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.loggers.service import ServiceLogger, missing_package, refuse_log_model

_STEP = "trainer/global_step"


class WandbLogger(ServiceLogger):
    """Logs to Weights & Biases, over ``trainer/global_step``; arguments are those of Lightning's logger.

    The run stays open after a fit, for what a script logs then with ``wandb.log`` or ``logger.experiment``; wandb ends
    it with the process, ``wandb.finish()`` before. Another WandbLogger that opens one ends it too.

    Args:
        name: of the run. save_dir, dir: where wandb keeps its files; None: the run folder.
        version, id: of a run to go on with. project: ``WANDB_PROJECT``, else ``"lightning_logs"``.
        offline: write files alone, to be sent later with ``wandb sync``; nothing is asked of the network.
        experiment: a run that ``wandb.init`` gave.
        prefix: put in front of each metric's name, with a ``-`` between.
        kwargs: for ``wandb.init``: ``entity``, ``group``, ``tags``, ...

    Raises:
        RoomierError: the package is not installed, or ``log_model`` was asked for, which is not built.
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
            raise RoomierError("anonymous", anonymous, "is no longer known to wandb", "Leave it out")
        if offline or kwargs.get("mode") == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read when wandb is imported
        try:
            import wandb
        except ImportError as error:
            raise missing_package(self.name, self.PACKAGE, error) from error
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
        """wandb's own ``watch``: histograms of gradients, for which it waits for the device every ``log_freq`` steps.
        It hooks the parameters there are: under ``zero1`` and beyond these are others."""
        self._guard("watch", lambda: self.experiment.watch(model, log=log, log_freq=log_freq, log_graph=log_graph))

    def _open(self, run_id: str | None, *, is_known: bool) -> tuple[Any, str]:
        wandb = self._wandb
        options = {"project": self._project, "resume": "allow", **self._options}
        running = wandb.run
        owner = None if running is None else _owners.get(running.id)
        if running is not None and running.id != run_id and owner is not None:
            if owner._is_in_run:
                options["reinit"] = "create_new"  # beside it
            else:
                running.finish()
            running = None
        if running is not None:
            notice(
                f"logger 'wandb' goes on in the run {running.id} that is open; call wandb.finish() before for another"
            )
            return running, str(running.id)
        place = self._place or self.run_dir
        if place is not None:
            place.mkdir(parents=True, exist_ok=True)
        run = wandb.init(dir=None if place is None else str(place), id=run_id, **options)
        _owners[run.id] = self
        if not self._options.get("sync_tensorboard"):
            run.define_metric(_STEP)
            run.define_metric("*", step_metric=_STEP, step_sync=True)
        return run, str(run.id)

    def _write_metrics(self, row: dict[str, float], step: int) -> None:
        self.experiment.log({**row, _STEP: step})

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        self.experiment.config.update(_plain(params), allow_val_change=True)

    def _close(self, status: str) -> None:
        if self._experiment is not None and self._id in _owners:
            self._experiment.finish(exit_code=int(status == "failed"))
        super()._close(status)


_owners: dict[str, WandbLogger] = {}  # of the runs that were opened here, by id


def _plain(value: Any) -> Any:
    """``value`` made of what JSON knows; all else as text."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
