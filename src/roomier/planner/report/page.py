"""HTML page of the planner's result: one self-contained file that uses no network access and no scripts, and is
readable on a phone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.metadata import version

from roomier.core.units import format_bytes
from roomier.planner.choice import Choice, Considered, tiers_text, words_of
from roomier.planner.dry_runs.dry_run import Interval
from roomier.planner.forecast import Forecast
from roomier.planner.hardware.machine import Machine
from roomier.planner.measured.record import Record, moment_text
from roomier.planner.memory.kinds import Kind
from roomier.planner.report.grids import Grid, heat_table, kinds_table, plans_table, seconds_text
from roomier.planner.report.style import COLOURS, NAMES, STYLE
from roomier.planner.report.svg import (
    FIXED,
    areas,
    bar,
    definitions,
    joined,
    line_swatch,
    phases_of,
    round_ticks,
    swatch,
)

_MOST_OF_BUDGET = 2.5  # length relative to the budget above which bars are truncated
_NARROW_PHASE = 0.09  # share of the width below which a phase has no room for its name


def page_of(
    choice: Choice, what_if: Grid | None = None, record: Record | None = None, *, title: str = "", subject: str = ""
) -> str:
    """Return the HTML page of ``choice``.

    Args:
        choice: result of the planner.
        what_if: peaks for other batch sizes and sequence lengths; None omits the table of these peaks.
        record: measured run of the chosen plan, whose values are overlaid on the forecast.
        title: title of the page; the default is the chosen plan.
        subject: subtitle, such as the model; the default is the machine.
    """
    chosen = choice.chosen
    winner = choice.considered[0] if chosen is not None and choice.considered else None
    name = "No plan fits" if chosen is None else words_of(chosen.plan, chosen.micro_batch)
    num_plans = choice.num_plans or len(choice.considered)
    parts = [
        f"<h1>{escape(title or name)}</h1>",
        f'<p class="soft">{escape(subject or _machine_text(choice.machine))}</p>',
        _figures(chosen, choice.budget_bytes, choice),
    ]
    if chosen is None:
        parts.append(_no_plan_fits(choice))
    if record is not None:
        parts += forecast_and_truth(record)
    elif chosen is not None:
        parts += [_heading("One step", _peak_sentence(chosen)), timeline(chosen, budget_bytes=choice.budget_bytes)]
    parts += [
        _heading("Strategies", "Peak memory of a device in a step, by kind."),
        ladder(choice),
        _heading("Plans", f"{num_plans} plans were compared. Samples are counted per micro-batch and rank."),
        plans_table(choice.considered, winner),
    ]
    if what_if is not None:
        parts += [_heading("What if", "Peak of the chosen plan with batches of other sizes."), heat_table(what_if)]
    parts += [_heading("Machine and method"), _facts(choice.machine, _method(choice))]
    return document(title or f"roomier plan: {name}", parts)


def page_of_record(record: Record, facts: Mapping[str, str] | None = None, *, subject: str = "") -> str:
    """Return the HTML page that compares a run with its forecast.

    Args:
        record: forecast and measurements of the run.
        facts: additional facts about the run, by name.
        subject: subtitle, such as the model; the default is the machine.
    """
    forecast = record.forecast
    name = words_of(forecast.plan, forecast.micro_batch)
    parts = [
        f"<h1>{escape(name)}</h1>",
        f'<p class="soft">{escape(subject or _machine_text(forecast.machine))}</p>',
        *forecast_and_truth(record),
        _heading("Machine and method"),
        _facts(forecast.machine, {**(facts or {}), "Measured": _how_measured(record)}),
    ]
    return document(f"roomier report: {name}", parts)


def fragment_of(choice: Choice) -> str:
    """Return the short form of the page for a notebook."""
    parts = [_figures(choice.chosen, choice.budget_bytes, choice)]
    if choice.chosen is None:
        parts.append(_no_plan_fits(choice))
    return _fragment([*parts, "<h2>Strategies</h2>", ladder(choice)])


def fragment_of_forecast(forecast: Forecast) -> str:
    """Return a short HTML description of one plan for a notebook."""
    name = words_of(forecast.plan, forecast.micro_batch)
    return _fragment([f"<h2>{escape(name)}</h2>", f"<p>{_peak_sentence(forecast)}</p>", timeline(forecast)])


def document(title: str, parts: Iterable[str]) -> str:
    """Return a complete HTML page."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>html{{color-scheme:light dark}}body{{margin:0}}"
        f"@media(prefers-color-scheme:dark){{body{{background:#14171b}}}}{STYLE}</style></head>"
        f'<body class="roomier">{definitions()}<main>\n{chr(10).join(parts)}\n'
        f"<footer>roomier {escape(version('roomier'))}. Bytes are binary: 1 GiB is 1024<sup>3</sup> bytes.</footer>"
        "</main></body></html>\n"
    )


