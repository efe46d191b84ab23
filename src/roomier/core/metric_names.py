"""Checks of metric names. roomier writes these names unchanged to terminals, files and services."""

import unicodedata

from roomier.core.errors import RoomierError

_REJECTED = ("Cc", "Cs", "Zl", "Zp")  # Unicode categories of control characters, surrogates and line separators.


def check_metric_name(field: str, name: str) -> None:
    """Reject a name that could move the cursor of a terminal or end a line in a file.

    Raises:
        RoomierError: ``name`` contains a control character, a line separator or a lone surrogate.
    """
    if not name.isprintable() and any(unicodedata.category(each) in _REJECTED for each in name):
        raise RoomierError(field, name, "the name contains control characters", "Use printable characters only")


def printable(name: str) -> str:
    """Return ``name``, or its ASCII escapes if ``name`` contains a character that is not printable."""
    return name if name.isprintable() else name.encode("unicode_escape").decode()
