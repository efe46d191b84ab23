"""Numbers as people read them, and durations as people write them."""

from datetime import timedelta

from roomier.core.errors import RoomierError


def format_bytes(num_bytes: float) -> str:
    """``1536`` -> ``"1.5 KiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def format_count(count: float) -> str:
    """``10_800_000`` -> ``"10.8 M"``."""
    for unit in ("", " K", " M", " B"):
        if abs(count) < 1000:
            return f"{count:.0f}" if unit == "" else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f} T"


def parse_duration_s(field: str, value: object) -> float:
    """Seconds of a ``timedelta``, its keywords as a dict, or Lightning's ``"DD:HH:MM:SS"``.

    Raises:
        RoomierError: the value has another form or is not positive.
    """
    action = "Write 'DD:HH:MM:SS', a datetime.timedelta, or its keywords such as {'hours': 1}"
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
    except (TypeError, ValueError) as error:
        raise RoomierError(field, value, "is not a duration", action) from error
    if seconds <= 0:
        raise RoomierError(field, value, "is not positive", action)
    return seconds
