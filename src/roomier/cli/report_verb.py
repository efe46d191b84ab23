"""``roomier report RUN``: what was forecast for a run, beside what it took."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roomier.cli.plain_parser import PlainParser
from roomier.core.errors import RoomierError
from roomier.core.units import format_bytes, format_count

if TYPE_CHECKING:
    from rich.table import Table

    from roomier.planner.measured.record import Record

_RATES = ("samples_per_s", "tokens_per_s", "model_flops_per_s", "mfu")
_METRICS = "metrics.jsonl"
_WORTH_CALIBRATING = 0.02  # of the peak: forecasts are closer else


def run(verb: str, arguments: Sequence[str]) -> int:
    """A table on standard output, or with ``--json`` one JSON object; with ``--html`` a page as well.

    Raises:
        RoomierError: there is no such run, or no forecast was held against a step of it.
    """
    options = _parser(verb).parse_args(list(arguments))
    folder = find_run(options.run)
    from roomier.planner.measured.record import read_record  # late: --help does not load torch

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
    for line in (*_rate_lines(rates), *record.notes, *_advice(folder, record)):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    if options.html is not None:
        console.print(f"page: {options.html}", highlight=False, soft_wrap=True, markup=False)
    return 0


def find_run(path: Path) -> Path:
    """``path`` where it is a run folder; of a folder of runs the newest that has a forecast, else the newest.

    Raises:
        RoomierError: there is none.
    """
    from roomier.planner.measured.record import FILE_NAME
    from roomier.train.opening.run_folder import is_run_folder

    if not path.is_dir():
        problem = "is not a folder"
        raise RoomierError("run", str(path), problem, "Name a run folder such as runs/version_0, or the folder of all")
    if (path / FILE_NAME).is_file() or is_run_folder(path):
        return path
    runs = sorted(
        (each for each in path.iterdir() if each.is_dir() and is_run_folder(each)),
        key=lambda each: int(each.name.rpartition("_")[2]),
    )
    if not runs:
        problem = "holds no run: no forecast.json, and no folder version_N"
        raise RoomierError("run", str(path), problem, "Name a run folder such as runs/version_0, or the folder of all")
    return next((each for each in reversed(runs) if (each / FILE_NAME).is_file()), runs[-1])


def rates_of(folder: Path) -> dict[str, float]:
    """The last throughput that the run logged, by name; empty where it logged none."""
    path = folder / _METRICS
    found: dict[str, float] = {}
    if not path.is_file():
        return found
    with path.open(encoding="utf-8", errors="replace") as rows:
        for row in rows:
            try:
                values = json.loads(row)
            except ValueError:
                continue  # the last row of a run that was killed
            if isinstance(values, dict):
                found.update({name: values[name] for name in _RATES if isinstance(values.get(name), (int, float))})
    return found


def table(folder: Path, record: Record) -> Table:
    """Bytes by kind at the peak, forecast beside measured."""
    from rich.table import Table
    from rich.text import Text

    from roomier.planner.choice import words_of

    forecast, worst = record.forecast, record.worst
    whose = "" if len(record.ranks) == 1 else f", rank {worst.rank}, the fullest of {len(record.ranks)}"
    found = Table(
        title=Text(f"{folder}: {words_of(forecast.plan, forecast.micro_batch)}\nstep {record.step}{whose}"),
        title_justify="left",
        box=None,
    )
    found.add_column("at the peak of a step")
    for name in ("forecast", "measured", "difference"):
        found.add_column(name, justify="right")
    said, measured = forecast.bytes_by_kind, worst.peak.peak
    for kind in dict.fromkeys((*said, *measured)):
        if said.get(kind) or measured.get(kind):
            found.add_row(kind.value.replace("_", " "), *_cells(said.get(kind, 0), measured.get(kind, 0)))
    found.add_row("all tensors", *_cells(forecast.tensor_bytes, worst.peak.peak_bytes), style="bold")
    if worst.allocator_bytes is not None:
        found.add_row("CUDA's allocator", *_cells(record.forecast_bytes, worst.allocator_bytes), style="bold")
    for name, count in forecast.fixed_bytes.items():
        found.add_row(f"beside tensors: {name}", format_bytes(count, 2), "", "")
    return found


def _cells(forecast_bytes: int, measured_bytes: int) -> tuple[str, str, str]:
    difference = forecast_bytes - measured_bytes
    sign = "+" if difference > 0 else "-" if difference < 0 else ""
    return format_bytes(forecast_bytes, 2), format_bytes(measured_bytes, 2), f"{sign}{format_bytes(abs(difference), 2)}"


def _advice(folder: Path, record: Record) -> list[str]:
    if abs(record.error) < _WORTH_CALIBRATING:
        return []
    return [f"To plan with what was measured: roomier plan --calibrated_by {folder} ..."]


def _rate_lines(rates: dict[str, float]) -> list[str]:
    words = {"samples_per_s": "samples/s", "tokens_per_s": "tokens/s"}
    told = [f"{format_count(rates[name])} {word}" for name, word in words.items() if name in rates]
    if "model_flops_per_s" in rates:
        told.append(f"{rates['model_flops_per_s'] / 1e12:.3g} TFLOP/s of the model")
    if "mfu" in rates:
        told.append(f"{rates['mfu']:.1%} of the devices' peak".replace("%", " %"))
    return [f"speed: {', '.join(told)}"] if told else []


def _write_page(path: Path, folder: Path, record: Record, rates: dict[str, float]) -> None:
    from roomier.planner.report.page import page_of_record

    facts: dict[str, Any] = {"Run": str(folder)}
    lines = _rate_lines(rates)
    if lines:
        facts["Speed"] = lines[0].removeprefix("speed: ")
    try:
        path.write_text(page_of_record(record, facts), encoding="utf-8")
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise RoomierError("--html", str(path), problem, "Name a file in a folder that is there") from error


def _parser(verb: str) -> PlainParser:
    parser = PlainParser(
        prog=f"roomier {verb}",
        description="What was forecast for a run, beside what a step of it took.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, help="a run folder, or the folder of several: then the newest")
    parser.add_argument("--html", type=Path, metavar="FILE", help="draw both on one page, a file that needs no network")
    parser.add_argument("--json", action="store_true", help="print one JSON object: all that is known")
    return parser
