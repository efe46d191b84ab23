"""The argument parser of verbs that take no options of the Trainer."""

from __future__ import annotations

import argparse

from roomier.core.errors import RoomierError


class PlainParser(argparse.ArgumentParser):
    """Parser that raises an error for a wrong option instead of ending the process.

    Raises:
        RoomierError: an option is unknown, missing or wrong.
    """

    def error(self, message: str) -> None:  # type: ignore[override]
        raise RoomierError(self.prog.removeprefix("roomier "), "options", message, f"See `{self.prog} --help`")
