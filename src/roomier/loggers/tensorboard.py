"""TensorBoardLogger: an event file in the run folder, for ``tensorboard --logdir``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from roomier.api.logger import Nothing
from roomier.core.errors import RoomierError
from roomier.loggers.guarded import GuardedLogger, flat
from roomier.loggers.run_ids import OwnFolder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger(GuardedLogger):
    """Writes scalars, and the hyperparameters for TensorBoard's table of runs.

    Args:
        save_dir: write to ``<save_dir>/<name>/<version>``, as Lightning's logger does; None: to the run folder.
        name, version: folders within ``save_dir``; without a version each run gets a new ``version_N``, and a resumed
            one goes on in its own.
        prefix: put in front of each metric's name, with a ``-`` between.
        sub_dir: a folder within that folder.
        kwargs: for ``SummaryWriter``: ``flush_secs``, say.

    Attributes:
        experiment: the ``SummaryWriter``, for images, histograms and the rest; there from the start of a fit on, and
            before it where ``save_dir`` was given. Of several ranks the first one writes: on the others it takes every
            call and does nothing.

    Raises:
        RoomierError: the package ``tensorboard`` is not installed.
    """

    name = "tensorboard"

    def __init__(
        self,
        save_dir: str | Path | None = None,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        *,
        prefix: str = "",
        sub_dir: str | Path | None = None,
        default_hp_metric: bool = True,
        log_graph: bool = False,
        **kwargs: Any,
    ) -> None:
        # Imported here: what is missing is told before anything starts, and a run that does not ask for
        # TensorBoard does not wait for its import.
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise RoomierError(
                "logger",
                "tensorboard",
                f"needs a package that is not installed ({error})",
                "Run: pip install 'roomier[tensorboard]'",
            ) from error
        if log_graph:
            action = "Call logger.log_graph(model, batch) before fit: it runs the model on a batch of yours"
            raise RoomierError("log_graph", log_graph, "a run does not trace the model by itself", action)
        super().__init__(prefix)
        self._make_writer = SummaryWriter
        self._writer_options = kwargs
        self._place = None if save_dir is None else OwnFolder(self.name, Path(save_dir), name, version)
        self._sub_dir = str(sub_dir or "")
        self._folder: Path | None = None
        self._writer: SummaryWriter | None = None

    @property
    def experiment(self) -> SummaryWriter:
        if self.is_silent:
            return cast("SummaryWriter", Nothing())
        if self._writer is None:
            if self._folder is None and self._place is not None:
                self._folder = self._place.find(None)
            if self._folder is None:
                return cast("SummaryWriter", Nothing("logger 'tensorboard' opens with a fit that keeps files"))
            self._open(self._folder)
        assert self._writer is not None
        return self._writer

    def start(self, run_dir: Path, resumed_step: int | None = None) -> None:
        """Open a new event file. Points after ``resumed_step`` in older ones are marked to be hidden."""
        if self._writer is not None and self._place is not None:  # it was used before the run: this is its run
            self._place.keep(run_dir, cast("Path", self._folder))
            return
        self.finalize("success")  # it was used after the run before
        folder = run_dir if self._place is None else self._place.find(run_dir)
        self._open(folder, purge_step=None if resumed_step is None else resumed_step + 1)

    def _open(self, folder: Path, purge_step: int | None = None) -> None:
        self._folder = folder
        where = str(folder / self._sub_dir)
        self._writer = self._make_writer(log_dir=where, purge_step=purge_step, **self._writer_options)

    @property
    def log_dir(self) -> str | None:
        return super().log_dir if self._folder is None else str(self._folder)

    def _write_metrics(self, row: dict[str, float], step: int) -> None:
        for name, value in row.items():
            self.experiment.add_scalar(name, value, step)

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        """Nested ones are named ``outer/inner``; what is no number or string is shown as text."""
        from torch.utils.tensorboard.summary import hparams

        # SummaryWriter.add_hparams would open a second run in a folder of its own.
        writer = self.experiment
        file_writer = writer.file_writer
        assert file_writer is not None, "SummaryWriter opens it when it is made"
        for summary in hparams(dict(flat(params)), {}):
            file_writer.add_summary(summary)
        writer.flush()

    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """Draw ``model``: it is traced on ``input_array``, or on its ``example_input_array``."""
        if input_array is None:
            input_array = getattr(model, "example_input_array", None)
        if input_array is None:
            raise RoomierError("input_array", None, "there is nothing to run the model on", "Pass a batch")
        self._guard("log_graph", lambda: self.experiment.add_graph(model, input_array))

    def save(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def finalize(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
