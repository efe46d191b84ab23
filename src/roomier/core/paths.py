"""Check of the paths that users pass."""

import errno
import os
import re

from roomier.core.errors import RoomierError


def protocol_of(path: object) -> str:
    """Return the protocol of an address such as ``"s3://..."``; ``""`` if ``path`` is not an address."""
    if not isinstance(path, (str, os.PathLike)):
        return ""
    slashes = "//" if isinstance(path, str) else "//?"  # Path("s3://a") contains one slash
    found = re.match(rf"([a-zA-Z][a-zA-Z0-9+.-]+):{slashes}", os.fsdecode(path))
    return "" if found is None else found[1].lower()


def check_path(field: str, path: object, kind: type[RoomierError] = RoomierError) -> None:
    """Reject a value that cannot be a path in the file system.

    Args:
        kind: class of the error.

    Raises:
        RoomierError: ``path`` is neither a string nor a Path, contains a NUL byte, is too long for the file system, or
            is an address such as ``"s3://..."``.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise kind(field, path, "is not a path", "Pass a string or a Path")
    text = os.fsdecode(path)
    if protocol := protocol_of(path):
        problem = f"is an address ({protocol}), but this argument accepts only paths in a file system"
        action = "Use a folder and copy finished checkpoints, or mount the storage as a folder"
        raise kind(field, path, problem, action)
    if "\0" in text:
        raise kind(field, path, "contains a NUL byte, which no path can contain", "Remove the NUL byte")
    try:
        os.lstat(os.path.expanduser(path))
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            problem = f"has {len(text)} characters, which is too long for the file system"
            raise kind(field, path, problem, "Pass a shorter path") from None
