"""Forecasts of the stages of a pipeline, compared with the same step on real ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.planner import measured_peak
from benchmarks.training import Trained
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import Plan
from roomier.planner.dry_runs.dry_run import dry_run
from roomier.planner.dry_runs.staged import forecast_of_stages, played_s
from roomier.planner.forecast import StepTime
from roomier.planner.formula.estimate import Estimator
from roomier.planner.formula.stages import traced_stages
from roomier.planner.hardware.this_machine import this_machine
from roomier.planner.workload import Workload
from tests.ranks.pool import RankPool


def model() -> tuple[Trained, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    network = GPT(GPTConfig(64, context=32, num_layers=4, num_heads=2, width=32, dropout=0.0, tied_head=True))
    tokens = torch.randint(64, (2, 33))
    return Trained(network), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def plan_of(schedule: str, num_ranks: int, recompute: str, strategy: str) -> Plan:
    return Plan.from_dict(
        {
            "parallel": {
                "strategy": strategy,
                "accelerator": "cpu",
                "devices": num_ranks,
                "pipeline_parallel_size": 2,
                "schedule": schedule,
                "stages_per_rank": 2 if "interleaved" in schedule else 1,
            },
            "batch": {"accumulate_grad_batches": 4, "gradient_clip_val": 1.0, "seeding": "events"},
            "activation": {"policy": recompute},
            "optimizer": {"name": "adamw"},
        }
    )


def peaks(schedule: str, num_ranks: int, recompute: str, strategy: str) -> tuple[int, int, int]:
    """Return the stage of this rank, and the forecast and the measured peak of its memory."""
    plan, (network, batch) = plan_of(schedule, num_ranks, recompute, strategy), model()
    ranks = Ranks(World(dist.get_rank(), num_ranks, dist.get_rank(), 0, num_ranks))
    workload = Workload.of(network, batch)
    stages = traced_stages(workload, plan)
    run = dry_run(workload, plan, rank=dist.get_rank(), stages=stages)
    mesh = plan.parallel.mesh_on(ranks.world)
    return mesh.stage_index, run.peak_bytes, measured_peak(network, batch, plan, ranks).total()


@pytest.mark.parametrize(
    "case",
    [
        ("1f1b", 2, "none", "ddp"),
        pytest.param(("gpipe", 4, "full", "ddp"), marks=pytest.mark.more),
        pytest.param(("1f1b", 4, "none", "zero2"), marks=pytest.mark.more),
        pytest.param(("1f1b", 4, "none", "zero3"), marks=pytest.mark.more),
        pytest.param(("1f1b", 4, "none", "zero1"), marks=pytest.mark.more),
        ("interleaved_1f1b", 2, "none", "ddp"),
        pytest.param(("interleaved_1f1b", 4, "none", "zero3"), marks=pytest.mark.more),
    ],
    ids=str,
)
def test_the_forecast_of_each_stage_equals_its_peak(on_ranks: RankPool, case: tuple[str, int, str, str]) -> None:
    by_stage: dict[int, set[int]] = {}
    for stage, forecast, measured in on_ranks(case[1], peaks, *case):
        assert forecast == pytest.approx(measured, rel=0.01), stage
        by_stage.setdefault(stage, set()).add(forecast)
    network, batch = model()
    workload, machine = Workload.of(network, batch), this_machine(case[1], 1, "cpu", None)
    found = forecast_of_stages(workload, plan_of(*case), machine, Estimator(workload, machine))
    assert {found.tensor_bytes} == max(by_stage.values(), key=max)
    assert found.time is not None
    assert found.time.bubble_s > 0


def test_forecasts_of_a_split_and_of_two_nodes() -> None:
    network, batch = model()
    workload, machine = Workload.of(network, batch), this_machine(2, 1, "cpu", None)

    def forecast(num_ranks: int, **changes: Any) -> StepTime:
        plan = plan_of("1f1b", num_ranks, "none", "ddp")
        plan = replace(plan, parallel=replace(plan.parallel, **changes))
        found = forecast_of_stages(workload, plan, machine, Estimator(workload, machine)).time
        assert found is not None
        return found

    uneven = forecast(2, split="network.blocks.1")
    assert uneven.compute_s > forecast(2).compute_s
    assert uneven.communication_s == 0  # no rank has the same stage
    assert forecast(2, num_nodes=2).communication_s > 0  # two ranks of each stage sum their gradients


class Scaled(Trained):
    """A model with a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__(model()[0].network)
        self.scale = torch.ones(())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.scale * super().training_step(batch, batch_idx)


def test_the_forecast_of_a_model_on_meta() -> None:
    with torch.device("meta"):
        network = Scaled()
    workload, machine = Workload.of(network, model()[1]), this_machine(2, 1, "cpu", None)
    plan = plan_of("1f1b", 2, "none", "ddp")
    found = forecast_of_stages(workload, plan, machine, Estimator(workload, machine))
    workload = Workload.of(*model())
    assert found.peak_bytes == forecast_of_stages(workload, plan, machine, Estimator(workload, machine)).peak_bytes


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_is_one_micro_batch_for_each_additional_stage(schedule: str) -> None:
    for num_stages in (1, 2, 4):
        passes: list[Any] = [(1.0, 2.0)] * num_stages
        assert played_s(schedule, 8, passes, [0.0] * (num_stages - 1)) == pytest.approx(3.0 * (8 + num_stages - 1))
        if num_stages > 1:  # a stage takes half the time
            interleaved_s = played_s("interleaved_1f1b", 8, passes, [0.0] * (2 * num_stages - 1), 2)
            assert interleaved_s == pytest.approx(3.0 * (8 + (num_stages - 1) / 2))
    slow = [(1.0, 2.0), (2.0, 4.0)]
    assert played_s(schedule, 8, slow, [0.5]) == pytest.approx(1.0 + 0.5 + 8 * 6.0 + 0.5 + 2.0)
