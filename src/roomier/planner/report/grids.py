"""Tables of the planner's HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from roomier.core.units import format_bytes
from roomier.planner.choice import Considered, words_of
from roomier.planner.measured.record import Record
from roomier.planner.report.style import COLOURS, NAMES
from roomier.planner.report.svg import swatch

_NUM_PLANS = 14  # maximum number of rows for plans with a forecast
_NUM_REFUSED = 8


@dataclass(frozen=True)
class Grid:
    """Peaks for different batch sizes and sequence lengths.

    Attributes:
        row_name: name of the quantity in the rows, such as tokens per sequence.
        rows: value of each row.
        column_name: name of the quantity in the columns, such as samples per micro-batch.
        columns: value of each column.
        peak_bytes: peak for each row and column; None if the peak is not known.
        budget_bytes: memory that a device may use.
    """

    row_name: str
    rows: Sequence[int]
    column_name: str
    columns: Sequence[int]
    peak_bytes: Sequence[Sequence[int | None]]
    budget_bytes: int


def heat_table(grid: Grid) -> str:
    """Return an HTML table with one cell for each row and column of ``grid``. Darker cells use more of the budget.
    Cells over the budget are marked."""
    head = "".join(f'<th scope="col">{number}</th>' for number in grid.columns)
    rows = "".join(
        f'<tr><th scope="row">{number}</th>{"".join(_heat_cell(count, grid.budget_bytes) for count in cells)}</tr>'
        for number, cells in zip(grid.rows, grid.peak_bytes, strict=True)
    )
    corner = f"{escape(grid.row_name)} ↓ {escape(grid.column_name)} →"
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="what if"><table class="heat"><thead><tr>'
        f'<th scope="col">{corner}</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        f'<p class="soft"><small>✕: exceeds the budget of {_size(grid.budget_bytes)}.</small></p>'
    )


def _heat_cell(num_bytes: int | None, budget_bytes: int) -> str:
    if num_bytes is None:
        return '<td aria-label="not known">?</td>'
    if num_bytes > budget_bytes:
        return f'<td class="no" aria-label="{escape(format_bytes(num_bytes))}, does not fit">✕ {_size(num_bytes)}</td>'
    share = num_bytes / budget_bytes if budget_bytes else 0.0
    return f'<td style="background:rgba(var(--heat),{0.04 + 0.5 * share**2:.2f})">{_size(num_bytes)}</td>'


def plans_table(considered: Sequence[Considered], chosen: Considered | None) -> str:
    """Return a table of the fastest plans that fit, the nearest plans that do not fit, and the rejected plans."""
    priced = [each for each in considered if each.forecast is not None]
    refused = [each for each in considered if each.forecast is None]
    shown = _some_of_each(priced)
    reasons = _by_reason(refused)
    rows = [_plan_row(each, is_chosen=each is chosen) for each in shown]
    rows += [_refused_row(names, reason) for reason, names in list(reasons.items())[:_NUM_REFUSED]]
    num_left_out = len(priced) - len(shown) + max(len(reasons) - _NUM_REFUSED, 0)
    rest = f'<p class="soft"><small>and {num_left_out} more</small></p>' if num_left_out else ""
    heads = '<th scope="col" role="columnheader">plan</th>' + "".join(
        f'<th scope="col" role="columnheader"{number}>{name}</th>'
        for name, number in (("peak", ' class="number"'), ("step", ' class="number"'), ("why", ""))
    )
    return (
        '<table class="plans" role="table"><thead role="rowgroup"><tr role="row">'
        f'{heads}</tr></thead><tbody role="rowgroup">{"".join(rows)}</tbody></table>{rest}'
    )


def _some_of_each(priced: Sequence[Considered]) -> list[Considered]:
    fitting = [each for each in priced if each.fits]
    others = [each for each in priced if not each.fits]
    num_fitting = max(_NUM_PLANS // 2, _NUM_PLANS - len(others))
    shown = fitting[:num_fitting]
    return shown + others[: _NUM_PLANS - len(shown)]


def _by_reason(refused: Sequence[Considered]) -> dict[str, list[str]]:
    """Group rejected plans by reason: list the strategies for each reason, or the plan if the reason applies to only
    one plan."""
    found: dict[str, list[Considered]] = {}
    for each in refused:
        found.setdefault(each.reason, []).append(each)
    return {
        reason: [words_of(plans[0].plan, plans[0].micro_batch)]
        if len(plans) == 1
        else list(dict.fromkeys(each.plan.parallel.strategy for each in plans))
        for reason, plans in found.items()
    }


def _refused_row(names: Sequence[str], reason: str) -> str:
    return (
        f'<tr role="row"><th scope="row" role="rowheader">{escape(", ".join(names))}</th><td role="cell"></td>'
        f'<td role="cell"></td><td role="cell" data-label="why" class="soft">{escape(reason)}</td></tr>'
    )


def _plan_row(each: Considered, *, is_chosen: bool) -> str:
    forecast = each.forecast
    step = "" if forecast is None or forecast.time is None else escape(seconds_text(forecast.time.total_s))
    peak = "" if forecast is None else _size(forecast.peak_bytes)
    verdict = "chosen" if is_chosen else each.reason or ("fits" if each.fits else "does not fit")
    tone = "good" if is_chosen else "" if each.fits else "bad" if forecast is not None else "soft"
    return (
        f'<tr role="row"{" class=chosen" if is_chosen else ""}>'
        f'<th scope="row" role="rowheader">{escape(words_of(each.plan, each.micro_batch))}</th>'
        f'<td role="cell" class="number" data-label="peak">{peak}</td>'
        f'<td role="cell" class="number" data-label="step">{step}</td>'
        f'<td role="cell" data-label="why" class="{tone}">{escape(verdict)}</td></tr>'
    )


def kinds_table(record: Record) -> str:
    """Return a table of bytes by kind at the peak, with the forecast, the measurement and the difference."""
    forecast, measured = record.forecast.bytes_by_kind, record.worst.peak.peak
    rows = "".join(
        f'<tr><th scope="row"><span class="kind">{swatch(colour)}{escape(NAMES[kind])}</span></th>'
        f"{_pair(forecast.get(kind, 0), measured.get(kind, 0))}</tr>"
        for kind, colour in COLOURS.items()
        if forecast.get(kind) or measured.get(kind)
    )
    sums = _pair(record.forecast.tensor_bytes, record.worst.peak.peak_bytes)
    allocator = record.worst.allocator_bytes
    last = (
        ""
        if allocator is None
        else f'<tr><th scope="row">CUDA\'s allocator</th>{_pair(record.forecast_bytes, allocator)}</tr>'
    )
    head = "".join(f'<th scope="col" class="number">{name}</th>' for name in ("forecast", "measured", "difference"))
    return (
        f'<table><thead><tr><th scope="col">kind</th>{head}</tr></thead><tbody>{rows}'
        f'<tr class="chosen"><th scope="row">all tensors</th>{sums}</tr>{last}</tbody></table>'
    )


def _pair(forecast_bytes: int, measured_bytes: int) -> str:
    difference = forecast_bytes - measured_bytes
    sign = "+" if difference > 0 else "-" if difference < 0 else ""
    cells = (_size(forecast_bytes), _size(measured_bytes), f"{sign}{_size(abs(difference))}")
    return "".join(f'<td class="number">{cell}</td>' for cell in cells)


def seconds_text(duration_s: float) -> str:
    """Format a duration with a non-breaking space, for example ``0.0123`` as ``"12.3 ms"``."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if duration_s * factor >= 1 or unit == "µs":
            return f"{duration_s * factor:.3g}\u00a0{unit}" if duration_s < 1000 else f"{duration_s:.0f}\u00a0s"
    raise AssertionError


def _size(num_bytes: float) -> str:
    return format_bytes(num_bytes).replace(" ", "\u00a0")
