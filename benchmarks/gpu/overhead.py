"""Part ``overhead``: time that the Trainer adds to a step, compared with the same step in a bare PyTorch loop.

The keys of the row have the same meaning as in ``python -m benchmarks overhead`` (docs/design/bench.md). Both loops
move each batch to the device. The step is so small that the device waits for the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks import toy
from benchmarks.gpu.parts import Rows, Setting, Values
from benchmarks.overhead import LOG_INTERVAL, NUM_LOGGED, figures_of, timed
from benchmarks.timing import interleave, median, one_thread

_FULL = {"steps": 1000, "repeats": 5}
_TINY = {"steps": 3 * LOG_INTERVAL, "repeats": 1}


def rows(setting: Setting) -> Rows:
    """Return a single row, because the two loops are timed in alternation."""
    return {"toy step": partial(_row, setting)}


def summary(values: Mapping[str, Any]) -> str:
    """Return the time of a step and the overhead as text."""
    return (
        f"bare loop {values['bare_us']:.0f} us, overhead {values['overhead_us']:.0f} us, one self.log "
        f"{values['log_us']:.1f} us"
    )


def _row(setting: Setting) -> Values:
    sizes = _TINY if setting.size == "tiny" else _FULL
    batches = toy.toy_batches(sizes["steps"])
    blocks = {
        "bare": timed(toy.run_bare, batches, device=setting.device),
        "trainer": timed(toy.run_trainer, batches, accelerator=setting.accelerator),
        "trainer_10_logs": timed(toy.run_trainer, batches, accelerator=setting.accelerator, num_logged=NUM_LOGGED),
    }
    with one_thread():
        samples = interleave(blocks, sizes["repeats"])
    wall = {name: [cost.wall_us for cost in costs] for name, costs in samples.items()}
    cpu = {name: [cost.cpu_us for cost in costs] for name, costs in samples.items()}
    return {
        **sizes,
        "bare_us": median(wall["bare"]),
        **figures_of("trainer", wall, cpu),
        "samples_wall_us": wall,
        "samples_cpu_us": cpu,
    }
