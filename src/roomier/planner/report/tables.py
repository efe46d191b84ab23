"""Tables of the planner's result for terminals and notebooks, created with rich."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from roomier.core.units import format_bytes, format_count, format_seconds
from roomier.plan import Plan
from roomier.plan.choices import Kind as Label
from roomier.plan.table import rows
from roomier.planner.choice import Choice, Considered, levers_of, words_of
from roomier.planner.memory.kinds import Kind, total_bytes
from roomier.planner.report.what_if import Grid

_MAX_PLANS = 8  # maximum number of plans with a forecast; the best plan of each strategy is always shown
_MAX_REFUSED = 6
_LABELS = (Label.APPROXIMATE, Label.NEAR, Label.EXACT)

_STATES = (Kind.PARAMETER, Kind.GRADIENT, Kind.OPTIMIZER_STATE)
"""Kinds of the model states, which exist during the full step."""


def choice_table(choice: Choice, *, tokens_per_sample: int | None = None) -> RenderableType:
    """Return a table of the chosen plan, the best alternatives, and the rejected plans with their reasons.

    Args:
        choice: result of the planner.
        tokens_per_sample: number of tokens per sample, to display the throughput in tokens/s; None displays samples/s.
    """
    shown = _best_of_all(choice.considered)
    largest = max((each.forecast.peak_bytes for each in shown if each.forecast is not None), default=0)
    unit, unit_bytes = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)
    speed = "samples/s" if tokens_per_sample is None else "tokens/s"
    table = _table(_title(choice))
    table.add_column("plan", overflow="fold", ratio=1)
    table.add_column("batch", no_wrap=True)
    for head in (f"peak {unit}", "states", "activ.", "rest", "step", speed):
        table.add_column(head, justify="right", no_wrap=head != f"peak {unit}")
    table.add_column("kind")
    table.add_column("fits", no_wrap=True)
    for each in shown:
        is_chosen = choice.chosen is not None and each is choice.considered[0]
        style = "bold" if is_chosen else "" if each.fits else "dim"
        table.add_row(*_cells(each, unit_bytes, tokens_per_sample), style=style)
    refused = [each for each in choice.considered if each.forecast is None]
    return Group(table, Text(_verdict(choice)), *_refused_lines(refused))


def what_if_table(grid: Grid) -> Table:
    """Return a table of the peak for other batch sizes and sequence lengths. Peaks over the budget are enclosed in
    brackets."""
    title = f"Peak on each device; values in brackets exceed {format_bytes(grid.budget_bytes)}"
    table = _table(Text(title))
    table.add_column(f"{grid.row_name} \\ {grid.column_name}".lstrip(" \\"))
    for column in grid.columns:
        table.add_column(str(column), justify="right", no_wrap=True)
    for row, peaks in zip(grid.rows, grid.peak_bytes, strict=True):
        cells = (_peak_cell(peak, grid.budget_bytes) for peak in peaks)
        table.add_row(str(row) if row else "", *cells)
    return table


def longest_table(grid: Grid) -> Table:
    """Return a table of the longest sequences that fit, by the number of ranks that share a sequence."""
    table = _table(Text("Longest sequence that fits if ranks share each sequence"))
    table.add_column("context_parallel_size", no_wrap=True)
    table.add_column("longest sequence in tokens", justify="right")
    for size, length in grid.longest.items():
        table.add_row(str(size), str(length))
    return table


def label_of(plan: Plan) -> Label:
    """Return the label of the plan, which is the least exact label of its options."""
    kinds = {row.kind for row in rows(plan)}
    return next(label for label in _LABELS if label in kinds)


def _best_of_all(considered: Sequence[Considered]) -> list[Considered]:
    """Return up to ``_MAX_PLANS`` plans with a forecast. The first plan of each strategy is always included."""
    priced = [each for each in considered if each.forecast is not None]
    first = {each.plan.parallel.strategy: each for each in reversed(priced)}
    kept = {id(each) for each in first.values()}
    for each in priced:
        if len(kept) >= _MAX_PLANS:
            break
        kept.add(id(each))
    return [each for each in priced if id(each) in kept]


def _table(title: Text) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0), pad_edge=False)


def _cells(each: Considered, unit_bytes: int, tokens_per_sample: int | None) -> list[Text]:
    forecast, plan = each.forecast, each.plan
    assert forecast is not None
    copies = f" ({plan.parallel.shard_size} per replica)" if plan.parallel.strategy == "hsdp" else ""
    optimizer = [] if plan.optimizer.name in (None, "adamw") else [str(plan.optimizer.name)]
    step_s = None if forecast.time is None else forecast.time.total_s
    num_items = forecast.global_batch * (tokens_per_sample or 1)
    peak_bytes, by_kind = forecast.peak_bytes, forecast.bytes_by_kind
    parts = (total_bytes(by_kind, _STATES), by_kind.get(Kind.ACTIVATION, 0))
    cells = [
        ", ".join([plan.parallel.strategy + copies, *levers_of(plan), *optimizer]),
        f"{plan.batch.accumulate_grad_batches} x {each.micro_batch}",
        *(f"{count / unit_bytes:.1f}" for count in (peak_bytes, *parts, peak_bytes - sum(parts))),
        "" if step_s is None else format_seconds(step_s),
        "" if not step_s else format_count(num_items / step_s),
        label_of(plan).value,
        "yes" if each.fits else "no",
    ]
    return [Text(cell) for cell in cells]


def _title(choice: Choice) -> Text:
    machine = choice.machine
    nodes = "" if machine.num_nodes == 1 else f" on each of {machine.num_nodes} nodes"
    device = f"{machine.devices_per_node} x {machine.device.name}{nodes}"
    return Text(f"{device}, budget {format_bytes(choice.budget_bytes)} per device")


def _verdict(choice: Choice) -> str:
    took = f"Planned in {format_seconds(choice.planning_s)}."
    if choice.chosen is not None:
        return f"{choice.why}. {took}"
    found = next((each for each in choice.considered if each.forecast is not None), None)
    if found is None or found.forecast is None:
        return f"No plan fits. {took}"
    how, needs = words_of(found.plan, found.micro_batch), format_bytes(found.forecast.peak_bytes)
    return (
        f"No plan fits. The nearest plan, {how}, needs {needs}, but the budget is {format_bytes(choice.budget_bytes)}. "
        f"{took}"
    )


def _refused_lines(refused: Sequence[Considered]) -> Iterable[Text]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for each in refused:
        key = "skipped" if each.is_left_out else "rejected", each.reason
        reasons.setdefault(key, []).append(each.plan.parallel.strategy)
    for (word, reason), strategies in list(reasons.items())[:_MAX_REFUSED]:
        yield Text(f"{word}: {', '.join(dict.fromkeys(strategies))}: {reason}")
    if len(reasons) > _MAX_REFUSED:
        yield Text(f"{len(reasons) - _MAX_REFUSED} more reasons, which --json lists")


def _peak_cell(num_bytes: int | None, budget_bytes: int) -> Text:
    if num_bytes is None:
        return Text("-")
    text = format_bytes(num_bytes)
    return Text(text, style="bold") if num_bytes <= budget_bytes else Text(f"[{text}]", style="dim")
