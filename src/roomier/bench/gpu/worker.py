"""The process of one part of ``roomier bench gpu``: ``python -m roomier.bench.gpu.worker SETTINGS``."""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from roomier.bench.gpu.parts import PartModule, Setting
from roomier.bench.gpu.results import COMPLETE, FAILED, INCOMPLETE, MEASURED, UNSUPPORTED, Results
from roomier.core.device.capability import capabilities_of
from roomier.core.device.memory import allocated_bytes, release_cached

# Fraction of the time limit after which no row starts, because the last row can take longer than earlier rows.
_USABLE_SHARE = 0.9
_NUM_LAST_FRAMES = 4


def measure_part(
    name: str,
    module: PartModule,
    setting: Setting,
    results: Results,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Measure the rows of a part that ``results`` does not contain. Append each row, and a final line for the part.

    A row that fails is recorded with its error. A row is started only if the time that remains until 90 % of the time
    limit is at least the duration of the longest row so far.

    Args:
        name: name under which the results file lists the part.
        module: module that implements the part.
        setting: size and device.
        results: file to which the rows are appended.
        limit_s: time limit of the part in seconds, counted from this call.
        clock: function that returns the current time in seconds.
    """
    start_s = clock()
    end_s = start_s + _USABLE_SHARE * limit_s
    finished = results.finished_rows(name)
    device = setting.device
    counts_bytes = capabilities_of(device).has_memory_statistics
    left = {row: measure for row, measure in module.rows(setting).items() if row not in finished}
    failed: list[str] = []
    longest_s = 0.0
    while left and clock() + longest_s <= end_s:
        row = next(iter(left))
        measure = left.pop(row)
        row_start_s = clock()
        before_bytes = allocated_bytes(device) if counts_bytes else None
        values, status = _measured(measure)
        took_s = clock() - row_start_s
        longest_s = max(longest_s, took_s)
        summary = module.summary(values) if status == MEASURED else values.get("unsupported", "failed")
        results.append(
            "row",
            name,
            row=row,
            status=status,
            summary=summary,
            took_s=took_s,
            allocated_before_bytes=before_bytes,
            **values,
        )
        if status == FAILED:
            failed.append(row)
        gc.collect()  # objects of this row
        release_cached(device)
    status = FAILED if failed else INCOMPLETE if left else COMPLETE
    results.append("end", name, status=status, rows_left=list(left), rows_failed=failed, took_s=clock() - start_s)


def _measured(measure: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], str]:
    try:
        values = measure()
    except Exception as error:
        last_frames = traceback.format_exc(-_NUM_LAST_FRAMES)
        return {"error": f"{type(error).__name__}: {error}", "traceback": last_frames}, FAILED
    return values, FAILED if "error" in values else UNSUPPORTED if "unsupported" in values else MEASURED


def main(settings: dict[str, Any]) -> None:
    """Measure one part.

    Args:
        settings: name and module of the part, start time of the part's process, time limit, size, accelerator, path of
            the results file, and the facts that each line of this file contains (see
            :func:`roomier.bench.gpu.results.facts_of`).
    """
    warnings.filterwarnings("ignore")
    measure_part(
        settings["part"],
        cast(PartModule, import_module(settings["module"])),
        Setting(settings["size"], settings["accelerator"]),
        Results(Path(settings["out"]), settings["facts"]),
        settings["limit_s"] - (time.time() - settings["started_s"]),
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
