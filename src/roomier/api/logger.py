"""Logger: where the numbers of a run go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roomier.core.log import notice


class Logger(ABC):
    """Implement :meth:`log_metrics`; the rest is optional.

    The Trainer calls ``start`` once, ``log_metrics`` at log steps with plain floats, and ``finalize`` once, on the
    first rank alone. A method that raises is named once, and the logger is left out from then on; the run goes on.

    Attributes:
        name: in messages, and what ``Trainer(logger=name)`` makes, where it is one of roomier's.
        run_dir: the folder of the run, set on every rank before ``start``; None outside a run that keeps files.
        is_muted: it failed, and is left out.
    """

    name: str = "logger"
    run_dir: Path | None = None
    is_muted: bool = False

    def start(self, run_dir: Path, resumed_step: int | None = None) -> None:
        """Open what is written to. ``resumed_step``: rows after this step come from a run that was cut off
        and will be written again; drop them."""

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one row. ``step`` counts optimizer steps."""

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write the hyperparameters of the run, once, at its start."""

    def finalize(self, status: str) -> None:
        """Close. ``status``: ``"success"``, ``"interrupted"`` or ``"failed"``."""

    # What is read on a logger, under Lightning's names ---------------------------------------------------------------

    @property
    def experiment(self) -> Any:
        """What it writes with, for what only that can: images, tables. Without one, calls are dropped, and told once.

        On all ranks but the first it takes every call and does nothing.
        """
        return Nothing(f"logger {self.name!r} writes numbers and hyperparameters alone")

    @property
    def log_dir(self) -> str | None:
        """The folder it writes to; None where there is none."""
        return None if self.run_dir is None else str(self.run_dir)

    @property
    def save_dir(self) -> str | None:
        """The folder that :attr:`log_dir` is in."""
        return None if self.log_dir is None else str(Path(self.log_dir).parent)

    @property
    def version(self) -> int | str | None:
        """What tells its runs apart: the name of the run folder, or the id that a service gave."""
        return None if self.log_dir is None else Path(self.log_dir).name

    def save(self) -> None:
        """Write out what is held back: nothing, here."""


class Nothing:
    """Whatever is asked of it, it does nothing.

    Args:
        reason: why; told once, with what was called first. Empty: said to nobody.
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
        if self._reason and self._reason not in _told:
            _told.add(self._reason)
            notice(f"{self._reason}: {self._asked}() of its experiment, and all else there, is dropped")
        return self

    def __getitem__(self, key: Any) -> Nothing:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


_told: set[str] = set()  # reasons, in this process
