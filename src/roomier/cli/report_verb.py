"""``roomier report RUN``: compare the forecast of a run with its measurement."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roomier.cli.plain_parser import PlainParser
from roomier.core.errors import RoomierError
from roomier.core.units import format_bytes, format_count
from roomier.core.untrusted import lines_of, parse_json

if TYPE_CHECKING:
    from rich.table import Table

    from roomier.planner.measured.record import ForecastRecord

_RATES = ("samples_per_s", "tokens_per_s", "model_flops_per_s", "mfu")
_METRICS = "metrics.jsonl"


def run(verb: str, arguments: Sequence[str]) -> int:
    """Compare the forecast and the measurement. Print a table, or with ``--json`` one JSON object, to standard output.
    With ``--html``, also write a page.

    Raises:
        RoomierError: the run does not exist, or has no forecast with a measurement.
    """
    options = _parser(verb).parse_args(list(arguments))
    folder = find_run(options.run)
    from roomier.planner.measured.record import read_record  # late import: --help must not load torch

    record = read_record(folder)
    rates = rates_of(folder)
    if options.html is not None:
        _write_page(options.html, folder, record, rates)
    if options.json:
        print(json.dumps({"run": str(folder), **record.as_dict(), "rates": rates}))
        return 0
    from rich.console import Console

    console = Console()
    console.print(table(folder, record))
    console.print(record.line(), highlight=False, soft_wrap=True, markup=False)
    for line in (*_rate_lines(rates), *record.notes):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    if options.html is not None:
        console.print(f"page: {options.html}", highlight=False, soft_wrap=True, markup=False)
    return 0


def find_run(path: Path) -> Path:
    """Return ``path`` if it is a run folder. Otherwise, return the newest run in ``path`` that has a forecast. If no
    run has a forecast, return the newest run.

    Raises:
        RoomierError: ``path`` contains no run.
    """
    from roomier.planner.measured.record import FILE_NAME
    from roomier.train.settling.job import is_run_folder

    action = "Pass a run folder such as runs/version_0, or the folder of all runs"
    if not path.is_dir():
        raise RoomierError("run", str(path), "must be a folder", action)
    if (path / FILE_NAME).is_file() or is_run_folder(path):
        return path
    runs = sorted(
        (each for each in path.iterdir() if each.is_dir() and is_run_folder(each)),
        key=lambda each: int(each.name.rpartition("_")[2]),
    )
    if not runs:
        problem = "contains no run, because it has neither forecast.json nor a folder version_N"
        raise RoomierError("run", str(path), problem, action)
    return next((each for each in reversed(runs) if (each / FILE_NAME).is_file()), runs[-1])


def rates_of(folder: Path) -> dict[str, float]:
    """Return the last throughput that the run logged, keyed by metric name; empty if the run logged no throughput."""
    path = folder / _METRICS
    found: dict[str, float] = {}
    if not path.exists():
        return found
    try:
        for row in lines_of(path):
            with suppress(ValueError):  # the last row of a killed run can be incomplete
                values = parse_json(row)
                if isinstance(values, dict):
                    found.update({name: values[name] for name in _RATES if isinstance(values.get(name), (int, float))})
    except OSError as error:
        raise RoomierError("run", str(path), f"cannot be read: {error.strerror}", "Move the file") from None
    return found


def table(folder: Path, record: ForecastRecord) -> Table:
    """Return a table of the forecast and the measured bytes at the peak, by kind."""
    from rich.table import Table
    from rich.text import Text

    from roomier.planner.choice import words_of

    forecast, worst = record.forecast, record.worst
    whose = "" if len(record.ranks) == 1 else f", rank {worst.rank}, the largest of {len(record.ranks)} ranks"
    found = Table(
        title=Text(f"{folder}: {words_of(forecast.plan, forecast.micro_batch)}\nstep {record.step}{whose}"),
        title_justify="left",
        box=None,
    )
    found.add_column("at the peak of a step")
    for name in ("forecast", "measured", "difference"):
        found.add_column(name, justify="right")
    expected, measured = forecast.bytes_by_kind, worst.peak.peak
    for kind in dict.fromkeys((*expected, *measured)):
        if expected.get(kind) or measured.get(kind):
            found.add_row(kind.value.replace("_", " "), *_cells(expected.get(kind, 0), measured.get(kind, 0)))
    found.add_row("all tensors", *_cells(forecast.tensor_bytes, worst.peak.peak_bytes), style="bold")
    if worst.allocator_bytes is not None:
        found.add_row("allocator", *_cells(record.forecast_bytes, worst.allocator_bytes), style="bold")
    for name, count in forecast.fixed_bytes.items():
        found.add_row(f"outside tensors: {name}", format_bytes(count, 2), "", "")
    return found


def _cells(forecast_bytes: int, measured_bytes: int) -> tuple[str, str, str]:
    difference = forecast_bytes - measured_bytes
    sign = "+" if difference > 0 else "-" if difference < 0 else ""
    return format_bytes(forecast_bytes, 2), format_bytes(measured_bytes, 2), f"{sign}{format_bytes(abs(difference), 2)}"


def _rate_lines(rates: dict[str, float]) -> list[str]:
    words = {"samples_per_s": "samples/s", "tokens_per_s": "tokens/s"}
    texts = [f"{format_count(rates[name])} {word}" for name, word in words.items() if name in rates]
    if "model_flops_per_s" in rates:
        texts.append(f"{rates['model_flops_per_s'] / 1e12:.3g} model TFLOP/s")
    if "mfu" in rates:
        texts.append(f"{rates['mfu']:.1%} of the devices' peak".replace("%", " %"))
    return [f"speed: {', '.join(texts)}"] if texts else []


def _write_page(path: Path, folder: Path, record: ForecastRecord, rates: dict[str, float]) -> None:
    from roomier.planner.report.page import page_of_record

    facts: dict[str, Any] = {"Run": str(folder)}
    lines = _rate_lines(rates)
    if lines:
        facts["Speed"] = lines[0].removeprefix("speed: ")
    try:
        path.write_text(page_of_record(record, facts), encoding="utf-8")
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise RoomierError("--html", str(path), problem, "Use a file in an existing folder") from error


def _parser(verb: str) -> PlainParser:
    parser = PlainParser(
        prog=f"roomier {verb}",
        description="Compare the forecast of a run with the measurement of one of its steps.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, help="a run folder, or a folder of runs, whose newest run is used")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write the forecast and the measurement to an HTML page that works without a network",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object with all values")
    return parser
