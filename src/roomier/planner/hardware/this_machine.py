"""Description of the current machine, based on stored measurements of ``roomier hardware`` or on a quick
measurement."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from roomier.core.device.memory import total_bytes
from roomier.core.device.resolve import device_name, resolve_device
from roomier.core.disk_space import free_bytes
from roomier.core.errors import RoomierError, TierError
from roomier.planner.hardware import measured as measurements
from roomier.planner.hardware.devices import sheet_of
from roomier.planner.hardware.host import available_memory_bytes, total_memory_bytes
from roomier.planner.hardware.machine import Device, Link, Machine
from roomier.planner.hardware.measured import Circumstances, Measured, circumstances_of
from roomier.planner.hardware.measuring import measure_quickly
from roomier.techniques.tiers.folder import default_folder

# Values that are assumed without a measurement: loopback between processes on one host, and one drive of a typical
# server.
_EXCHANGE = Link(2e9, 2e-4)
_NETWORK = Link(1.25e9, 5e-5)  # assumed to be 10 Gbit/s, because links between machines are never measured
_DISK_READ, _DISK_WRITE, _DISK_LATENCY_S = 1e9, 0.5e9, 1e-4


def this_machine(devices: int = 1, num_nodes: int = 1, accelerator: str = "auto", folder: str | None = None) -> Machine:
    """Return this machine with ``devices`` ranks on each of ``num_nodes`` identical nodes.

    The rates come from the first available source, which the machine's ``source`` names: a measurement that
    ``roomier hardware`` has stored for this host with the same processor, torch version, number of ranks and number of
    threads per rank; the data sheet, for a GPU in the table; or a quick measurement, which takes about one second and
    runs once per process. On a CPU, the memory of a rank is its share of the available host memory.

    Args:
        devices: ranks per node.
        num_nodes: number of nodes.
        accelerator: name of the accelerator, as in the Trainer.
        folder: folder for offloading, whose free space is reported; None means the default folder.

    Raises:
        RoomierError: the machine does not have the requested accelerator.
    """
    device = resolve_device(accelerator)
    machine = machine_from(device, found_or_measured(device, devices), devices, num_nodes)
    return replace(machine, disk_free_bytes=_disk_free_bytes(folder))


def machine_from(device: torch.device, measured: Measured | None, devices: int, num_nodes: int) -> Machine:
    """Create the machine from measured rates.

    Args:
        measured: measured rates; None uses the data sheet of ``device``, which must be a GPU in the table.
    """
    gpu = _gpu(device, devices, num_nodes)
    if measured is None:
        assert gpu is not None
        return gpu
    known = _with_rates(device, measured, gpu)
    exchange, reduce = (None if each is None else Link(*each) for each in (measured.gather, measured.reduce))
    memory = Link(measured.memory_bytes_per_s)
    return Machine(
        device=replace(known, memory_bytes=_memory_bytes(device, devices)),
        devices_per_node=devices,
        num_nodes=num_nodes,
        in_node=exchange or (gpu.in_node if gpu else _EXCHANGE),
        between_nodes=gpu.between_nodes if gpu else _NETWORK,
        to_host=Link(measured.host_bytes_per_s or 12e9, 1e-5) if known.has_own_memory else memory,
        disk_read=Link(measured.disk_read or _DISK_READ, _DISK_LATENCY_S),
        disk_write=Link(measured.disk_write or _DISK_WRITE, _DISK_LATENCY_S),
        host_memory_bytes=total_memory_bytes(),
        source=_source(measured),
        in_node_reduce=reduce,
        disk_both=None if measured.disk_both is None else Link(measured.disk_both, _DISK_LATENCY_S),
    )


def found_or_measured(device: torch.device, num_ranks: int) -> Measured | None:
    """Return the stored measurement for ``num_ranks``. If there is none, return None for a GPU in the table, and a
    quick measurement for other devices.

    The rates of the disk and of collectives in a quick measurement come from another stored measurement of this host,
    if there is one.
    """
    circumstances = circumstances_of(device, num_ranks)
    kept = measurements.stored()
    for each in kept:
        if each.circumstances == circumstances:
            return each
    if device.type == "cuda" and sheet_of(circumstances.device) is not None:
        return None
    return _with_links_of_others(_quick_look(device, circumstances), kept)


@cache
def _quick_look(device: torch.device, circumstances: Circumstances) -> Measured:
    return measure_quickly(device, circumstances.num_ranks)


def _with_links_of_others(quick: Measured, kept: list[Measured]) -> Measured:
    own = quick.circumstances
    here = [each for each in kept if each.circumstances.host == own.host]
    disk = next((each for each in here if each.disk_read is not None), quick)
    alike = [each for each in here if (each.circumstances.kind, each.circumstances.device) == (own.kind, own.device)]
    together = next((each for each in alike if own.num_ranks > 1 and each.gather), quick)
    return replace(
        quick,
        disk_read=disk.disk_read,
        disk_write=disk.disk_write,
        disk_both=disk.disk_both,
        gather=together.gather,
        reduce=together.reduce,
    )


def _with_rates(device: torch.device, measured: Measured, gpu: Machine | None) -> Device:
    rates = dict(measured.flops_per_s)
    # fp8 is not measured. Assume the same fraction of the peak as for bf16.
    if gpu is not None and "fp8" in gpu.device.flops_per_s:
        reached = rates["bf16"] / gpu.device.flops_per_s["bf16"]
        rates["fp8"] = gpu.device.flops_per_s["fp8"] * reached
    return Device(
        name=gpu.device.name if gpu else measured.circumstances.device,
        kind=device.type,
        memory_bytes=0,
        flops_per_s=rates,
        memory_bytes_per_s=measured.memory_bytes_per_s,
        operation_s=measured.operation_s,
        update_bytes_per_s=measured.update_bytes_per_s,
    )


def _gpu(device: torch.device, devices: int, num_nodes: int) -> Machine | None:
    """Return the machine with the values of the data sheet and the actual memory size; None if the device is not in the
    table."""
    sheet = sheet_of(device_name(device) or "") if device.type == "cuda" else None
    if sheet is None:
        return None
    machine = sheet.machine(devices, num_nodes)
    return replace(
        machine,
        device=replace(machine.device, memory_bytes=_memory_bytes(device, devices)),
        host_memory_bytes=total_memory_bytes(),
        source="data sheet of the device (`roomier hardware` measures the device)",
    )


def _memory_bytes(device: torch.device, devices: int) -> int:
    """Return the memory of one rank: the memory of its accelerator or, on a CPU, its share of the available host
    memory.

    Raises:
        RoomierError: the driver of the accelerator does not report its memory.
    """
    if device.type == "cpu":
        return available_memory_bytes() // devices
    found = total_bytes(device)
    if found is None:
        action = "Pass memory_budget, or describe the machine in a file: see `roomier hardware --json`"
        raise RoomierError("accelerator", device.type, "does not report its memory", action)
    return found


def _disk_free_bytes(folder: str | None) -> int | None:
    try:
        return free_bytes(default_folder() if folder is None else Path(folder))
    except (TierError, OSError):  # the run raises an error if the folder is unusable
        return None


def _source(measured: Measured) -> str:
    if not measured.is_quick:
        return f"measured by `roomier hardware` at {measured.measured_at}"
    unknown = [name for name, rate in (("disk", measured.disk_read), ("collectives", measured.gather)) if rate is None]
    if measured.circumstances.num_ranks == 1 and "collectives" in unknown:
        unknown.remove("collectives")
    assumed = f"; {' and '.join(unknown)} assumed" if unknown else ""
    return f"a quick measurement at {measured.measured_at}{assumed}; `roomier hardware` is more accurate"
