"""TensorBoardLogger: logger that writes an event file for ``tensorboard --logdir``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from roomier.api.logger import Nothing
from roomier.core.errors import RoomierError
from roomier.loggers.guarded import FolderLogger, flat, write_id
from roomier.loggers.visuals import TensorBoardVisuals, Visuals

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger(FolderLogger):
    """Logger that writes scalars, images, histograms, and hyperparameters for the table of runs in TensorBoard.

    Args:
        save_dir: write to ``<save_dir>/<name>/<version>``, like Lightning's logger; None writes to the run folder.
        name: folder within ``save_dir``.
        version: folder within ``name``; None creates a new ``version_N`` for each run. A resumed run uses the folder of
            the saved run.
        prefix: prefix of each metric's name. A ``-`` separates the prefix from the name.
        sub_dir: folder within the folder that ``save_dir``, ``name`` and ``version`` determine.
        default_hp_metric: accepted for compatibility with Lightning, but ignored.
        log_graph: must be False. Call :meth:`log_graph` instead.
        kwargs: arguments of ``SummaryWriter``, such as ``flush_secs``.

    Attributes:
        experiment: the ``SummaryWriter``, for example for text and audio. The writer is available after a fit
            has started, or earlier if ``save_dir`` is set. On ranks other than the first rank, the methods of the
            writer have no effect.

    Raises:
        RoomierError: the ``tensorboard`` package is not installed, or ``log_graph`` is set.

    Example:
        >>> trainer = roomier.Trainer(logger=TensorBoardLogger("logs", name="gpt"))
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
        # This import is in the constructor, so that a missing package raises an error before the run starts. Runs
        # without this logger do not wait for the import.
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            problem = f"requires a package that is not installed ({error})"
            raise RoomierError("logger", "tensorboard", problem, "Run: pip install 'roomier[tensorboard]'") from error
        if log_graph:
            action = "Before fit, call logger.log_graph(model, batch), which runs the model on the batch"
            raise RoomierError(
                "log_graph", log_graph, "is not supported, because a run does not trace the model", action
            )
        super().__init__(save_dir, name, version, prefix)
        self._make_writer = SummaryWriter
        self._writer_options = kwargs
        self._sub_dir = str(sub_dir or "")
        self._writer: SummaryWriter | None = None

    @property
    def experiment(self) -> SummaryWriter:
        if self.is_silent:
            return cast("SummaryWriter", Nothing())
        if self._writer is None:
            self._folder = self._folder or self._find_folder(None)
            if self._folder is None:
                return cast("SummaryWriter", Nothing("logger 'tensorboard' has no file before a fit that writes files"))
            self._open(self._folder)
        assert self._writer is not None
        return self._writer

    def start(self, run_dir: Path, resumed_step: int | None = None) -> None:
        """Open a new event file. TensorBoard then hides points after ``resumed_step`` in older files."""
        if self._writer is not None and not self.is_in_run_folder:  # the user opened the writer before this run
            write_id(run_dir, self._key, cast("Path", self._folder).name)
            return
        self.finalize("success")  # the logger may have been used after the previous run
        self._open(self._find_folder(run_dir) or run_dir, purge_step=None if resumed_step is None else resumed_step + 1)

    def _open(self, folder: Path, purge_step: int | None = None) -> None:
        self._folder = folder
        where = folder / self._sub_dir
        _wait_for_later_name(where)
        self._writer = self._make_writer(log_dir=str(where), purge_step=purge_step, **self._writer_options)

    def _write_metrics(self, row: dict[str, float], step: int) -> None:
        for name, value in row.items():
            self.experiment.add_scalar(name, value, step)

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        """Write the hyperparameters. Nested names are joined as ``outer/inner``. Values other than numbers are written
        as text."""
        from torch.utils.tensorboard.summary import hparams

        # SummaryWriter.add_hparams would create a separate run in a separate folder.
        writer = self.experiment
        file_writer = writer.file_writer
        assert file_writer is not None, "SummaryWriter opens it at construction"
        for summary in hparams(dict(flat(params)), {}):
            file_writer.add_summary(summary)
        writer.flush()

    def _visuals(self) -> Visuals:
        return TensorBoardVisuals(self.name, self.experiment)

    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """Write the graph of ``model``, traced on ``input_array`` or on the model's ``example_input_array``.

        Raises:
            RoomierError: neither ``input_array`` nor ``example_input_array`` is given.
        """
        if input_array is None:
            input_array = getattr(model, "example_input_array", None)
        if input_array is None:
            raise RoomierError(
                "input_array", None, "is required, because the graph is traced on this input", "Pass a batch"
            )
        self._guard("log_graph", lambda: self.experiment.add_graph(model, input_array))

    def save(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def finalize(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _wait_for_later_name(folder: Path) -> None:
    """Wait until the name of a new event file sorts after the names of the existing files. The wait takes at most one
    second.

    TensorBoard reads the files of a folder in the order of their names. A file name contains the creation time in
    seconds, followed by a counter without leading zeros. Therefore, two files from the same second can be read in the
    wrong order.
    """
    parts = [file.name.split(".")[3] for file in folder.glob("events.out.tfevents.*")]
    wait = max((int(each) for each in parts if each.isdecimal()), default=0) + 1 - time.time()
    if 0 < wait <= 1:
        time.sleep(wait)
