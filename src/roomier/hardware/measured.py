"""What was measured of this machine, as a value, and where it is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from roomier.core.log import notice
from roomier.hardware import cache
from roomier.hardware.host import cpu_model, host_name, threads_of_rank

_SECTION = "measured"


@dataclass(frozen=True)
class Circumstances:
    """What a measurement holds for, and for nothing else.

    Attributes:
        device: its name; of a CPU its model.
        num_ranks: how many processes computed at once.
        num_threads: of each of them.
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
    """Rates of one rank while all ranks are at work; bytes and operations per second, and seconds.

    Attributes:
        is_quick: in about a second, in the process that asked: no disk, no exchanges.
        update_bytes_per_s, host_bytes_per_s: None where they were not measured.
        gather, reduce: bytes that one rank sends per second, and seconds before the first; None for one rank.
        disk_read, disk_write: None where they were not measured.
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


def circumstances_of(device: torch.device, num_ranks: int) -> Circumstances:
    """Those of ``num_ranks`` processes on this machine, now."""
    model = cpu_model()
    return Circumstances(
        host=host_name(),
        cpu=model,
        torch=torch.__version__,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else model,
        kind=device.type,
        num_ranks=num_ranks,
        num_threads=threads_of_rank(num_ranks),
    )


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def stored() -> list[Measured]:
    """All that is kept, of whatever circumstances."""
    entries = cache.read(_SECTION)
    if entries is None:
        return []
    try:
        return [_measured(entry) for entry in entries]
    except (TypeError, KeyError, ValueError, AttributeError):
        notice(f"{cache.cache_file()} holds no measurements that can be read; `roomier hardware` writes them anew")
        return []


def store(measured: Sequence[Measured]) -> bool:
    """Keep ``measured`` in place of what was kept of the same circumstances. Returns whether that worked."""
    theirs = [each.circumstances for each in measured]
    kept = [each for each in stored() if each.circumstances not in theirs]
    return cache.write(_SECTION, [asdict(each) for each in (*kept, *measured)])


def _measured(entry: Mapping[str, Any]) -> Measured:
    """The value of one entry.

    Raises:
        TypeError, KeyError, ValueError, AttributeError: it is none.
    """
    rest = {**entry, "circumstances": Circumstances(**entry["circumstances"])}
    rest["flops_per_s"] = {str(dtype): float(rate) for dtype, rate in entry["flops_per_s"].items()}
    for name in ("gather", "reduce"):
        rest[name] = None if entry[name] is None else (float(entry[name][0]), float(entry[name][1]))
    measured = Measured(**rest)
    optional = (measured.update_bytes_per_s, measured.host_bytes_per_s, measured.disk_read, measured.disk_write)
    exchanges = (*(measured.gather or ()), *(measured.reduce or ()))
    given = [rate for rate in (*optional, *exchanges) if rate is not None]
    rates = [*measured.flops_per_s.values(), measured.memory_bytes_per_s, measured.operation_s, *given]
    if "fp32" not in measured.flops_per_s or not all(0 < rate < float("inf") for rate in rates):
        raise ValueError("a rate that is not positive")
    return measured
