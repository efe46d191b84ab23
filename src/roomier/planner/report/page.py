"""HTML page of the planner's result and of runs: a self-contained file without scripts or network access, which is
readable on a phone.

``page.html`` and ``curves.html`` are Jinja templates of the text, and ``page.css`` contains the style. This module and
``curves.py`` compute the geometry.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import groupby
from operator import add
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from roomier.core.units import format_bytes, format_seconds
from roomier.planner.choice import Choice, Considered, tiers_text, words_of
from roomier.planner.choosing.candidates import STAGES
from roomier.planner.forecast import Forecast
from roomier.planner.measured.record import ForecastRecord, moment_text
from roomier.planner.memory.kinds import NAMES, Interval, Kind
from roomier.planner.report.curves import comparison, round_values, value_text
from roomier.planner.report.run_log import RunLog, differences
from roomier.planner.report.what_if import Grid

# Paul Tol's "bright" scheme, which is distinguishable with any kind of color vision: https://personal.sron.nl/~pault/
# (issue 3.2, figure 1), with gray darkened for a light background. Memory in addition to tensors has a hatch pattern in
# the color of the text.
COLOURS = {
    Kind.PARAMETER: "#4477aa",
    Kind.OPTIMIZER_STATE: "#228833",
    Kind.GRADIENT: "#ccbb44",
    Kind.GATHERED: "#66ccee",
    Kind.ACTIVATION: "#ee6677",
    Kind.COMMUNICATION: "#aa3377",
    Kind.TEMPORARY: "#a8a8a8",
}
"""Colors by kind, in stacking order, starting with the kinds of memory that exist during the full step."""

_FIXED = "url(#roomier-fixed)"  # fill for memory in addition to tensors
_SIDE = 1000  # width and height of a drawing, which is stretched to the available space
_NUM_INTERVALS = 300  # maximum number of intervals that are drawn separately
_NUM_PLANS, _NUM_REASONS = 14, 8  # maximum numbers of rows in the table of plans
_MOST_OF_BUDGET = 2.5  # multiple of the budget at which bars are truncated
_NARROW_PHASE = 0.09  # fraction of the width below which the name of a phase is omitted


def page_of(
    choice: Choice,
    what_if: Grid | None = None,
    record: ForecastRecord | None = None,
    *,
    title: str = "",
    subject: str = "",
) -> str:
    """Return the HTML page of ``choice``.

    Args:
        choice: result of the planner.
        what_if: peaks for other batch sizes and sequence lengths; None omits their table.
        record: measured run of the chosen plan, which is overlaid on the forecast.
        title: title of the page; the default is the chosen plan.
        subject: subtitle, such as the model; the default is the machine.
    """
    chosen = choice.chosen
    name = "No plan fits" if chosen is None else words_of(chosen.plan, chosen.micro_batch)
    method = (
        "Plans are compared with a memory formula. The chosen plan is verified by a dry run, which executes the code "
        "of the run on tensors without memory."
    )
    more = {"Method": method}
    if chosen is not None and chosen.fixed_bytes:
        more["Fixed memory"] = ", ".join(f"{use} {format_bytes(count)}" for use, count in chosen.fixed_bytes.items())
    if chosen is not None and (used := tiers_text(chosen)):
        more["Offload"] = used
    return _render(
        title=title or f"roomier plan: {name}",
        heading_text=title or name,
        subject=subject,
        choice=choice,
        grid=what_if,
        record=record,
        machine=choice.machine,
        more=more,
    )


def page_of_record(
    record: ForecastRecord,
    facts: Mapping[str, str] | None = None,
    *,
    logs: Sequence[RunLog] = (),
) -> str:
    """Return the HTML page that compares a run with its forecast.

    Args:
        record: forecast and measurements of the run.
        facts: additional facts about the run, by name.
        logs: the log of the run, whose metrics are plotted.
    """
    forecast = record.forecast
    name = words_of(forecast.plan, forecast.micro_batch)
    is_allocator = record.worst.allocator_bytes is not None
    by = "CUDA's allocator, and kinds by a tracker" if is_allocator else "a tracker of all tensors"
    more = {**(facts or {}), "Measured": " ".join([f"In step {record.step}, by {by}.", *record.notes])}
    return _render(
        title=f"roomier report: {name}",
        heading_text=name,
        subject="",
        record=record,
        machine=forecast.machine,
        more=more,
        logs=logs,
    )


def page_of_runs(logs: Sequence[RunLog]) -> str:
    """Return the HTML page that compares the metrics, throughput, memory and different settings of runs."""
    heading = logs[0].name if len(logs) == 1 else f"{len(logs)} runs"
    return _render(title=f"roomier report: {heading}", heading_text=heading, subject="", logs=logs)


def fragment_of(shown: Choice | Forecast) -> str:
    """Return a short form of the page for a notebook."""
    if isinstance(shown, Choice):
        return _render(is_fragment=True, choice=shown)
    return _render(is_fragment=True, forecast=shown, heading_text=words_of(shown.plan, shown.micro_batch))


def show_in_notebook() -> None:
    """Make IPython display choices and forecasts as HTML. Outside IPython, this function does nothing."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None:
        for kind in (Choice, Forecast):
            shell.display_formatter.formatters["text/html"].for_type(kind, fragment_of)


