"""Check of the paths that users pass."""

import os

from roomier.core.errors import RoomierError


def check_path(field: str, path: object, kind: type[RoomierError] = RoomierError) -> None:
    """Reject a value that cannot be a path of the file system.

    Args:
        kind: class of the error.

    Raises:
        RoomierError: ``path`` is neither a string nor a Path, or it contains a NUL byte.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise kind(field, path, "is not a path", "Pass a string or a Path")
    if "\0" in os.fsdecode(path):
        raise kind(field, path, "contains a NUL byte, which no path can contain", "Remove the NUL byte")
