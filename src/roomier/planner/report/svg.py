"""Drawings of the planner's page, as SVG without text elements. Labels are HTML text, so they remain readable on a
narrow screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from roomier.core.units import format_bytes
from roomier.planner.dry_runs.dry_run import Interval
from roomier.planner.measured.record import moment_text
from roomier.planner.memory.kinds import Kind, total_bytes
from roomier.planner.report.style import COLOURS, NAMES

_WIDTH, _HEIGHT = 1000, 1000  # coordinates of a drawing, which is stretched to the available space
MAX_INTERVALS = 300  # largest number of intervals that are drawn separately
FIXED = "url(#roomier-fixed)"  # fill of fixed bytes
_HATCH = (
    '<pattern id="roomier-fixed" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="currentColor" fill-opacity=".14"/>'
    '<rect width="2" height="6" fill="currentColor" fill-opacity=".5"/></pattern>'
)

Segments = Sequence[tuple[str, int, str]]
"""Segments of a bar: name, bytes and color."""


def joined(timeline: Sequence[Interval], limit: int = MAX_INTERVALS) -> list[Interval]:
    """Merge neighboring intervals of ``timeline`` until about ``limit`` intervals remain.

    Only intervals of the same phase are merged. A merged interval has the highest peak of its parts.
    """
    size = -(-len(timeline) // limit)
    if size <= 1:
        return list(timeline)
    found: list[Interval] = []
    group: list[Interval] = []
    for each in timeline:
        if group and (len(group) == size or each.phase != group[0].phase):
            found.append(_as_one(group))
            group = []
        group.append(each)
    return [*found, _as_one(group)]


def _as_one(group: Sequence[Interval]) -> Interval:
    top = max(group, key=lambda each: each.peak_bytes)
    return Interval(top.phase, top.place, group[0].begin, top.peak, group[-1].end)


def phases_of(timeline: Sequence[Interval]) -> list[tuple[str, float, float]]:
    """Return the phases of the step, with the start and end of each phase as fractions of the width."""
    found: list[tuple[str, float, float]] = []
    for index, each in enumerate(timeline):
        begin, end = index / len(timeline), (index + 1) / len(timeline)
        if found and found[-1][0] == each.phase:
            found[-1] = (each.phase, found[-1][1], end)
        else:
            found.append((each.phase, begin, end))
    return found


def areas(
    timeline: Sequence[Interval], fixed_bytes: int, top_bytes: float, title: str, *, measured: Sequence[Interval] = ()
) -> str:
    """Return a stacked area chart of ``timeline``.

    Args:
        timeline: intervals to draw.
        fixed_bytes: constant bytes at the bottom.
        top_bytes: bytes that correspond to the full height.
        title: description of the drawing for screen readers.
        measured: another timeline of the same step, whose total is drawn as a line.
    """
    moments = _moments(timeline)
    paths = []
    below = [float(fixed_bytes)] * len(moments)
    if fixed_bytes:
        paths.append(_path(moments, [0.0] * len(moments), below, top_bytes, FIXED))
    for kind, colour in COLOURS.items():
        above = [low + moment[1].get(kind, 0) for low, moment in zip(below, moments, strict=True)]
        if above != below:
            paths.append(_path(moments, below, above, top_bytes, colour))
        below = above
    lines = _phase_lines(timeline)
    line = _line(_moments(measured), fixed_bytes, top_bytes) if measured else ""
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title><desc>{escape(_described(timeline, fixed_bytes))}</desc>"
        f"{''.join(paths)}{lines}{line}{_hints(timeline, fixed_bytes)}</svg>"
    )


def bar(segments: Segments, top_bytes: float, marks: Sequence[tuple[float, str]], title: str) -> str:
    """Return one bar of the chart of strategies. A bar longer than ``top_bytes`` is truncated, and a gap in the bar
    indicates the truncation.

    Args:
        segments: parts of the bar.
        top_bytes: bytes that correspond to the full width.
        marks: bytes and color of each vertical line.
        title: description of the drawing for screen readers.
    """
    parts: list[str] = []
    begin = 0.0
    for name, num_bytes, colour in segments:
        width = max(min(num_bytes, top_bytes - begin), 0.0)
        if width > 0:
            hint = escape(f"{name}: {format_bytes(num_bytes)}")
            parts.append(
                f'<rect x="{begin / top_bytes * _WIDTH:.1f}" y="140" width="{width / top_bytes * _WIDTH:.1f}" '
                f'height="720" fill="{colour}"><title>{hint}</title></rect>'
            )
        begin += num_bytes
    if begin > top_bytes:
        parts.append(
            '<path d="M955 1000L967 0M970 1000L982 0" stroke="var(--ground)" stroke-width="3" fill="none" '
            'vector-effect="non-scaling-stroke"/>'
        )
    for mark_bytes, colour in marks:
        if 0 < mark_bytes <= top_bytes:
            x = min(mark_bytes / top_bytes * _WIDTH, _WIDTH - 1)
            parts.append(
                f'<path d="M{x:.1f} 0V{_HEIGHT}" stroke="{colour}" stroke-width="1.5" vector-effect='
                '"non-scaling-stroke"/>'
            )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def definitions() -> str:
    """Return the invisible SVG definitions that all drawings of a page use. Place the result before the drawings."""
    return (
        '<svg width="0" height="0" style="position:absolute" aria-hidden="true" focusable="false">'
        f"<defs>{_HATCH}</defs></svg>"
    )


def swatch(colour: str) -> str:
    """Return the square symbol of a legend entry."""
    return f'<svg viewBox="0 0 12 12" aria-hidden="true"><rect width="12" height="12" fill="{colour}"/></svg>'


def line_swatch() -> str:
    """Return the legend symbol of the measured line."""
    path = '<path d="M0 6H12" stroke="currentColor" stroke-width="2" stroke-dasharray="4 2"/>'
    return f'<svg viewBox="0 0 12 12" aria-hidden="true">{path}</svg>'


def round_ticks(top_bytes: float, num_most: int = 5) -> list[tuple[int, str]]:
    """Return 0 and at most ``num_most`` round numbers of bytes up to ``top_bytes``, each with its label."""
    unit_bytes, unit = 1, "B"
    for name in ("KiB", "MiB", "GiB", "TiB"):
        if unit_bytes * 1024 <= top_bytes:
            unit_bytes, unit = unit_bytes * 1024, name
    steps = (factor / 10 for factor in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000))
    step = next((each for each in steps if top_bytes / unit_bytes / each <= num_most), top_bytes / unit_bytes)
    numbers = [index * step for index in range(int(top_bytes / unit_bytes / step) + 1)]
    return [(round(number * unit_bytes), f"{number:.4g}\u00a0{unit}" if number else "0") for number in numbers]


def _moments(timeline: Sequence[Interval]) -> list[tuple[float, Mapping[Kind, int]]]:
    """Return three moments of each interval, with the position as a fraction of the width and the bytes by kind."""
    width = 1 / max(len(timeline), 1)
    found: list[tuple[float, Mapping[Kind, int]]] = []
    for index, each in enumerate(timeline):
        found += [(index * width, each.begin), ((index + 0.5) * width, each.peak), ((index + 1) * width, each.end)]
    return found


def _path(
    moments: Sequence[tuple[float, Mapping[Kind, int]]],
    below: Sequence[float],
    above: Sequence[float],
    top_bytes: float,
    fill: str,
) -> str:
    xs = [moment[0] for moment in moments]
    upper = [_point(x, y, top_bytes) for x, y in zip(xs, above, strict=True)]
    lower = [_point(x, y, top_bytes) for x, y in zip(xs, below, strict=True)]
    return (
        f'<path d="M{"L".join([*upper, *reversed(lower)])}Z" fill="{fill}" stroke="var(--ground)" stroke-width=".6" '
        'stroke-linejoin="round" vector-effect="non-scaling-stroke"/>'
    )


def _line(moments: Sequence[tuple[float, Mapping[Kind, int]]], fixed_bytes: int, top_bytes: float) -> str:
    points = [_point(x, fixed_bytes + total_bytes(held), top_bytes) for x, held in moments]
    path = f'd="M{"L".join(points)}" fill="none" stroke-linejoin="round" vector-effect="non-scaling-stroke"'
    return (
        f'<path {path} stroke="var(--ground)" stroke-width="4" stroke-opacity=".7"/>'
        f'<path {path} stroke="currentColor" stroke-width="1.8" stroke-dasharray="6 3"/>'
    )


def _point(x: float, y_bytes: float, top_bytes: float) -> str:
    height = min(max(y_bytes / top_bytes, 0.0), 1.0)
    return f"{x * _WIDTH:.1f} {(1 - height) * _HEIGHT:.1f}"


def _phase_lines(timeline: Sequence[Interval]) -> str:
    path = "".join(f"M{begin * _WIDTH:.1f} 0V{_HEIGHT}" for _, begin, _ in phases_of(timeline)[1:])
    return (
        f'<path d="{path}" stroke="currentColor" stroke-opacity=".35" stroke-dasharray="2 3" '
        'vector-effect="non-scaling-stroke"/>'
        if path
        else ""
    )


def _hints(timeline: Sequence[Interval], fixed_bytes: int) -> str:
    """Return the tooltip of each interval."""
    width = _WIDTH / max(len(timeline), 1)
    found = []
    for index, each in enumerate(timeline):
        kinds = [f"{NAMES[kind]}: {format_bytes(each.peak[kind])}" for kind in COLOURS if each.peak.get(kind)]
        fixed = [f"fixed memory: {format_bytes(fixed_bytes)}"] if fixed_bytes else []
        text = "\n".join(
            [f"{moment_text(each.phase, each.place)}: {format_bytes(each.peak_bytes + fixed_bytes)}", *kinds, *fixed]
        )
        found.append(
            f'<rect x="{index * width:.1f}" y="0" width="{width:.1f}" height="{_HEIGHT}" fill="transparent">'
            f"<title>{escape(text)}</title></rect>"
        )
    return "".join(found)


def _described(timeline: Sequence[Interval], fixed_bytes: int) -> str:
    """Return a text alternative for the drawing, with one clause for each phase."""
    found = []
    for phase in dict.fromkeys(each.phase for each in timeline):
        top = max((each for each in timeline if each.phase == phase), key=lambda each: each.peak_bytes)
        found.append(
            f"{phase}: at most {format_bytes(top.peak_bytes + fixed_bytes)}, at {moment_text(phase, top.place)}"
        )
    return "; ".join(found)
