"""What the file loggers share: replacing a file in one move, and the hyperparameters beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO


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


def write_hyperparams(run_dir: Path, params: Mapping[str, Any]) -> None:
    """Write ``hparams.json``; a value JSON has no form for stands there as its ``repr``."""
    with replacing(run_dir / "hparams.json") as file:
        json.dump(dict(params), file, indent=2, default=repr)
        file.write("\n")
