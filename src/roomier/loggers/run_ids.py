"""Ids and folders of a run's loggers, stored in ``loggers.json`` in the run folder and reused by a resumed run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from roomier.core.replacing import replacing
from roomier.core.untrusted import read_json

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


@dataclass(frozen=True)
class OwnFolder:
    """Folder of a logger outside the run folder: ``<save_dir>/<name>/<version>``.

    Attributes:
        kind: name of the logger.
        save_dir: parent folder.
        name: folder within ``save_dir``; None uses ``save_dir`` itself.
        version: folder within ``name``; a number N selects ``version_N``, and None selects the first free
            ``version_N``.
    """

    kind: str
    save_dir: Path
    name: str | None
    version: int | str | None

    def find(self, run_dir: Path | None) -> Path:
        """Return the folder of the logger for the run in ``run_dir``. A resumed run uses the folder of the saved
        run."""
        if self.version is None:
            known = None if run_dir is None else read_id(run_dir, self._key)
            version = known or _next_version(self._parent)
        else:
            version = f"version_{self.version}" if isinstance(self.version, int) else self.version
        folder = self._parent / version
        if run_dir is not None:
            self.keep(run_dir, folder)
        return folder

    def keep(self, run_dir: Path, folder: Path) -> None:
        """Store the name of ``folder`` in ``run_dir`` for a resumed run."""
        write_id(run_dir, self._key, folder.name)

    @property
    def _parent(self) -> Path:
        return self.save_dir / (self.name or "")

    @property
    def _key(self) -> str:
        return f"{self.kind} {self._parent}"


def _next_version(parent: Path) -> str:
    taken = [
        int(path.name.removeprefix("version_"))
        for path in (parent.iterdir() if parent.is_dir() else ())
        if path.name.startswith("version_") and path.name.removeprefix("version_").isdecimal()
    ]
    return f"version_{max(taken, default=-1) + 1}"
