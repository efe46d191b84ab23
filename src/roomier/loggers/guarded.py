"""Base class of roomier's loggers, and the ids and folders of a run's loggers, which ``loggers.json`` in the run folder
stores for a resumed run. Users may call a logger directly. Its errors do not end a run.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from roomier.api.logger import Logger
from roomier.core.errors import RoomierError
from roomier.core.log import is_first_rank, notice
from roomier.core.metric_names import check_metric_name
from roomier.core.replacing import replacing
from roomier.core.untrusted import read_json
from roomier.loggers.histogram import histogram_of
from roomier.loggers.pixels import captions_of, figure_of, pixels_of
from roomier.loggers.visuals import Visuals


class GuardedLogger(Logger):
    """Base class of loggers that modules and callbacks may also call directly, on any rank.

    Calls have no effect on ranks other than the first rank, or after the logger has failed.

    Args:
        prefix: prefix of each metric's name. A ``-`` separates the prefix from the name.
    """

    def __init__(self, prefix: str | None = "") -> None:
        self._prefix = f"{prefix}-" if prefix else ""
        self._last_step = 0

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write one row.

        Args:
            metrics: numbers and 0-dim tensors. Reading a tensor on a device synchronizes the host with the device.
            step: step of the row; None uses the step of the previous row.

        Raises:
            RoomierError: a value is not a number, or a name contains control characters.
        """
        if self.is_silent:
            return
        row = {f"{self._prefix}{name}": number_of(name, value) for name, value in metrics.items()}
        self._last_step = step = self._last_step if step is None else int(step)
        self._guard("log_metrics", lambda: self._write_metrics(row, step))

    def log_hyperparams(self, params: Mapping[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Write the hyperparameters of the run."""
        if self.is_silent:
            return
        given = dict(vars(params) if isinstance(params, Namespace) else params)
        self._guard("log_hyperparams", lambda: self._write_hyperparams(given))

    def log_image(
        self, key: str, images: Any, step: int | None = None, *, caption: str | Sequence[str] | None = None
    ) -> None:
        """Show one or several images.

        Args:
            key: name of the images.
            images: a tensor (C, H, W), an array (H, W, C), a PIL image, a list of them, or a batch with four
                dimensions. Values are in [0, 1], or in [0, 255] if the dtype is uint8.
            step: step of the images; None uses the step of the previous row.
            caption: one caption for each image.

        Raises:
            RoomierError: an item is not an image, or the number of captions is wrong.
        """
        if not self.is_silent:
            pixels = pixels_of(images, key)
            captions = captions_of(caption, len(pixels))
            self._show("log_image", key, step, lambda visuals, *to: visuals.images(to[0], pixels, captions, to[1]))

    def log_figure(self, key: str, figure: Any, step: int | None = None) -> None:
        """Show a matplotlib figure, which stays open.

        Raises:
            RoomierError: ``figure`` is not a figure.
        """
        if not self.is_silent:
            figure_of(figure)
            self._show("log_figure", key, step, lambda visuals, *to: visuals.figure(to[0], figure, to[1]))

    def log_histogram(
        self, key: str, values: Any, step: int | None = None, *, bins: int | Sequence[float] = 64
    ) -> None:
        """Show a histogram of ``values``; see :func:`roomier.loggers.histogram.histogram_of` for the arguments."""
        if not self.is_silent:
            found = histogram_of(values, bins)
            self._show("log_histogram", key, step, lambda visuals, *to: visuals.histogram(to[0], found, to[1]))

    def _show(self, method: str, key: str, step: int | None, show: Callable[[Visuals, str, int], None]) -> None:
        check_metric_name(method, key)
        step = self._last_step if step is None else int(step)
        self._guard(method, lambda: show(self._visuals(), f"{self._prefix}{key}", step))

    def _visuals(self) -> Visuals:
        """Return the destination of images and histograms. By default, they cannot be shown."""
        return Visuals(self.name)

    @property
    def is_silent(self) -> bool:
        """True if the logger does not write, because the logger failed or another rank writes."""
        return self.is_muted or not is_first_rank()

    @abstractmethod
    def _write_metrics(self, row: dict[str, float], step: int) -> None: ...

    @abstractmethod
    def _write_hyperparams(self, params: dict[str, Any]) -> None: ...

    def _guard(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            mute(self, name, error)


def mute(logger: Any, method: str, error: Exception) -> None:
    """Disable ``logger`` and print a notice with the error."""
    logger.is_muted = True
    name = getattr(logger, "name", None)
    notice(
        f"logger {name!r} ({type(logger).__name__}) failed in {method} and is disabled; training continues. "
        f"{type(error).__name__}: {error}"
    )


def flat(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the items of nested ``params``: ``{"model": {"depth": 2}}`` gives ``("model/depth", 2)``.

    Values other than numbers and strings are converted to strings.
    """
    for name, value in params.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value if isinstance(value, (bool, int, float, str)) else str(value)


def number_of(name: str, value: Any) -> float:
    """Return the metric ``value`` as a number.

    Raises:
        RoomierError: the name is not valid, or the value is not a number.
    """
    check_metric_name("log_metrics", str(name))
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RoomierError("log_metrics", (name, value), "must be a number", "Pass numbers or 0-dim tensors") from error


FILE_NAME = "loggers.json"


def read_id(run_dir: Path, key: str) -> str | None:
    """Return the id of the logger ``key`` in this run; None if no id is stored."""
    found = _read(run_dir).get(key)
    return None if found is None else str(found)


def write_id(run_dir: Path, key: str, run_id: str) -> None:
    """Store the id of the logger ``key`` for a resumed run."""
    known = _read(run_dir)
    if known.get(key) == run_id:
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    with replacing(run_dir / FILE_NAME) as file:
        file.write(json.dumps({**known, key: run_id}, indent=2) + "\n")


def _read(run_dir: Path) -> dict[str, str]:
    try:
        found = read_json(run_dir / FILE_NAME)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class FolderLogger(GuardedLogger):
    """Base class of loggers that write to a folder: the run folder, or a folder outside the run folder.

    Args:
        save_dir: write to ``<save_dir>/<name>/<version>``, like Lightning's loggers; None writes to the run folder.
        name: folder within ``save_dir``; None uses ``save_dir`` itself.
        version: folder within ``name``; a number N selects ``version_N``. None creates a new ``version_N`` for each
            run. A resumed run uses the folder of the saved run.
        prefix: prefix of each metric's name. A ``-`` separates the prefix from the name.
    """

    def __init__(
        self,
        save_dir: str | Path | None = None,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__(prefix)
        self._parent = None if save_dir is None else Path(save_dir) / (name or "")
        self._version = f"version_{version}" if isinstance(version, int) else version
        self._folder: Path | None = None

    @property
    def log_dir(self) -> str | None:
        return super().log_dir if self._folder is None else str(self._folder)

    @property
    def is_in_run_folder(self) -> bool:
        """True if the logger writes to the run folder."""
        return self._parent is None

    def _find_folder(self, run_dir: Path | None) -> Path | None:
        """Return the folder of the logger for the run in ``run_dir``."""
        if self._parent is None:
            return run_dir
        version = self._version
        if version is None:
            version = (None if run_dir is None else read_id(run_dir, self._key)) or _next_version(self._parent)
        folder = self._parent / version
        if run_dir is not None:
            write_id(run_dir, self._key, folder.name)  # for a resumed run
        return folder

    @property
    def _key(self) -> str:
        return f"{self.name} {self._parent}"


def _next_version(parent: Path) -> str:
    numbers = (path.name.removeprefix("version_") for path in parent.glob("version_*"))
    return f"version_{max((int(each) for each in numbers if each.isdecimal()), default=-1) + 1}"
