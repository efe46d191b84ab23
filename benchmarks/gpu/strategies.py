"""Part ``strategies``: the strategies of ``python -m benchmarks strategies`` on all devices of this machine.

With one device, the row compares ``single`` with PyTorch DDP on one rank. The row has the keys of
``python -m benchmarks strategies``, including ``allocator_peak_bytes`` and ``reserved_peak_bytes`` of each strategy.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.gpu.parts import Rows, Setting, Values
from benchmarks.strategies import compare, possible_strategies
from roomier.core.device.resolve import num_devices
from roomier.core.units import format_bytes, format_seconds

_FULL = {"model": "gpt2", "seq_len": 1024, "batch_size": 8, "steps": 5, "repeats": 5}
_TINY = {"model": "gpt-nano", "seq_len": 16, "batch_size": 1, "steps": 1, "repeats": 1}


def rows(setting: Setting) -> Rows:
    """Return a single row, because the strategies are timed in alternation."""
    sizes = _TINY if setting.size == "tiny" else _FULL
    num_ranks = num_devices(setting.device)
    settings = {
        **sizes,
        "precision": "bf16-mixed",
        "ranks": num_ranks,
        "accelerator": setting.accelerator,
        "strategies": possible_strategies("", num_ranks),
    }
    return {f"{sizes['model']}, ranks: {num_ranks}": partial(_row, settings)}


def summary(values: Mapping[str, Any]) -> str:
    """Return step time, ratio to DDP, and peak memory of each strategy as text."""
    return "; ".join(
        f"{row['strategy']} {format_seconds(row['step_s'])} ({row['ratio_to_torch_ddp']:.2f}), "
        f"{format_bytes(row['allocator_peak_bytes'] or row['peak_bytes'])}"
        for row in values["rows"]
    )


def _row(settings: Mapping[str, Any]) -> Values:
    return {**settings, **compare(settings)}
