"""``roomier report RUN...``: compare runs, or the forecast of a run with its measurement."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roomier.cli.plain_parser import PlainParser
from roomier.core.errors import RoomierError
from roomier.core.metric_names import printable
from roomier.core.units import format_bytes, format_count, format_seconds
from roomier.storage.remote_path import path_of

if TYPE_CHECKING:
    from rich.table import Table

    from roomier.planner.measured.record import ForecastRecord
    from roomier.planner.report.run_log import RunLog

_MAX_DIFFERENCES = 20


def run(verb: str, arguments: Sequence[str]) -> int:
    """Print the metrics of runs side by side or, for one run with a forecast, compare the forecast and the measurement.
    Print a table, or with ``--json`` one JSON object, to standard output. With ``--html``, also write a page.

    Raises:
        RoomierError: a run does not exist or cannot be read, or no run has metrics or a forecast.
    """
    options = _parser(verb).parse_args(list(arguments))
    folders = list({found.resolve(): found for found in map(find_run, options.run)}.values())
    from roomier.planner.measured.record import FILE_NAME, read_record  # late import: --help must not load torch
    from roomier.planner.report.run_log import METRICS, differences, read_logs

    if len(folders) == 1 and (folders[0] / FILE_NAME).exists():
        read_record(folders[0])  # raises the error of a damaged forecast
    logs = read_logs(folders)
    if not any(log.curves or log.record for log in logs):
        problem = f"has neither metrics ({METRICS}) nor {FILE_NAME}"
        action = "Wait for the first log step, or repeat the run with a smaller log_every_n_steps"
        raise RoomierError("run", ", ".join(map(str, folders)), problem, action)
    if options.html is not None:
        _write_page(options.html, logs)
    record = logs[0].record if len(logs) == 1 else None
    if options.json:
        facts = {"runs": list(map(_facts, logs)), "differences": differences(logs)}
        if record is not None:
            facts = {"run": str(folders[0]), **record.as_dict(), "rates": logs[0].rates}
        print(json.dumps(facts, allow_nan=False))
        return 0
    from rich.console import Console

    console = Console()
    if record is None:
        console.print(runs_table(logs))
        lines = list(_difference_lines(logs))
    else:
        console.print(table(folders[0], record))
        lines = [record.line(), *_rate_lines(logs[0].rates), *record.notes]
    for line in (*lines, *([] if options.html is None else [f"page: {options.html}"])):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    return 0


def find_run(path: Path) -> Path:
    """Return ``path`` if it is a run folder. Otherwise, return the newest run in ``path`` that has a forecast. If no
    run has a forecast, return the newest run.

    Raises:
        RoomierError: ``path`` contains no run.
    """
    from roomier.planner.measured.record import FILE_NAME
    from roomier.planner.report.run_log import METRICS
    from roomier.train.settling.job import is_run_folder

    path = path_of("run", path)
    action = "Pass a run folder such as runs/version_0, or the folder of all runs"
    if not path.is_dir():
        raise RoomierError("run", str(path), "must be a folder", action)
    if (path / FILE_NAME).is_file() or (path / METRICS).is_file() or is_run_folder(path):
        return path
    runs = sorted(
        (each for each in path.iterdir() if each.is_dir() and is_run_folder(each)),
        key=lambda each: int(each.name.rpartition("_")[2]),
    )
    if not runs:
        problem = "contains no run, because it has neither metrics nor a folder version_N"
        raise RoomierError("run", str(path), problem, action)
    return next((each for each in reversed(runs) if (each / FILE_NAME).is_file()), runs[-1])


def runs_table(logs: Sequence[RunLog]) -> Table:
    """Return a table with the last metrics, the throughput and the peak memory of each run."""
    from rich.table import Table
    from rich.text import Text

    from roomier.planner.report.curves import comparison, value_text

    shown = comparison(logs)
    found = Table(box=None, pad_edge=False)
    found.add_column("run", overflow="fold")
    speed = shown["speed"] or ""
    for name in ("steps", *shown["columns"], speed.replace("_per_s", "/s") or "speed", "memory", "time"):
        found.add_column(Text(printable(name)), justify="right", overflow="fold")
    for log in logs:
        cells = [
            printable(log.name),
            str(log.num_steps or "none"),
            *(value_text(name, log.last(name)) for name in shown["columns"]),
            value_text(speed, log.last(speed)),
            "" if log.peak_bytes is None else format_bytes(log.peak_bytes),
            format_seconds(log.logged_s) if log.logged_s else "",
        ]
        found.add_row(*map(Text, cells))
    return found


def _difference_lines(logs: Sequence[RunLog]) -> Iterator[str]:
    from roomier.planner.report.run_log import differences

    found = differences(logs)
    for name, values in list(found.items())[:_MAX_DIFFERENCES]:
        runs = (f"{printable(value)[:80]} ({', '.join(map(printable, names))})" for value, names in values.items())
        yield f"{printable(name)}: {', '.join(runs)}"
    if len(found) > _MAX_DIFFERENCES:
        yield f"{len(found) - _MAX_DIFFERENCES} more settings differ, which --json lists"
    if len(logs) > 1 and not found:
        yield "The hyperparameters and plans of these runs are equal."


def _facts(log: RunLog) -> dict[str, Any]:
    from roomier.loggers.files import json_number

    return {
        "run": str(log.folder),
        "name": log.name,
        "steps": log.num_steps,
        "logged_s": log.logged_s,
        "metrics": {name: json_number(value) for name in log.curves if (value := log.last(name)) is not None},
        "measured_bytes": log.peak_bytes,
    }


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


def _write_page(path: Path, logs: Sequence[RunLog]) -> None:
    from roomier.planner.report.page import page_of_record, page_of_runs

    facts: dict[str, Any] = {"Run": str(logs[0].folder)}
    lines = _rate_lines(logs[0].rates)
    if lines:
        facts["Speed"] = lines[0].removeprefix("speed: ")
    record = logs[0].record if len(logs) == 1 else None
    text = page_of_runs(logs) if record is None else page_of_record(record, facts, logs=logs)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise RoomierError("--html", str(path), problem, "Use a file in an existing folder") from error


def _parser(verb: str) -> PlainParser:
    parser = PlainParser(
        prog=f"roomier {verb}",
        description="Compare runs: their metrics, speed, memory and settings. For one run with a forecast, compare the "
        "forecast with the measurement of one step.",
    )
    parser.add_argument(
        "run",
        type=Path,
        nargs="+",
        help="run folder, or folder of runs, of which the newest is used; or the address of such a folder",
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write the curves, the forecast and the measurement to an HTML page that works offline",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object with all values")
    return parser
