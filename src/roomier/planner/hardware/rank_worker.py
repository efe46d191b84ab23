"""Process of one rank in a measurement of this machine, started with
``python -m roomier.planner.hardware.rank_worker SETTINGS``.

The settings are a JSON string, and the result is a JSON file. All ranks run the same measurement at the same time, so
that each rank has the same share of the machine as in a run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roomier.core.device.capability import capabilities_of
from roomier.core.device.resolve import resolve_device
from roomier.core.exchange import Exchange
from roomier.planner.hardware.measure import DTYPES, RATES, product_rate, seconds_of

_PATIENCE = timedelta(seconds=60)
_WHOLE_BYTES = 2**24  # size of a large collective, similar to a block of a small model
_SMALL_BYTES = 2**10
_REPETITIONS = 8


def main(settings: dict[str, Any]) -> None:
    """Run the measurements and write the result to the file ``settings["result"]``."""
    rank, num_ranks = settings["rank"], settings["num_ranks"]
    device = resolve_device(settings["kind"])
    if device.type != "cpu":
        device = torch.device(device.type, rank)
        torch.accelerator.set_device_index(device)
    if num_ranks > 1:
        dist.init_process_group(
            dist.get_default_backend_for_device(device),
            init_method=Path(settings["store"]).as_uri(),
            rank=rank,
            world_size=num_ranks,
            timeout=_PATIENCE,
        )
    result = {**_alone(device, settings["seconds"]), **(_together(device, num_ranks) if num_ranks > 1 else {})}
    Path(settings["result"]).write_text(json.dumps(result))
    if num_ranks > 1:
        dist.destroy_process_group()


def _alone(device: torch.device, seconds: float) -> dict[str, Any]:
    """Measure the rates of one rank without communication, in about ``seconds`` in total."""
    rates: dict[str, Any] = {}
    for dtype in DTYPES:
        _meet()
        rates[dtype] = product_rate(dtype, device, seconds / 8)
    result: dict[str, Any] = {"flops_per_s": {dtype: rate for dtype, rate in rates.items() if rate is not None}}
    for name, (measure, share) in RATES.items():
        if name != "host_bytes_per_s" or capabilities_of(device).copies_asynchronously:
            _meet()
            result[name] = measure(device, share * seconds)
    return result


def _together(device: torch.device, num_ranks: int) -> dict[str, Any]:
    """Measure large and small collectives. The result contains the time of each repetition in seconds, and the number
    of bytes that a rank sends in one collective."""
    exchange = Exchange()
    result: dict[str, Any] = {}
    for size, num_bytes in (("large", _WHOLE_BYTES), ("small", _SMALL_BYTES)):
        rows = torch.ones(num_ranks, num_bytes // 4 // num_ranks, device=device)
        result[f"{size}_bytes"] = rows.nbytes // num_ranks * (num_ranks - 1)
        result[f"gather_{size}_s"] = _repeated(lambda rows=rows: exchange.all_gather(rows), device)  # type: ignore[misc]
        result[f"reduce_{size}_s"] = _repeated(lambda rows=rows: _reduce_scatter(exchange, rows), device)  # type: ignore[misc]
    return result


def _reduce_scatter(exchange: Exchange, rows: Tensor) -> Tensor:
    """Return the row of this rank, summed over all ranks in the same way as in the engine."""
    if rows.device.type != "cpu":
        result = torch.empty_like(rows[0])
        dist.reduce_scatter_tensor(result, rows)
        return result
    received = exchange.all_to_all(rows)
    result = received[0]
    for other in received[1:]:
        result.add_(other)
    return result


def _repeated(run: Callable[[], object], device: torch.device) -> list[float]:
    seconds = []
    for _ in range(_REPETITIONS + 1):
        _meet()
        seconds.append(seconds_of(run, device))
    return seconds[1:]  # the first repetition is discarded, because it includes connecting the ranks


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
