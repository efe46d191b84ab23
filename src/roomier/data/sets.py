"""Conversion of a set of batches or loaders to a list."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from roomier.core.errors import DataError
from roomier.core.log import notice
from roomier.core.ranks import Ranks


def list_of_set(loaders: Set[Any], name: str, ranks: Ranks) -> list[Any]:
    """Return the batches or loaders of a set as a list, and print a notice that the order of a set is not defined.

    Raises:
        DataError: several ranks share the data, and the order can differ between ranks.
    """
    action = "Pass a list"
    if not ranks.is_alone:
        raise DataError(name, loaders, "is a set, whose order can differ between ranks", action)
    notice(f"{name}: the order of a set is not defined, so a resumed run can read different batches. {action}")
    return list(loaders)