def joined(timeline: Sequence[Interval], limit: int = _NUM_INTERVALS) -> list[Interval]:
    """Merge neighboring intervals of ``timeline`` until about ``limit`` intervals remain.

    Only intervals of the same phase are merged. The peak of a merged interval is the highest peak of its parts.
    """
    size = max(-(-len(timeline) // limit), 1)
    found = []
    for _, phase in groupby(timeline, key=lambda each: each.phase):
        intervals = list(phase)
        for start in range(0, len(intervals), size):
            group = intervals[start : start + size]
            top = max(group, key=lambda each: each.peak_bytes)
            found.append(Interval(top.phase, top.place, group[0].begin, top.peak, group[-1].end))
    return found


def phases_of(timeline: Sequence[Interval]) -> list[tuple[str, float, float]]:
    """Return the phases of the step, with the start and end of each phase as fractions of the width."""
    found, begin = [], 0
    for phase, intervals in groupby(timeline, key=lambda each: each.phase):
        end = begin + sum(1 for _ in intervals)
        found.append((phase, begin / len(timeline), end / len(timeline)))
        begin = end
    return found


def round_ticks(top_bytes: float) -> list[tuple[int, str]]:
    """Return 0 and at most five round numbers of bytes up to ``top_bytes``, each with its label."""
    unit_bytes, unit = 1, "B"
    for name in ("KiB", "MiB", "GiB", "TiB"):
        if unit_bytes * 1024 <= top_bytes:
            unit_bytes, unit = unit_bytes * 1024, name
    numbers = round_values(0.0, top_bytes / unit_bytes)
    return [(round(number * unit_bytes), f"{number:.4g}\u00a0{unit}" if number else "0") for number in numbers]


def _render(**values: Any) -> str:
    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    functions = (format_seconds, moment_text, value_text, words_of)
    environment.globals |= {each.__name__: each for each in functions} | {
        "COLOURS": COLOURS,
        "FIXED": _FIXED,
        "NAMES": NAMES,
        "chart_of": _chart,
        "comparison_of": comparison,
        "differences_of": differences,
        "ladder_of": _ladder,
        "plans_of": _plans,
        "largest_kinds": lambda forecast: [
            each for each in sorted(forecast.bytes_by_kind.items(), key=lambda each: -each[1])[:2] if each[1]
        ],
        "percent": lambda share: f"{share:.0%}".replace("%", " %"),
        "seconds": _seconds_text,
        "size": lambda num_bytes, num_digits=1: format_bytes(num_bytes, num_digits).replace(" ", "\u00a0"),
    }
    defaults = dict.fromkeys(("choice", "record", "grid", "is_fragment", "logs", "machine"))
    return environment.get_template("page.html").render({**defaults, "version": version("roomier"), **values})


# ---- geometry of the drawings ----------------------------------------------------------------------------------------


def _chart(forecast: Forecast, record: ForecastRecord | None, budget_bytes: int | None) -> dict[str, Any]:
    """Return the arguments of the macro ``chart``. Positions are percentages of the width or height of the drawing."""
    fixed_bytes = 0 if record is not None else sum(forecast.fixed_bytes.values())
    drawn = joined(forecast.timeline)
    measured = [] if record is None else joined(record.worst.timeline)
    highest = max([forecast.tensor_bytes + fixed_bytes, *(each.peak_bytes for each in measured)])
    shown_bytes = budget_bytes if budget_bytes is not None and budget_bytes <= 1.6 * highest else 0
    top_bytes = max(highest, shown_bytes, 1) * 1.04
    at = max(range(len(drawn)), key=lambda index: drawn[index].peak_bytes)
    share, peak = (at + 0.5) / len(drawn), drawn[at]
    phases = phases_of(drawn)
    tops: dict[str, Interval] = {}
    for each in drawn:
        if each.phase not in tops or each.peak_bytes > tops[each.phase].peak_bytes:
            tops[each.phase] = each
    width = _SIDE / len(drawn)
    positions, levels = _moments(drawn)
    return {
        "fixed_bytes": fixed_bytes,
        "peak": peak,
        "peak_bytes": forecast.tensor_bytes + fixed_bytes,
        "at": f"{share:.2%}",
        "side": f"margin-left:{share:.2%}" if share <= 0.5 else f"margin-right:{1 - share:.2%};text-align:right",
        "areas": list(_areas(positions, levels, fixed_bytes, top_bytes)),
        "borders": "".join(f"M{begin * _SIDE:.1f} 0V{_SIDE}" for _, begin, _ in phases[1:]),
        "line": measured and "M" + _line(*_moments(measured), top_bytes, fixed_bytes),
        "hints": [
            (f"{index * width:.1f}", f"{width:.1f}", _hint(each, fixed_bytes)) for index, each in enumerate(drawn)
        ],
        "ticks": [(f"{tick / top_bytes:.2%}", label) for tick, label in round_ticks(top_bytes)],
        "limit": shown_bytes and f"{shown_bytes / top_bytes:.2%}",
        "phases": [
            (phase, f"{begin:.2%}", f"{end - begin:.2%}")
            for phase, begin, end in phases
            if end - begin >= _NARROW_PHASE and phase != "rest"
        ],
        "phase_peaks": [
            (phase, top.peak_bytes + fixed_bytes, moment_text(phase, top.place)) for phase, top in tops.items()
        ],
        "kinds": [kind for kind in COLOURS if any(each.peak.get(kind) for each in drawn)],
    }


def _moments(timeline: Sequence[Interval]) -> tuple[list[float], list[Mapping[Kind, int]]]:
    """Return the start, peak and end of each interval, each as its position (a fraction of the width) and its bytes by
    kind."""
    halves = [(index + offset) / len(timeline) for index in range(len(timeline)) for offset in (0.0, 0.5, 1.0)]
    return halves, [held for each in timeline for held in (each.begin, each.peak, each.end)]


def _areas(
    positions: Sequence[float], levels: Sequence[Mapping[Kind, int]], fixed_bytes: int, top_bytes: float
) -> Iterator[tuple[str, str]]:
    """Yield the fill and the outline of each area, from bottom to top."""
    layers = [(_FIXED, [fixed_bytes] * len(levels))]
    layers += [(colour, [held.get(kind, 0) for held in levels]) for kind, colour in COLOURS.items()]
    below = [0] * len(levels)
    for fill, amounts in layers:
        above = list(map(add, below, amounts))
        if above != below:
            outline = [*zip(positions, above, strict=True), *reversed(list(zip(positions, below, strict=True)))]
            yield fill, f"M{'L'.join(_point(x, y, top_bytes) for x, y in outline)}Z"
        below = above


def _line(positions: Sequence[float], levels: Sequence[Mapping[Kind, int]], top_bytes: float, fixed_bytes: int) -> str:
    totals = [fixed_bytes + sum(held.values()) for held in levels]
    return "L".join(_point(x, y, top_bytes) for x, y in zip(positions, totals, strict=True))


def _point(x: float, y_bytes: float, top_bytes: float) -> str:
    return f"{x * _SIDE:.1f} {(1 - min(max(y_bytes / top_bytes, 0.0), 1.0)) * _SIDE:.1f}"


def _hint(each: Interval, fixed_bytes: int) -> str:
    """Return the tooltip of an interval."""
    sizes = {moment_text(each.phase, each.place): each.peak_bytes + fixed_bytes}
    sizes |= {NAMES[kind]: each.peak[kind] for kind in COLOURS if each.peak.get(kind)}
    sizes |= {"fixed memory": fixed_bytes} if fixed_bytes else {}
    return "\n".join(f"{name}: {format_bytes(count)}" for name, count in sizes.items())


def _ladder(choice: Choice) -> dict[str, Any]:
    """Return the arguments of the macro ``ladder``; empty if no plan has a forecast."""
    best: dict[str, tuple[Considered, Forecast]] = {}
    for each in choice.considered:
        if each.forecast is not None:
            best.setdefault(each.plan.parallel.strategy, (each, each.forecast))
    shown = sorted(best.values(), key=lambda each: STAGES.index(each[0].plan.parallel.strategy))
    if not shown:
        return {}
    budget_bytes, device_bytes = choice.budget_bytes, choice.machine.device.memory_bytes
    limit_bytes = device_bytes if device_bytes <= 1.3 * budget_bytes else budget_bytes
    longest = max(forecast.peak_bytes for _, forecast in shown)
    top_bytes = max(min(longest, _MOST_OF_BUDGET * budget_bytes), 1.04 * limit_bytes, 1)
    marks = [(budget_bytes, "var(--bad)")]
    if budget_bytes < device_bytes <= top_bytes:
        marks.append((device_bytes, "var(--soft)"))
    return {
        "rungs": [(each, list(_segments(forecast, top_bytes))) for each, forecast in shown],
        "top_bytes": top_bytes,
        "marks": [
            (f"{min(mark / top_bytes * _SIDE, _SIDE - 1):.1f}", colour)
            for mark, colour in marks
            if 0 < mark <= top_bytes
        ],
        "device_bytes": device_bytes if len(marks) > 1 else None,
        "kinds": [kind for kind in COLOURS if any(forecast.bytes_by_kind.get(kind) for _, forecast in shown)],
        "has_fixed": any(sum(forecast.fixed_bytes.values()) for _, forecast in shown),
    }


def _segments(forecast: Forecast, top_bytes: float) -> Iterator[tuple[str, str, str, str]]:
    """Yield position, width, fill and tooltip of each segment of a bar."""
    parts = [("fixed memory", sum(forecast.fixed_bytes.values()), _FIXED)]
    parts += [(NAMES[kind], forecast.bytes_by_kind.get(kind, 0), colour) for kind, colour in COLOURS.items()]
    begin = 0
    for name, num_bytes, colour in parts:
        width = max(min(num_bytes, top_bytes - begin), 0.0)
        if width > 0:
            hint = f"{name}: {format_bytes(num_bytes)}"
            yield f"{begin / top_bytes * _SIDE:.1f}", f"{width / top_bytes * _SIDE:.1f}", colour, hint
        begin += num_bytes


def _plans(choice: Choice) -> dict[str, Any]:
    """Return the arguments of the macro ``plans``. Rejected plans are grouped by reason. Each group lists its
    strategies, or its plan if there is only one."""
    fitting = [each for each in choice.considered if each.forecast is not None and each.fits]
    others = [each for each in choice.considered if each.forecast is not None and not each.fits]
    shown = fitting[: max(_NUM_PLANS // 2, _NUM_PLANS - len(others))]
    shown += others[: _NUM_PLANS - len(shown)]
    reasons: dict[str, list[Considered]] = {}
    for each in choice.considered:
        if each.forecast is None:
            reasons.setdefault(each.reason, []).append(each)
    rejected = {
        reason: [words_of(plans[0].plan, plans[0].micro_batch)]
        if len(plans) == 1
        else list(dict.fromkeys(each.plan.parallel.strategy for each in plans))
        for reason, plans in reasons.items()
    }
    num_omitted = len(fitting) + len(others) - len(shown) + max(len(reasons) - _NUM_REASONS, 0)
    return {"shown": shown, "rejected": list(rejected.items())[:_NUM_REASONS], "num_omitted": num_omitted}


def _seconds_text(duration_s: float) -> str:
    """Format a duration with a non-breaking space, for example ``0.0123`` as ``"12.3 ms"``."""
    unit, factor = ("s", 1.0) if duration_s >= 1 else ("ms", 1e3) if duration_s >= 1e-3 else ("µs", 1e6)
    return f"{duration_s * factor:.3g}\u00a0{unit}" if duration_s < 1000 else f"{duration_s:.0f}\u00a0s"
