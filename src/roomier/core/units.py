"""Format quantities as text, and parse sizes and durations."""

import re
from datetime import timedelta

from roomier.core.errors import RoomierError


def format_bytes(num_bytes: float, num_digits: int = 1) -> str:
    """Format a number of bytes with ``num_digits`` decimals: ``1536`` becomes ``"1.5 KiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.{num_digits}f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.{num_digits}f} TiB"


def format_count(count: float) -> str:
    """Format a count: ``10_800_000`` becomes ``"10.8 M"``."""
    for unit in ("", " K", " M", " B"):
        if abs(count) < 1000:
            return f"{count:.0f}" if unit == "" else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f} T"


def format_seconds(duration_s: float) -> str:
    """Format a duration: ``0.0123`` becomes ``"12.3 ms"``. Durations of at least 100 s are formatted in minutes, and
    durations of at least 100 min in hours."""
    if duration_s < 0.1:
        return f"{duration_s * 1000:.3g} ms"
    for unit, length_s in (("s", 1), ("min", 60)):
        if duration_s < 100 * length_s:
            return f"{duration_s / length_s:.3g} {unit}"
    return f"{duration_s / 3600:.3g} h"


_SIZE = re.compile(r"\s*(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[A-Za-z]*)\s*")
_UNIT_BYTES: dict[str, int] = {
    "b": 1,
    **{f"{prefix}{end}": 1024**power for power, prefix in enumerate("kmgt", start=1) for end in ("ib", "i")},
    **{f"{prefix}{end}": 1000**power for power, prefix in enumerate("kmgt", start=1) for end in ("b", "")},
}


def parse_bytes(field: str, text: str) -> int:
    """Parse a size: ``"6GiB"`` becomes 6442450944, and ``"6 GB"`` becomes 6000000000. The default unit is bytes.

    Raises:
        RoomierError: ``text`` is not a number, optionally followed by a unit of bytes.
    """
    action = "Use a number and a unit, such as '6GiB' or '500MB'"
    found = _SIZE.fullmatch(text)
    unit_bytes = None if found is None else _UNIT_BYTES.get(found["unit"].lower() or "b")
    if found is None or unit_bytes is None:
        raise RoomierError(field, text, "is not a number of bytes", action)
    return round(float(found["number"]) * unit_bytes)


def parse_duration_s(field: str, value: object, *, may_be_zero: bool = False) -> float:
    """Convert a ``timedelta``, a dict of its keywords, or Lightning's ``"DD:HH:MM:SS"`` to seconds.

    Raises:
        RoomierError: ``value`` has an unsupported form, is negative, or is 0 and ``may_be_zero`` is False.
    """
    action = "Use 'DD:HH:MM:SS', a datetime.timedelta, or a dict of its keywords, such as {'hours': 1}"
    try:
        if isinstance(value, timedelta):
            seconds = value.total_seconds()
        elif isinstance(value, dict):
            seconds = timedelta(**value).total_seconds()
        elif isinstance(value, str):
            days, hours, minutes, rest = (int(part) for part in value.strip().split(":"))
            seconds = timedelta(days=days, hours=hours, minutes=minutes, seconds=rest).total_seconds()
        else:
            raise TypeError(type(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise RoomierError(field, value, "is not a duration", action) from error
    if seconds < 0 or (seconds == 0 and not may_be_zero):
        raise RoomierError(field, value, "must not be negative" if may_be_zero else "must be positive", action)
    return seconds
