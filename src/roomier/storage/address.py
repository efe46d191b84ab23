"""Addresses in remote storage, such as ``"s3://bucket/runs"``, and the file systems that they belong to.

An address is a string. ``pathlib`` would change ``s3://bucket`` to ``s3:/bucket``, so call :func:`located` before a
value from a user becomes a Path.
"""

import os
import posixpath
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from roomier.core.errors import RoomierError, did_you_mean
from roomier.core.paths import protocol_of

_EXTRAS = {"s3": "s3", "gs": "gcs", "memory": "", "file": ""}
"""The supported protocols, and the extra of roomier that installs the package of each protocol."""


def is_remote(path: object) -> bool:
    """Return True if ``path`` is an address, except for ``file://``."""
    return protocol_of(path) not in ("", "file")


def located(field: str, path: str | os.PathLike[str], kind: type[RoomierError] = RoomierError) -> Path | str:
    """Return an address without superfluous slashes, or any other path, including ``file://``, as a Path.

    Args:
        kind: class of the error.

    Raises:
        RoomierError: the protocol of the address is unknown, or the address has no bucket.
    """
    protocol, text = protocol_of(path), os.fspath(path)
    if not protocol:
        return Path(text)
    if protocol not in _EXTRAS:
        known = {f"{each}://": None for each in _EXTRAS}
        problem = "is an address with a protocol that roomier does not support"
        raise kind(field, text, problem, did_you_mean(f"{protocol}://", known))
    rest = text.partition(":")[2].lstrip("/")
    if protocol == "file":
        return Path("/" + unquote(rest.removeprefix("localhost/")))
    rest = posixpath.normpath(rest)
    if rest == "." or rest.startswith(".."):
        raise kind(field, text, "is an address without a bucket", f"Pass an address such as '{protocol}://bucket/runs'")
    return f"{protocol}://{rest}"


def filesystem(address: str, field: str = "path", kind: type[RoomierError] = RoomierError) -> tuple[Any, str]:
    """Return fsspec's file system of ``address``, without a cache of listings, and the path in it.

    Args:
        field: argument that the address was passed to, for the error message.
        kind: class of the error.

    Raises:
        RoomierError: the address is invalid, or the package of the protocol is not installed.
    """
    import fsspec  # type: ignore[import-untyped]  # late import: only remote storage needs it

    address = os.fspath(located(field, address, kind))
    protocol = protocol_of(address)
    try:
        system = fsspec.filesystem(protocol or "file", use_listings_cache=False)
    except ImportError as error:
        problem = f"requires a package that is not installed ({error.name or error})"
        raise kind(field, address, problem, f"Run: pip install 'roomier[{_EXTRAS[protocol]}]'") from error
    return system, system._strip_protocol(address)
