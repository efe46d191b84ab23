"""What was measured of this machine, kept from one process to the next: one JSON file in the user's cache folder.

Sections are replaced whole. The file is written aside and renamed, so that a reader never sees half of it; of two
processes that write at once, the later one wins.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from roomier.core.log import notice

_VERSION = 1


def cache_file() -> Path:
    """Where the user's system keeps such files: ``XDG_CACHE_HOME``, ``~/Library/Caches`` or ``LOCALAPPDATA``."""
    if sys.platform == "win32":
        folder = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        folder = Path.home() / "Library" / "Caches"
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "roomier" / "hardware.json"


def read(section: str) -> Any:
    """What was written as ``section``; None without it. A file that cannot be read is told and taken for none."""
    return _read_all().get(section)


def write(section: str, value: Any) -> bool:
    """Keep ``value``, plain data, as ``section``. Returns whether that worked; where it did not, the user is told."""
    content = {**_read_all(), "version": _VERSION, section: value}
    target = cache_file()
    aside = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=target.parent, prefix=".hardware-", delete=False) as file:
            aside = Path(file.name)
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(target)
    except OSError as error:
        if aside is not None:
            aside.unlink(missing_ok=True)
        notice(f"{target} cannot be written ({error}): what was measured will be measured again")
        return False
    return True


def forget() -> bool:
    """Remove the file. Returns whether there was one."""
    target = cache_file()
    is_there = target.exists()
    target.unlink(missing_ok=True)
    return is_there


def _read_all() -> dict[str, Any]:
    path = cache_file()
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        notice(f"{path} cannot be read ({error}) and is ignored; `roomier hardware` writes it anew")
        return {}
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        notice(f"{path} was not written by this version of roomier and is ignored; `roomier hardware` writes it anew")
        return {}
    return content
