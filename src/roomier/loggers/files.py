"""What the file loggers share: a file that is appended to or replaced in one move, and hyperparameters beside it."""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TextIO

from roomier.core.log import notice
from roomier.loggers.guarded import GuardedLogger
from roomier.loggers.run_ids import OwnFolder


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A text file written aside that takes the place of ``path`` when the block ends without an error.

    Whenever the process is killed, ``path`` is the old file or the new one, whole.
    """
    aside = path.with_name(f".{path.name}.aside")
    try:
        with aside.open("w", encoding="utf-8", newline="") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_hyperparams(run_dir: Path, params: Mapping[str, Any], resumed_step: int | None = None) -> None:
    """Write ``hparams.json``; a value JSON has no form for stands there as its ``repr``.

    That of the run's beginning stays: a resumed run does not use all that it was given (the learning rate is the
    checkpoint's, say). Where it was given other values, these go to ``hparams-from-step=N.json``, and a notice says so.
    """
    text = json.dumps(_with_names(dict(params)), indent=2, default=repr) + "\n"
    path = run_dir / "hparams.json"
    if resumed_step is not None and path.is_file():
        if path.read_text(encoding="utf-8") == text:
            return
        path = run_dir / f"hparams-from-step={resumed_step}.json"
        if path.is_file() and path.read_text(encoding="utf-8") == text:  # another logger of this run wrote it
            return
        notice(f"the hyperparameters are not those the run began with: hparams.json stays, these are in {path.name}")
    with replacing(path) as file:
        file.write(text)


def _with_names(value: Any) -> Any:
    """``value`` with text in the place of keys that JSON has no form for."""
    if isinstance(value, dict):
        return {
            key if key is None or isinstance(key, (str, int, float)) else str(key): _with_names(item)
            for key, item in value.items()
        }
    return [_with_names(item) for item in value] if isinstance(value, (list, tuple)) else value


class FileLogger(GuardedLogger):
    """Appends rows to one file; a subclass names the file and knows the form of a row.

    Args:
        save_dir: write to ``<save_dir>/<name>/<version>``, as Lightning's loggers do; None: to the run folder.
        name, version: folders within ``save_dir``; without a version each run gets a new ``version_N``, and a resumed
            one goes on in its own.
        prefix: put in front of each metric's name, with a ``-`` between.
    """

    file_name: ClassVar[str]

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
        """Open the file for appending. A torn row and rows after ``resumed_step`` are dropped, in one move."""
        self._folder = run_dir if self._place is None else self._place.find(run_dir)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._resumed_step = resumed_step
        self._take_over(resumed_step)
        self._file = self._path.open("a", encoding="utf-8", newline="")

    @property
    def is_in_run_folder(self) -> bool:
        """Whether its file is one of the run folder's."""
        return self._place is None

    @property
    def log_dir(self) -> str | None:
        return super().log_dir if self._folder is None else str(self._folder)

    def finalize(self, status: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        """Write them to ``hparams.json`` beside the rows: see :func:`write_hyperparams`."""
        assert self._folder is not None, "start() comes first"
        write_hyperparams(self._folder, params, self._resumed_step)

    @property
    def _path(self) -> Path:
        assert self._folder is not None, "start() comes first"
        return self._folder / self.file_name

    @abstractmethod
    def _take_over(self, resumed_step: int | None) -> None:
        """Bring what an earlier part of the run wrote, if anything, to where this part goes on."""
