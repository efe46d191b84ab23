"""Logger: base class for destinations of metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roomier.core.log import notice

STEP_COLUMN = "trainer/step"
"""Column with the number of optimizer steps, in rows whose step is the index of an evaluation batch."""


class Logger(ABC):
    """Base class for loggers. Implement :meth:`log_metrics`. The other methods are optional.

    On the first rank only, the Trainer calls ``start`` once, ``log_metrics`` at log steps with Python floats, and
    ``finalize`` once. If a method raises an error, a notice reports it, the logger is disabled, and the run
    continues.

    Attributes:
        name: name for messages, and for ``Trainer(logger=name)`` if the logger is part of roomier.
        run_dir: the run folder, set on every rank before ``start``; None if the run writes no files.
        is_muted: True if the logger was disabled after an error.

    Example:
        >>> class PrintLogger(roomier.Logger):
        ...     name = "print"
        ...
        ...     def log_metrics(self, metrics, step):
        ...         print(step, dict(metrics))
        >>> trainer = roomier.Trainer(logger=PrintLogger())
    """

    name: str = "logger"
    run_dir: Path | None = None
    is_muted: bool = False

    def start(self, run_dir: Path, resumed_step: int | None = None) -> None:
        """Open the destination.

        Args:
            run_dir: the run folder.
            resumed_step: step from which the run resumes. Remove rows after this step, because they are from an
                interrupted run and will be written again. None in a new run.
        """

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one row.

        Args:
            metrics: values by column.
            step: number of completed optimizer steps. In rows for evaluation batches, ``step`` is the index of the
                batch, and the column ``trainer/step`` contains the number of optimizer steps.
        """

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write the hyperparameters of the run. Called once, at the start of the run."""

    def log_image(
        self, key: str, images: Any, step: int | None = None, *, caption: str | Sequence[str] | None = None
    ) -> None:
        """Show images. By default, a notice reports that the logger cannot show them.

        Args:
            key: name of the images.
            images: the Trainer passes a list of uint8 arrays of shape (height, width, 3), or (height, width, 4) with an
                alpha channel.
            step: number of completed optimizer steps.
            caption: one caption per image, or None.
        """
        cannot_show(self.name, "images")

    def log_figure(self, key: str, figure: Any, step: int | None = None) -> None:
        """Show a matplotlib figure. By default, a notice reports that the logger cannot show it."""
        cannot_show(self.name, "figures")

    def log_histogram(
        self, key: str, values: Any, step: int | None = None, *, bins: int | Sequence[float] = 64
    ) -> None:
        """Show a histogram. By default, a notice reports that the logger cannot show it.

        Args:
            key: name of the histogram.
            values: the Trainer passes a :class:`roomier.loggers.Histogram`.
            step: number of completed optimizer steps.
            bins: number of bins or their edges, if ``values`` are numbers.
        """
        cannot_show(self.name, "histograms")

    def finalize(self, status: str) -> None:
        """Close the destination.

        Args:
            status: ``"success"``, ``"interrupted"`` or ``"failed"``.
        """

    # Attributes with Lightning's names ----------------------------------------------------------------------------

    @property
    def experiment(self) -> Any:
        """The object of the logging service, for features such as images and tables.

        On ranks other than the first, and for loggers without such an object, all calls are ignored. If a logger has no
        such object, a notice reports the first ignored call.
        """
        return Nothing(f"logger {self.name!r} supports only numbers and hyperparameters")

    @property
    def log_dir(self) -> str | None:
        """The folder to which the logger writes; None if the logger does not write to a folder."""
        return None if self.run_dir is None else str(self.run_dir)

    @property
    def save_dir(self) -> str | None:
        """The parent folder of :attr:`log_dir`."""
        return None if self.log_dir is None else str(Path(self.log_dir).parent)

    @property
    def version(self) -> int | str | None:
        """Identifier of the run: the name of the run folder, or the id in a logging service."""
        return None if self.log_dir is None else Path(self.log_dir).name

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Write the graph of ``model``. By default, do nothing."""

    def save(self) -> None:
        """Flush pending data. By default, do nothing."""


class Nothing:
    """Object that ignores all calls and returns itself.

    Args:
        reason: text of the notice about the first call; empty to print no notice.
    """

    def __init__(self, reason: str = "") -> None:
        self._reason = reason
        self._asked = ""

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        self._asked = self._asked or name
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Nothing:
        if self._reason and self._reason not in _reported:
            _reported.add(self._reason)
            notice(f"{self._reason}: calls of its experiment are ignored, such as {self._asked}()")
        return self

    def __getitem__(self, key: Any) -> Nothing:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def cannot_show(logger: str, kind: str) -> None:
    """Print a notice, once per process, that the logger named ``logger`` cannot show ``kind``, such as images."""
    text = f"logger {logger!r} cannot show {kind}, so they are not sent to it"
    if text not in _reported:
        _reported.add(text)
        notice(text)


_reported: set[str] = set()  # reasons that were reported in this process
