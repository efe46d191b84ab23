"""Storage for measurements of this machine, in one JSON file in the user's cache folder.

A write replaces one section of the file. The file is replaced atomically, so a reader never reads an incomplete file.
If two processes write at the same time, the later write can discard the section that the earlier write stored.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from roomier.core.log import notice
from roomier.core.replacing import replacing
from roomier.core.untrusted import read_json

_VERSION = 1


def cache_file() -> Path:
    """Return the path of the file in the system's cache folder (``XDG_CACHE_HOME``, ``~/Library/Caches`` or
    ``LOCALAPPDATA``)."""
    if sys.platform == "win32":
        folder = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        folder = Path.home() / "Library" / "Caches"
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "roomier" / "hardware.json"


def read(section: str) -> Any:
    """Return the stored value of ``section``; None if the file does not contain the section. If the file cannot be
    read, print a notice and ignore the file."""
    return _read_all().get(section)


def write(section: str, value: Any) -> bool:
    """Set the section ``section`` of the file to ``value``, which must be plain data. If the file cannot be written,
    print a notice and return False."""
    content = {**_read_all(), "version": _VERSION, section: value}
    target = cache_file()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as file:
            json.dump(content, file, indent=1)
    except OSError as error:
        notice(f"{target} cannot be written ({error}), so the next run repeats the measurement")
        return False
    return True


def forget() -> bool:
    """Remove the file, and return whether it existed."""
    target = cache_file()
    is_there = target.exists()
    target.unlink(missing_ok=True)
    return is_there


def _read_all() -> dict[str, Any]:
    path = cache_file()
    try:
        content = read_json(path, parse_constant=float)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        notice(f"{path} cannot be read ({error}) and is ignored; `roomier hardware` rewrites it")
        return {}
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        notice(f"{path} was written by another version of roomier and is ignored; `roomier hardware` rewrites it")
        return {}
    return content