def _fragment(parts: Iterable[str]) -> str:
    return f'<div class="roomier part"><style>{STYLE}</style>{definitions()}{"".join(parts)}</div>'


def timeline(forecast: Forecast, record: Record | None = None, *, budget_bytes: int | None = None) -> str:
    """Return a stacked area chart of one step, with a scale, the phases and a label at the peak."""
    fixed_bytes = 0 if record is not None else sum(forecast.fixed_bytes.values())
    drawn = joined(forecast.timeline)
    measured = [] if record is None else joined(record.worst.timeline)
    peak_bytes = forecast.tensor_bytes + fixed_bytes
    highest = max([peak_bytes, *(each.peak_bytes for each in measured)])
    shows_budget = budget_bytes is not None and budget_bytes <= 1.6 * highest
    top_bytes = max(highest, budget_bytes if shows_budget and budget_bytes else 0, 1) * 1.04
    at = max(range(len(drawn)), key=lambda index: drawn[index].peak_bytes)
    share = (at + 0.5) / len(drawn)
    peak = drawn[at]
    at_left = share <= 0.5
    side = f"margin-left:{share:.2%}" if at_left else f"margin-right:{1 - share:.2%};text-align:right"
    ticks = "".join(
        f'<span class="tick" style="bottom:{tick / top_bytes:.2%}">{text}</span>'
        for tick, text in round_ticks(top_bytes)
    )
    limit = _limit(budget_bytes, top_bytes) if budget_bytes is not None and shows_budget else ""
    phases = "".join(
        f'<span style="left:{begin:.2%};width:{end - begin:.2%}">{escape(phase)}</span>'
        for phase, begin, end in phases_of(drawn)
        if end - begin >= _NARROW_PHASE and phase != "rest"
    )
    moment = moment_text(peak.phase, peak.place)
    title = f"Memory of one step, at most {format_bytes(peak_bytes)} at {moment}"
    return (
        f'<div class="mark"><div style="{side}">{_size(peak_bytes)}<br>{escape(moment)}</div></div>'
        f'<div class="chart">{areas(drawn, fixed_bytes, top_bytes, title, measured=measured)}{ticks}{limit}'
        f'<span class="arrow" style="left:{share:.2%}" aria-hidden="true">▾</span></div>'
        f'<div class="phases" aria-hidden="true">{phases}</div>'
        f"{_key(_kinds_in(drawn), fixed_bytes > 0, has_line=record is not None)}"
    )


def _limit(budget_bytes: int, top_bytes: float) -> str:
    """Return the line that marks the budget in the chart, with its label below the line."""
    height = f"bottom:{budget_bytes / top_bytes:.2%}"
    return (
        f'<svg class="limit" style="{height}" viewBox="0 0 10 2" preserveAspectRatio="none" aria-hidden="true">'
        '<path d="M0 1H10" stroke="currentColor" stroke-width="1.5" stroke-dasharray="5 4" '
        'vector-effect="non-scaling-stroke"/></svg>'
        f'<span class="budget" style="{height}">budget {_size(budget_bytes)}</span>'
    )


