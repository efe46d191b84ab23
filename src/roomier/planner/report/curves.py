"""Geometry of the charts that compare runs: one chart for each metric, with one line for each run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from roomier.core.units import format_bytes, format_count
from roomier.planner.report.run_log import RATES, RunLog, drawable, metrics_of

_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#a8a8a8")  # of Paul Tol, as in page.py
_DASHES = ("none", "7 3", "2 3", "9 3 2 3")
_SIDE = 1000  # width and height of a drawing, which is stretched to the available space
_NUM_POINTS = 240  # maximum number of groups of points in a line
_NUM_CHARTS = 48
_LOG_RATIO = 200.0  # ratio of the largest to the smallest value above which the scale is logarithmic


def comparison(logs: Sequence[RunLog]) -> dict[str, Any]:
    """Return the arguments of the macro ``comparison``."""
    metrics = metrics_of(logs)
    return {
        "charts": [_chart(logs, metric) for metric in metrics[:_NUM_CHARTS]],
        "omitted": metrics[_NUM_CHARTS:],
        "styles": {log.name: style_of(index) for index, log in enumerate(logs)},
        "speed": next((name for name in ("tokens_per_s", "samples_per_s") if name in metrics), None),
        "columns": [name for name in metrics if name not in RATES][:3],
    }


def style_of(index: int) -> tuple[str, str]:
    """Return the color and the dashes of the run at ``index``."""
    return _COLOURS[index % len(_COLOURS)], _DASHES[index // len(_COLOURS) % len(_DASHES)]


def value_text(metric: str, value: float | None, num_digits: int = 4) -> str:
    """Format a value of ``metric``; empty if it is None."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(value)
    if metric.endswith("bytes") or "bytes." in metric or metric.startswith("anatomy/"):
        return format_bytes(value)
    if 1e4 <= abs(value) < 1e15:
        return format_count(value)
    return f"{value:.{num_digits}g}"


def _chart(logs: Sequence[RunLog], metric: str) -> dict[str, Any]:
    curves = {index: sorted(log.curves[metric].items()) for index, log in enumerate(logs) if metric in log.curves}
    values = [value for curve in curves.values() for _, value in curve if drawable(value)]
    low, high = min(values, default=0.0), max(values, default=1.0)
    is_log = low > 0 and high / low > _LOG_RATIO
    scale: Callable[[float], float] = math.log10 if is_log else float
    bottom, top = scale(low), scale(high)
    margin = 0.04 * (top - bottom) or 0.04 * abs(top) or 1.0
    bottom, top = bottom - margin, top + margin
    first = min(step for curve in curves.values() for step, _ in curve)
    last = max(step for curve in curves.values() for step, _ in curve)

    def place(step: int, value: float) -> str:
        x = (step - first) / (last - first) if last > first else 0.5
        return f"{x * _SIDE:.1f} {(1 - (scale(value) - bottom) / (top - bottom)) * _SIDE:.1f}"

    ticks = _powers(low, high) if is_log else round_values(bottom, top)
    return {
        "metric": metric,
        "is_log": is_log,
        "lines": [
            (*style_of(index), logs[index].name, value_text(metric, curve[-1][1]), _path(thinned(curve), place))
            for index, curve in curves.items()
        ],
        "ticks": [
            (f"{(scale(each) - bottom) / (top - bottom):.2%}", value_text(metric, each, 6).replace(" ", "\u00a0"))
            for each in ticks
        ],
        "first": first,
        "last": last,
    }


def thinned(curve: Sequence[tuple[int, float]], limit: int = _NUM_POINTS) -> list[tuple[int, float]]:
    """Downsample the points to about ``limit`` groups, and return the smallest and the largest value of each group, so
    that spikes remain visible, and one value that cannot be drawn if the group contains any, so that gaps do, too."""
    if len(curve) <= 2 * limit:
        return list(curve)
    size, found = -(-len(curve) // limit), []
    for start in range(0, len(curve), size):
        group = curve[start : start + size]
        shown = [point for point in group if drawable(point[1])]
        kept = {min(shown, key=lambda point: point[1]), max(shown, key=lambda point: point[1])} if shown else set()
        kept |= set(next(([point] for point in group if not drawable(point[1])), []))
        found += sorted(kept, key=lambda point: point[0])
    return found


def _path(curve: Sequence[tuple[int, float]], place: Callable[[int, float], str]) -> str:
    """Return a path with a gap at each value that cannot be drawn. A single point between two gaps becomes a dot."""
    parts, command = [], "M"
    for step, value in curve:
        if drawable(value):
            parts.append(f"{command}{place(step, value)}{'h0' if command == 'M' else ''}")
        command = "L" if drawable(value) else "M"
    return "".join(parts)


def _powers(low: float, high: float) -> Iterator[float]:
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    yield from (10.0**power for power in range(first, last + 1, -(-(last - first + 1) // 5)))


def round_values(low: float, high: float, num_most: int = 5) -> Iterator[float]:
    """Yield round numbers between ``low`` and ``high`` at equal distances, with at most ``num_most`` distances."""
    span = high - low
    unit = 10.0 ** math.floor(math.log10(span / num_most))
    step = next((unit * factor for factor in (1, 2, 5, 10) if span / (unit * factor) <= num_most), unit * 10)
    yield from (index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1))
