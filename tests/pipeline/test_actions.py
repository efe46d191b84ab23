"""A fit runs the actions of its schedule, and its graphs and messages are those of the schedule and of the trace."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from roomier.plan import plan_from_flags
from roomier.planner.dry_runs.staged import _sent_bytes
from roomier.planner.formula.stages import traced_stages
from roomier.planner.workload import Workload
from roomier.techniques.pipeline.schedule import SCHEDULES
from tests.pipeline.test_loop import Net, loader, trainer_of
from tests.ranks.pool import RankPool

NUM_MICRO_BATCHES = 5


@dataclass(eq=False)
class Saved:
    """A tensor that autograd saves for the backward pass of a micro-batch."""

    index: int
    tensor: Tensor


class Observed(Net):
    """Module that records each pass: its direction, the graphs that exist after it, and the bytes that it sends."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[list[Any]] = []
        self.saved: weakref.WeakSet[Saved] = weakref.WeakSet()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.passes.append([True, 0, 0])
        self.passes[-1][1] = {each.index for each in self.saved} | {batch_idx}
        with saved_tensors_hooks(partial(self._save, batch_idx), lambda saved: saved.tensor):
            return nn.functional.mse_loss(self(batch[0]), batch[1])

    def _save(self, index: int, tensor: Tensor) -> Saved:
        saved = Saved(index, tensor)
        self.saved.add(saved)
        return saved

    def on_after_backward(self) -> None:
        self.passes.append([False, {each.index for each in self.saved}, 0])


def passes(folder: str, num_stages: int, schedule: str) -> list[tuple[bool, int, int]]:
    """Return the direction, the number of graphs and the sent bytes of each pass of a step."""
    net, isend = Observed(), dist.isend

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        net.passes[-1][2] += tensor.nbytes
        return isend(tensor, *args, **kwargs)

    dist.isend = counting
    strategy = {"name": "ddp", "pipeline_parallel_size": num_stages, "schedule": schedule}
    options = {"accumulate_grad_batches": NUM_MICRO_BATCHES, "max_steps": 1, "enable_checkpointing": False}
    trainer_of(folder, num_stages, strategy=strategy, **options).fit(net, loader())
    return [(is_forward, len(graphs), num_bytes) for is_forward, graphs, num_bytes in net.passes]


@pytest.mark.parametrize(("num_stages", "schedule"), [(2, "gpipe"), (4, "1f1b")])
def test_a_fit_runs_its_schedule(on_ranks: RankPool, tmp_path: Path, num_stages: int, schedule: str) -> None:
    found = on_ranks(num_stages, passes, str(tmp_path), num_stages, schedule)[::-1]
    strategy = {"name": "ddp", "pipeline_parallel_size": num_stages, "schedule": schedule}
    plan = plan_from_flags(strategy=strategy, devices=num_stages, accelerator="cpu", precision="64-true")
    workload = Workload.of(Net(), next(iter(loader())))
    sent = [*_sent_bytes(*traced_stages(workload, plan)), 0]
    for stage, of_stage in enumerate(found):
        expected, graphs = [], 0
        for action in SCHEDULES[schedule](stage, num_stages, 1, NUM_MICRO_BATCHES):
            graphs += 1 if action.is_forward else -1
            num_bytes = sent[stage] if action.is_forward else sent[stage - 1] if stage else 0
            expected.append((action.is_forward, graphs, num_bytes))
        assert of_stage == expected, stage