def ladder(choice: Choice) -> str:
    """Return a bar chart that compares the best plan of each strategy with the budget."""
    shown = list(_first_of_each_strategy(choice.considered))
    if not shown:
        return "<p>No plan has a forecast.</p>"
    budget_bytes, device_bytes = choice.budget_bytes, choice.machine.device.memory_bytes
    longest = max(each.forecast.peak_bytes for each in shown if each.forecast is not None)
    limit_bytes = device_bytes if device_bytes <= 1.3 * budget_bytes else budget_bytes
    top_bytes = max(min(longest, _MOST_OF_BUDGET * budget_bytes), 1.04 * limit_bytes, 1)
    marks = [(float(budget_bytes), "var(--bad)")]
    if budget_bytes < device_bytes <= top_bytes:
        marks.append((float(device_bytes), "var(--soft)"))
    rows = "".join(_rung(each, top_bytes, marks) for each in shown)
    found = {kind for each in shown if each.forecast is not None for kind in each.forecast.bytes_by_kind}
    has_fixed = any(sum(each.forecast.fixed_bytes.values()) > 0 for each in shown if each.forecast is not None)
    kinds = [kind for kind in COLOURS if kind in found and any(_bytes_of(each, kind) for each in shown)]
    lines = f'<li><span class="bad" aria-hidden="true">▏</span>budget {_size(budget_bytes)}</li>'
    if len(marks) > 1:
        lines += f'<li><span aria-hidden="true">▏</span>device memory {_size(device_bytes)}</li>'
    return f'<ul class="ladder">{rows}</ul>{_key(kinds, has_fixed, more=lines)}'


def forecast_and_truth(record: Record) -> list[str]:
    """Return the parts of a page that compare forecast and measurement: values, one step, and bytes by kind."""
    forecast, worst = record.forecast, record.worst
    whose = "" if len(record.ranks) == 1 else f" of rank {worst.rank}, the largest of {len(record.ranks)} ranks"
    return [
        _list_of_figures(
            [
                ("Forecast", _size(record.forecast_bytes, 2), moment_text(forecast.peak.phase, forecast.peak.place)),
                ("Measured", _size(record.measured_bytes, 2), moment_text(worst.peak.phase, worst.peak.place)),
                ("Difference", record.error_text, "of the measured value"),
            ]
        ),
        _heading("One step", f"Areas: forecast. Line: measurement of step {record.step}{whose}."),
        timeline(forecast, record, budget_bytes=record.budget_bytes),
        _heading("By kind", "At the peak of the forecast and of the measurement."),
        kinds_table(record),
    ]


def _rung(each: Considered, top_bytes: float, marks: Sequence[tuple[float, str]]) -> str:
    forecast = each.forecast
    assert forecast is not None
    fixed_bytes = sum(forecast.fixed_bytes.values())
    segments = [("fixed memory", fixed_bytes, FIXED)] if fixed_bytes else []
    segments += [(NAMES[kind], forecast.bytes_by_kind.get(kind, 0), colour) for kind, colour in COLOURS.items()]
    strategy = each.plan.parallel.strategy
    verdict = '<small class="good">fits</small>' if each.fits else '<small class="bad">does not fit</small>'
    rest = words_of(each.plan, each.micro_batch).partition(", ")[2]
    title = f"{strategy}: {format_bytes(forecast.peak_bytes)}, {'fits' if each.fits else 'does not fit'}"
    return (
        f'<li><span class="name"><b>{escape(strategy)}</b><small>{escape(rest)}</small></span>'
        f'<span class="bar">{bar(segments, top_bytes, marks, title)}</span>'
        f'<span class="size">{_size(forecast.peak_bytes)}{verdict}</span></li>'
    )


def _first_of_each_strategy(considered: Iterable[Considered]) -> Iterable[Considered]:
    found: dict[str, Considered] = {}
    for each in considered:
        if each.forecast is not None:
            found.setdefault(each.plan.parallel.strategy, each)
    order = ["single", "ddp", "zero1", "zero2", "zero3", "hsdp"]
    return sorted(
        found.values(), key=lambda each: (*order, each.plan.parallel.strategy).index(each.plan.parallel.strategy)
    )


def _bytes_of(each: Considered, kind: Kind) -> int:
    return 0 if each.forecast is None else each.forecast.bytes_by_kind.get(kind, 0)


def _kinds_in(drawn: Sequence[Interval]) -> list[Kind]:
    return [kind for kind in COLOURS if any(each.peak.get(kind) for each in drawn)]


def _key(kinds: Sequence[Kind], has_fixed: bool, *, has_line: bool = False, more: str = "") -> str:
    items = [f"<li>{swatch(COLOURS[kind])}{escape(NAMES[kind])}</li>" for kind in kinds]
    if has_fixed:
        items.append(f"<li>{swatch(FIXED)}fixed memory</li>")
    if has_line:
        items.append(f"<li>{line_swatch()}measured</li>")
    return f'<ul class="key" aria-label="colors">{"".join(items)}{more}</ul>'


