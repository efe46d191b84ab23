"""Base class of the file loggers, with functions that drop rows and write the hyperparameter file."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, TextIO

from roomier.core.log import notice
from roomier.core.replacing import replacing
from roomier.core.untrusted import lines_of, open_to_append, read_text
from roomier.loggers.guarded import GuardedLogger
from roomier.loggers.run_ids import OwnFolder


def drop_rows(path: Path, judge: Callable[[bytes], str]) -> None:
    """Rewrite ``path`` atomically without the lines for which ``judge`` returns ``"dropped"`` or ``"torn"``. Print a
    notice if a line is torn, because its write was interrupted.

    Raises:
        OSError: see :func:`roomier.core.untrusted.lines_of`.
    """
    kinds = [judge(line) for line in lines_of(path)]
    if kinds.count("kept") < len(kinds):
        with replacing(path) as kept:
            kept.writelines(line.decode() for line, kind in zip(lines_of(path), kinds, strict=True) if kind == "kept")
    if num_torn := kinds.count("torn"):
        notice(f"{path}: dropped {num_torn} incomplete row(s) from an interrupted run")


def write_hyperparams(run_dir: Path, params: Mapping[str, Any], resumed_step: int | None = None) -> None:
    """Write ``hparams.json``. Values that JSON cannot represent are written as their ``repr``.

    A resumed run does not replace the file of the first run, because it does not use all new values. For example, the
    learning rate comes from the checkpoint. If the new values differ, they are written to ``hparams-from-step=N.json``,
    and a notice is printed.
    """
    text = json.dumps(_with_names(dict(params)), indent=2, default=repr) + "\n"
    path = run_dir / "hparams.json"
    if resumed_step is not None and path.exists():
        if _contains(path, text):
            return
        path = run_dir / f"hparams-from-step={resumed_step}.json"
        if _contains(path, text):  # written by another logger of this run
            return
        notice(
            "the hyperparameters differ from the first run; hparams.json is unchanged, and the new values are in "
            f"{path.name}"
        )
    with replacing(path) as file:
        file.write(text)


def _contains(path: Path, text: str) -> bool:
    with suppress(OSError, ValueError):  # an unreadable file has another content
        return read_text(path) == text
    return False


def _with_names(value: Any) -> Any:
    """Return ``value`` with dict keys that JSON cannot represent converted to strings."""
    if isinstance(value, dict):
        return {
            key if key is None or isinstance(key, (str, int, float)) else str(key): _with_names(item)
            for key, item in value.items()
        }
    return [_with_names(item) for item in value] if isinstance(value, (list, tuple)) else value


class FileLogger(GuardedLogger):
    """Base class of loggers that append rows to one file. A subclass defines the file name and the format of a row.

    Args:
        save_dir: write to ``<save_dir>/<name>/<version>``, like Lightning's loggers; None writes to the run folder.
        name: folder within ``save_dir``.
        version: folder within ``name``; None creates a new ``version_N`` for each run. A resumed run uses the folder of
            the saved run.
        prefix: prefix of each metric's name. A ``-`` separates the prefix from the name.
    """

    file_name: ClassVar[str]
    is_added: bool = False
    """True if roomier added this logger to the loggers that the user passed."""

    def __init__(
        self,
        save_dir: str | Path | None = None,
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__(prefix)
        self._place = None if save_dir is None else OwnFolder(self.name, Path(save_dir), name, version)
        self._folder: Path | None = None
        self._resumed_step: int | None = None
        self._file: TextIO | None = None

    def start(self, run_dir: Path, resumed_step: int | None = None) -> None:
        """Open the file for appending. Incomplete rows and rows after ``resumed_step`` are removed atomically."""
        self._folder = run_dir if self._place is None else self._place.find(run_dir)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._resumed_step = resumed_step
        self._prepare_file(resumed_step)
        self._file = open_to_append(self._path)

    @property
    def is_in_run_folder(self) -> bool:
        """True if the file is in the run folder."""
        return self._place is None

    @property
    def log_dir(self) -> str | None:
        return super().log_dir if self._folder is None else str(self._folder)

    def finalize(self, status: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        """Write ``hparams.json`` next to the rows. See :func:`write_hyperparams`."""
        assert self._folder is not None, "start() must run first"
        write_hyperparams(self._folder, params, self._resumed_step)

    @property
    def _path(self) -> Path:
        assert self._folder is not None, "start() must run first"
        return self._folder / self.file_name

    @abstractmethod
    def _prepare_file(self, resumed_step: int | None) -> None:
        """Remove incomplete rows and rows after ``resumed_step`` from an existing file."""
