"""TensorBoardLogger: an event file in the run folder, for ``tensorboard --logdir``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from roomier.api.logger import Logger
from roomier.core.errors import RoomierError
from roomier.core.log import is_first_rank

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger(Logger):
    """Writes scalars, and the hyperparameters for TensorBoard's table of runs.

    Attributes:
        experiment: the ``SummaryWriter``, for images, histograms and the rest; there after ``start``. Of several ranks
            the first one writes: on the others it takes every call and does nothing.

    Raises:
        RoomierError: the package ``tensorboard`` is not installed.
    """

    name = "tensorboard"

    def __init__(self) -> None:
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
        self._make_writer = SummaryWriter
        self._writer: SummaryWriter | None = None

    @property
    def experiment(self) -> SummaryWriter:
        if self._writer is None and not is_first_rank():
            return cast("SummaryWriter", _Nothing())
        assert self._writer is not None, "start() comes first"
        return self._writer

    def start(self, run_dir: Path, resumed_step: int | None = None) -> None:
        """Open a new event file. Points after ``resumed_step`` in older ones are marked to be hidden."""
        purge_step = None if resumed_step is None else resumed_step + 1
        self._writer = self._make_writer(log_dir=str(run_dir), purge_step=purge_step)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.experiment.add_scalar(name, value, step)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Nested ones are named ``outer/inner``; what is no number or string is shown as text."""
        from torch.utils.tensorboard.summary import hparams

        # SummaryWriter.add_hparams would open a second run in a folder of its own.
        file_writer = self.experiment.file_writer
        assert file_writer is not None, "SummaryWriter opens it when it is made"
        for summary in hparams(dict(_flat(params)), {}):
            file_writer.add_summary(summary)
        self.experiment.flush()

    def finalize(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class _Nothing:
    """Whatever is asked of it, it does nothing."""

    def __getattr__(self, name: str) -> _Nothing:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Nothing:
        return self


def _flat(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | float | str]]:
    for name, value in params.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value if isinstance(value, (bool, int, float, str)) else str(value)
