"""``roomier hardware``: measure this machine, print the results, and store them for planning."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from roomier.cli.plain_parser import PlainParser
from roomier.core.errors import RoomierError
from roomier.core.units import format_bytes
from roomier.techniques.tiers.folder import default_folder

if TYPE_CHECKING:
    from rich.table import Table

    from roomier.planner.hardware.machine import Link, Machine
    from roomier.planner.hardware.measured import Measured

_SECONDS = 4.0  # duration of the measurements on each rank


def run(verb: str, arguments: Sequence[str]) -> int:
    """Measure this machine. Print one table, or with ``--json`` only one JSON object, to standard output.

    Raises:
        RoomierError: an option is invalid, or a measurement failed.
    """
    options = _parser(verb).parse_args(list(arguments))
    from roomier.planner.hardware.measured import cache_file, forget  # late import: --help must not load torch

    if options.forget:
        existed = forget()
        result = {"forgotten": existed, "cache": str(cache_file())}
        text = f"removed {cache_file()}" if existed else f"{cache_file()} does not exist"
        print(json.dumps(result) if options.json else text)
        return 0
    machines, is_kept = _measure(options)
    if options.json:
        print(json.dumps({"cache": str(cache_file()), "is_kept": is_kept, "machines": list(map(asdict, machines))}))
        return 0
    from rich.console import Console

    Console().print(_table(machines))
    print(f"stored in {cache_file()}" if is_kept else "not stored")
    return 0


def _measure(options: argparse.Namespace) -> tuple[list[Machine], bool]:
    """Return a Machine for each number of ranks, and whether the measurements were stored."""
    from roomier.core.device.resolve import num_devices, resolve_device
    from roomier.core.log import notice
    from roomier.planner.hardware.host import load, num_cores
    from roomier.planner.hardware.measured import store
    from roomier.planner.hardware.measuring import measure_quickly, measure_ranks
    from roomier.planner.hardware.this_machine import machine_from

    device = resolve_device(options.accelerator)
    most = 4 * num_cores() if device.type == "cpu" else num_devices(device)
    numbers = [1, 2][: num_cores()] if device.type == "cpu" else [most]
    if options.devices is not None:
        if not 1 <= options.devices <= most:
            action = f"Pass the number of ranks that compute at the same time, from 1 to {most}"
            raise RoomierError("devices", options.devices, f"must be from 1 to {most} on this machine", action)
        numbers = [options.devices]
    folder = Path(options.folder) if options.folder else default_folder()
    if load() > num_cores() / 2:
        notice(f"the load is {load():.1f} on {num_cores()} cores, so measured rates are lower than on an idle machine")
    measured: list[Measured] = []
    for index, num_ranks in enumerate(numbers):
        notice(f"measuring {num_ranks} rank{'s' * (num_ranks > 1)} on {device.type}")
        if options.quick:
            measured.append(measure_quickly(device, num_ranks))
        else:
            measured.append(measure_ranks(device, num_ranks, _SECONDS, folder if index == 0 else None))
    measured = [_with_disk_of(measured[0], each) for each in measured]
    return [machine_from(device, each, each.circumstances.num_ranks, 1) for each in measured], store(measured)


def _with_disk_of(first: Measured, each: Measured) -> Measured:
    """Return ``each`` with the disk rates of ``first``, because the ranks of a node share one disk."""
    return replace(each, disk_read=first.disk_read, disk_write=first.disk_write, disk_both=first.disk_both)


def _table(machines: Sequence[Machine]) -> Table:
    from rich.table import Table

    first = machines[0]
    table = Table(title=first.device.name, title_justify="left", caption=first.source, caption_justify="left")
    table.add_column("per rank, all ranks active")
    for machine in machines:
        table.add_column(f"{machine.num_ranks} rank{'s' * (machine.num_ranks > 1)}", justify="right")
    rows: dict[str, Callable[[Machine], str]] = {
        "memory": lambda each: format_bytes(each.device.memory_bytes),
        **{
            f"matrix products in {dtype}": lambda each, dtype=dtype: _flops(each.device.flops_per_s[dtype])  # type: ignore[misc]
            for dtype in first.device.flops_per_s
        },
        "memory, read and written": lambda each: _rate(each.device.memory_bytes_per_s),
        "optimizer update (AdamW)": lambda each: _rate(each.device.update_bytes_per_s),
        "start of an operation": lambda each: f"{each.device.operation_s * 1e6:.1f} us",
        "all-gather, sent": lambda each: _rate(each.in_node if each.num_ranks > 1 else None),
        "reduce-scatter, sent": lambda each: _rate(each.in_node_reduce),
        "disk, read (all ranks)": lambda each: _rate(each.disk_read),
        "disk, written (all ranks)": lambda each: _rate(each.disk_write),
        "disk, read and written together (all ranks)": lambda each: _rate(each.disk_both),
        "to the host and back": lambda each: _rate(each.to_host),
    }
    for name, cell in rows.items():
        if name != "to the host and back" or first.device.kind != "cpu":
            table.add_row(name, *map(cell, machines))
    return table


def _flops(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:.1f} TFLOP/s" if flops_per_s >= 1e12 else f"{flops_per_s / 1e9:.1f} GFLOP/s"


def _rate(link: Link | float | None) -> str:
    bytes_per_s = link if link is None or isinstance(link, (int, float)) else link.bytes_per_s
    return "-" if bytes_per_s is None else f"{format_bytes(bytes_per_s)}/s"


def _parser(verb: str) -> argparse.ArgumentParser:
    parser = PlainParser(
        prog=f"roomier {verb}",
        description="Measure this machine in less than a minute and store the results for planning.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object with all fields of the machines")
    parser.add_argument(
        "--devices",
        type=int,
        help="number of ranks that compute at the same time; default: 1 and 2 on a CPU, otherwise all GPUs",
    )
    parser.add_argument(
        "--accelerator", default="auto", help="device type, as in the Trainer: auto, cpu, cuda, mps, ..."
    )
    parser.add_argument("--folder", help="folder whose disk is measured; default: the folder for offloading")
    parser.add_argument(
        "--quick", action="store_true", help="measure for only one second, and skip the disk and the communication"
    )
    parser.add_argument("--forget", action="store_true", help="remove the stored results without measuring")
    return parser
