"""Argument parser of the verbs that have no Trainer options."""

from __future__ import annotations

import argparse
from typing import Any

from roomier.core.errors import RoomierError


class PlainParser(argparse.ArgumentParser):
    """Parser that raises an error for an invalid option instead of exiting.

    Raises:
        RoomierError: an option is unknown, missing or invalid.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> None:  # type: ignore[override]
        """Raise an error with ``message``."""
        raise RoomierError(self.prog.removeprefix("roomier "), "options", message, f"See `{self.prog} --help`")
