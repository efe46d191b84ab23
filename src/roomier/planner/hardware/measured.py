"""Measured rates of this machine, which are stored in a JSON file in the user's cache folder.

The file is replaced atomically, so it is never incomplete. If two processes write at the same time, one of the results
can be lost.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from roomier.core.device.resolve import device_name
from roomier.core.log import notice
from roomier.core.replacing import replacing
from roomier.core.untrusted import read_json
from roomier.planner.hardware.host import cpu_model, threads_of_rank

_VERSION = 1  # format version of the file


@dataclass(frozen=True)
class Circumstances:
    """Conditions of a measurement. A measurement is valid only under the same conditions.

    Attributes:
        host: network name of the machine.
        cpu: model name of the processor.
        torch: version of torch.
        device: name of the device. For a CPU, or if the driver reports no name, this is the model name of the
            processor.
        kind: type of the device, such as ``"cuda"``.
        num_ranks: number of processes that computed at the same time.
        num_threads: number of threads of each process.
    """

    host: str
    cpu: str
    torch: str
    device: str
    kind: str
    num_ranks: int
    num_threads: int


@dataclass(frozen=True)
class Measured:
    """Rates of one rank, measured while all ranks are busy.

    Attributes:
        circumstances: conditions of the measurement.
        measured_at: time in ISO format, UTC.
        is_quick: True for a measurement of about a second in the calling process, without disk and collectives.
        flops_per_s: rates of matrix products by dtype, in FLOP/s.
        memory_bytes_per_s: memory bandwidth, reads plus writes.
        operation_s: time to start one operation, in seconds.
        update_bytes_per_s, host_bytes_per_s: bandwidth of an optimizer update, and of transfers from host to device;
            None if not measured.
        gather, reduce: bandwidth (bytes that one rank sends per second) and latency (seconds) of an all-gather and a
            reduce-scatter; None if not measured.
        disk_read, disk_write: rates of reads and writes in the folder for offloading, in bytes per second; None if not
            measured.
        disk_both: total rate of simultaneous reads and writes, in bytes per second; None if not measured.
    """

    circumstances: Circumstances
    measured_at: str
    is_quick: bool
    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    operation_s: float
    update_bytes_per_s: float | None = None
    host_bytes_per_s: float | None = None
    gather: tuple[float, float] | None = None
    reduce: tuple[float, float] | None = None
    disk_read: float | None = None
    disk_write: float | None = None
    disk_both: float | None = None


def circumstances_of(device: torch.device, num_ranks: int) -> Circumstances:
    """Return the current conditions for ``num_ranks`` processes on this machine."""
    model = cpu_model()
    return Circumstances(
        host=socket.gethostname(),
        cpu=model,
        torch=torch.__version__,
        device=device_name(device) or model,
        kind=device.type,
        num_ranks=num_ranks,
        num_threads=threads_of_rank(num_ranks),
    )


def now() -> str:
    """Return the current time in ISO format, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def cache_file() -> Path:
    """Return the path of the file in the system's cache folder (``XDG_CACHE_HOME``, ``~/Library/Caches`` or
    ``LOCALAPPDATA``)."""
    if sys.platform == "win32":
        folder = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        folder = Path.home() / "Library" / "Caches"
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "roomier" / "hardware.json"


def stored() -> list[Measured]:
    """Return all stored measurements. If the file cannot be read, print a notice and ignore the file."""
    path = cache_file()
    try:
        content = read_json(path, parse_constant=float)
        if content["version"] != _VERSION:
            raise ValueError("another version of roomier wrote it")
        return [_measured(entry) for entry in content.get("measured", [])]
    except FileNotFoundError:
        return []
    except (OSError, TypeError, KeyError, ValueError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        notice(f"{path} contains no valid measurements ({why}) and is ignored; `roomier hardware` rewrites it")
        return []


def store(measured: Sequence[Measured]) -> bool:
    """Store ``measured``, and replace stored measurements that were taken under the same conditions. If the file cannot
    be written, print a notice and return False."""
    replaced = [each.circumstances for each in measured]
    kept = [each for each in stored() if each.circumstances not in replaced]
    target = cache_file()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as file:
            json.dump({"version": _VERSION, "measured": [asdict(each) for each in (*kept, *measured)]}, file, indent=1)
    except OSError as error:
        notice(f"{target} cannot be written ({error}), so the next run repeats the measurement")
        return False
    return True


def forget() -> bool:
    """Remove the file, and return whether it existed."""
    target = cache_file()
    is_there = target.exists()
    target.unlink(missing_ok=True)
    return is_there


def _measured(entry: Mapping[str, Any]) -> Measured:
    """Convert one stored entry to a :class:`Measured`.

    Raises:
        TypeError, KeyError, ValueError, AttributeError: the entry is invalid.
    """
    rest = {**entry, "circumstances": Circumstances(**entry["circumstances"])}
    for name in ("gather", "reduce"):
        rest[name] = None if entry[name] is None else tuple(entry[name])
    measured = Measured(**rest)
    optional = [measured.update_bytes_per_s, measured.host_bytes_per_s, *(measured.gather or ())]
    optional += [measured.disk_read, measured.disk_write, measured.disk_both, *(measured.reduce or ())]
    required = (*measured.flops_per_s.values(), measured.memory_bytes_per_s, measured.operation_s)
    rates = [*required, *(rate for rate in optional if rate is not None)]
    if "fp32" not in measured.flops_per_s or not all(0 < rate < float("inf") for rate in rates):
        raise ValueError("a rate that is not positive")
    return measured
