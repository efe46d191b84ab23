"""One rank of ``roomier bench offload --memory``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from roomier.bench.offload import batch_of, model_of
from roomier.core.host_memory import give_back_freed
from roomier.plan import plan_from_flags
from roomier.prepared.prepare import prepare

_NUM_WARMUP = 2  # steps in which states and buffers are created


def main(folder: Path, settings: dict[str, Any]) -> None:
    """Train, and write the median step time and the largest peak resident memory of all ranks."""
    with torch.device("meta"):  # so that no rank holds the unsharded model
        network = model_of(settings["width"], settings["layers"], settings["vocab"])
    plan = plan_from_flags(
        strategy={"name": settings["strategy"], "communication": settings["communication"]},
        accelerator="cpu",
        devices=settings["ranks"],
        optimizer={"name": "adamw", "lr": 1e-4},
        gradient_clip_val=1.0,
        offload=settings["offload"],
    )
    engine = prepare(network, plan=plan)
    num_parameters = sum(each.numel() for each in network.parameters())
    batch = batch_of(settings["tokens"], settings["vocab"])
    times_s: list[float] = []
    for step in range(_NUM_WARMUP + settings["steps"]):
        if step == _NUM_WARMUP:
            give_back_freed()
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            times_s.clear()
        start_s = time.perf_counter()
        engine.forward_backward(lambda batch: network(batch[:, :-1], batch[:, 1:])[1], [batch])
        engine.step()
        times_s.append(time.perf_counter() - start_s)
    peaks = engine.ranks.gather(_peak_bytes())
    engine.close()
    if engine.ranks.is_zero:
        result = {"peak_rss_bytes": max(peaks), "step_s": round(median(times_s), 4), "num_parameters": num_parameters}
        (folder / "result.json").write_text(json.dumps(result))


def _peak_bytes() -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