def _figures(chosen: Forecast | None, budget_bytes: int, choice: Choice) -> str:
    if chosen is None:
        return _list_of_figures(
            [
                ("Budget", _size(budget_bytes), "per device"),
                ("Plans", str(choice.num_plans or len(choice.considered)), "none fits"),
                ("Planned in", seconds_text(choice.planning_s), ""),
            ]
        )
    used = chosen.peak_bytes / budget_bytes if budget_bytes else 0.0
    rows = [
        ("Peak of a device", _size(chosen.peak_bytes), f"{used:.0%} of {_size(budget_bytes)}".replace("%", " %")),
        ("Global batch", f"{chosen.global_batch}", f"{chosen.micro_batch} samples per rank and micro-batch"),
        ("Planned in", seconds_text(choice.planning_s), f"{choice.num_plans or len(choice.considered)} plans"),
    ]
    if chosen.time is not None:
        share = chosen.time.exposed_s / chosen.time.total_s if chosen.time.total_s else 0.0
        note = f"{share:.0%} of it is exposed communication".replace("%", " %") if share >= 0.005 else "estimated"
        rows.insert(1, ("One step", seconds_text(chosen.time.total_s), note))
    return _list_of_figures(rows)


def _list_of_figures(rows: Iterable[tuple[str, str, str]]) -> str:
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in rows
    )
    return f'<dl class="figures">{cells}</dl>'


def _no_plan_fits(choice: Choice) -> str:
    nearest = next((each for each in choice.considered if each.forecast is not None), None)
    if nearest is None or nearest.forecast is None:
        return '<p class="bad">Every plan was rejected. The table lists the reasons.</p>'
    missing = format_bytes(nearest.forecast.peak_bytes - choice.budget_bytes)
    name = words_of(nearest.plan, nearest.micro_batch)
    return f'<p class="bad">The nearest plan, {escape(name)}, exceeds the budget by {escape(missing)}.</p>'


def _peak_sentence(forecast: Forecast) -> str:
    peak = forecast.peak
    kinds = sorted(forecast.bytes_by_kind.items(), key=lambda each: -each[1])[:2]
    largest = " and ".join(f"{NAMES[kind]} ({format_bytes(count)})" for kind, count in kinds if count)
    moment = escape(moment_text(peak.phase, peak.place))
    return f"The peak is at {moment}. The largest kinds of memory are {escape(largest)}."


def _heading(text: str, note: str = "") -> str:
    return f"<h2>{escape(text)}</h2>" + (f'<p class="soft">{note}</p>' if note else "")


def _facts(machine: Machine, more: Mapping[str, str]) -> str:
    device = machine.device
    rates = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in device.flops_per_s.items())
    rows = {
        "Device": f"{device.name}, {format_bytes(device.memory_bytes)}, {device.memory_bytes_per_s / 1e9:.4g} GB/s",
        "Rates, TFLOP/s": rates or "not known",
        "Ranks": f"{machine.num_ranks}, {machine.devices_per_node} on each of {machine.num_nodes} nodes"
        if machine.num_nodes > 1
        else f"{machine.num_ranks} on one node",
        "Source of values": machine.source,
        **more,
    }
    cells = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows.items())
    return f'<dl class="facts">{cells}</dl>'


def _method(choice: Choice) -> dict[str, str]:
    method = (
        "Plans are compared with a memory formula. The chosen plan is verified by a dry run, which executes the code "
        "of the run on tensors without memory."
    )
    found = {"Method": method}
    if choice.chosen is not None and choice.chosen.fixed_bytes:
        fixed = choice.chosen.fixed_bytes.items()
        found["Fixed memory"] = ", ".join(f"{name} {format_bytes(count)}" for name, count in fixed)
    if choice.chosen is not None and (used := tiers_text(choice.chosen)):
        found["Offload"] = used
    return found


def _how_measured(record: Record) -> str:
    by = (
        "CUDA's allocator, and kinds by a tracker"
        if record.worst.allocator_bytes is not None
        else "a tracker of all tensors"
    )
    return " ".join([f"In step {record.step}, by {by}.", *record.notes])


def _machine_text(machine: Machine) -> str:
    nodes = "" if machine.num_nodes == 1 else f" on {machine.num_nodes} nodes"
    return f"{machine.num_ranks} x {machine.device.name}{nodes}"


def _size(num_bytes: float, num_digits: int = 1) -> str:
    return format_bytes(num_bytes, num_digits).replace(" ", "\u00a0")
