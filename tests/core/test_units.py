"""Formatting of quantities, and parsing of durations."""

from datetime import timedelta

import pytest

from roomier import RoomierError
from roomier.core.units import format_bytes, format_count, format_seconds, parse_duration_s


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB"), (5 * 2**40, "5.0 TiB")],
)
def test_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (10_800_000, "10.8 M"), (1500, "1.5 K"), (7e9, "7.0 B"), (2e12, "2.0 T")],
)
def test_counts(count, text):
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("00:00:00:05", 5),
        ("1:02:03:04", 93784),
        (timedelta(minutes=2), 120),
        ({"hours": 1, "minutes": 30}, 5400),
        ({"seconds": 0.5}, 0.5),
    ],
)
def test_durations(value, seconds):
    assert parse_duration_s("max_time", value) == seconds


@pytest.mark.parametrize(
    "value", ["10:00", "1h", 60, {"hour": 1}, {"hours": "1"}, None, "00:00:00:00", timedelta(0), {"days": 10**10}]
)
def test_invalid_durations_are_rejected(value):
    with pytest.raises(RoomierError, match=r"max_time=.*'DD:HH:MM:SS'"):
        parse_duration_s("max_time", value)


def test_durations_are_formatted_in_a_suitable_unit() -> None:
    found = [format_seconds(each) for each in (0.0123, 0.5, 42.0, 300.0, 36_000.0)]
    assert found == ["12.3 ms", "0.5 s", "42 s", "5 min", "10 h"]
