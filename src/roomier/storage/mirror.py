"""Local folders that mirror remote run folders.

[Note: mirrors]
A run with remote storage works in a local folder, the mirror, whose path is derived from the address. All code that
writes files and commits checkpoints therefore handles remote runs as local runs, and a thread copies the files to the
storage (:mod:`roomier.checkpoint.uploads`). The mirror of ``s3://bucket/runs`` is ``<cache>/remote/s3/bucket/runs``.
"""

import os
from pathlib import Path

from roomier.storage.remote_path import RemotePath

ENVIRONMENT_VARIABLE = "ROOMIER_CACHE"


def cache_folder() -> Path:
    """Return the cache folder of roomier: ``$ROOMIER_CACHE``, or ``roomier`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    chosen = os.environ.get(ENVIRONMENT_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "roomier"


def local_of(path: Path) -> Path:
    """Return the mirror of a remote path, or a local path unchanged."""
    if not isinstance(path, RemotePath):
        return path
    protocol, _, rest = str(path).partition("://")
    return cache_folder() / "remote" / protocol / rest


def remote_of(path: str | Path) -> RemotePath | None:
    """Return the remote path whose mirror is ``path``, or None if ``path`` is not in a mirror."""
    if isinstance(path, RemotePath):
        return path
    folder = cache_folder() / "remote"
    absolute = Path(os.path.abspath(path))
    if not absolute.is_relative_to(folder) or len(absolute.relative_to(folder).parts) < 2:
        return None
    protocol, *names = absolute.relative_to(folder).parts
    return RemotePath(f"{protocol}://{'/'.join(names)}")


def shown(path: str | Path) -> str:
    """Return the address of ``path`` if it is in a mirror, otherwise ``path``."""
    return str((remote_of(path) if os.fspath(path) else None) or path)
