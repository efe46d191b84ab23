"""One rank of ``roomier bench planner``, which runs as ``python -m roomier.bench.planner_ranks FOLDER SETTINGS``.

Each rank forecasts its share of the cases. Then all ranks run all cases together.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from roomier.api.adapt import as_module
from roomier.bench.planner_cases import Case
from roomier.bench.planner_models import MODELS
from roomier.bench.planner_truth import measured_peak
from roomier.core.errors import RoomierError
from roomier.core.ranks import Ranks
from roomier.core.tree import batch_size_of
from roomier.core.world import World
from roomier.planner.dry_runs.budget_estimates import TYPICAL_DEVICE
from roomier.planner.dry_runs.dry_run import dry_run
from roomier.planner.hardware.this_machine import this_machine
from roomier.planner.workload import Workload


def run(cases: list[Case], ranks: Ranks) -> list[dict[str, Any]]:
    """Return a row for each case: the forecast, the measured peak of the rank with the largest peak, and the error."""
    world = ranks.world
    own = {number: _forecast(case) for number, case in enumerate(cases) if number % world.size == world.rank}
    forecasts: dict[int, dict[str, Any]] = {}
    for each in ranks.gather(own):
        forecasts |= each
    return [{**case.as_dict(), **_measured(case, forecasts[number], ranks)} for number, case in enumerate(cases)]


def _forecast(case: Case) -> dict[str, Any]:
    torch.manual_seed(0)
    network, batch = MODELS[case.network]()
    module = as_module(network)
    try:
        plan = case.plan()
        device = this_machine(1).device if plan.activation.policy == "budget" else TYPICAL_DEVICE
        found = dry_run(Workload(module, batch, batch_size_of(batch)), plan, device=device)
    except RoomierError as refusal:
        return {"refusal": str(refusal)}
    except Exception:
        return {"failure": traceback.format_exc(limit=-3)}
    kinds = {kind.value: count for kind, count in found.peak.peak.items()}
    return {"predicted_bytes": found.peak_bytes, "predicted_by_kind": kinds}


def _measured(case: Case, forecast: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    if "predicted_bytes" not in forecast:
        return forecast
    torch.manual_seed(0)
    network, batch = MODELS[case.network]()
    peaks = ranks.gather(measured_peak(network, batch, case.plan(), ranks))
    peak = max(peaks, key=lambda each: each.total())
    return {
        **forecast,
        "measured_bytes": peak.total(),
        "measured_by_kind": {kind.value: count for kind, count in peak.num_bytes.items()},
        "error": abs(forecast["predicted_bytes"] / peak.total() - 1),
    }


def main(folder: Path, settings: dict[str, Any]) -> None:
    """Run the cases of ``settings`` on this rank. Rank 0 writes ``result.json``."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), settings["ranks"]
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    rows = run([Case(**each) for each in settings["cases"]], Ranks(World(rank, size, rank, 0, size)))
    if rank == 0:
        (folder / "result.json").write_text(json.dumps({"rows": rows}))
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
