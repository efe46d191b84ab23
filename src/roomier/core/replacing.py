"""Replace a file atomically."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Yield a temporary text file that replaces ``path`` if the block ends without an error.

    If the process is killed, ``path`` contains either the complete old file or the complete new file.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.aside")
    try:
        with aside.open("x", encoding="utf-8", newline="") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
