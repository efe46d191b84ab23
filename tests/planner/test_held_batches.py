"""Number of micro-batches that are on the device at the same time, in loops and engines, and in forecasts."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roomier
from roomier.plan import plan_from_flags
from roomier.planner.dry_runs.dry_run import dry_run
from roomier.planner.formula.estimate import Estimator
from roomier.planner.hardware.spec import machine_of
from roomier.planner.hardware.this_machine import this_machine
from roomier.planner.workload import Workload

BATCH_BYTES = 64 * 1024 * 4


class Moves(roomier.Module):
    """Module that copies each micro-batch in ``transfer_batch_to_device``, as a batch is copied to a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(1024, 1)
        self.moved: list[weakref.ref[Tensor]] = []
        self.num_held: list[int] = []

    def num_alive(self) -> int:
        return sum(each() is not None for each in self.moved)

    def transfer_batch_to_device(self, batch: Tensor, device: torch.device, dataloader_idx: int) -> Tensor:
        self.num_held.append(self.num_alive())
        copied = batch.clone()
        self.moved.append(weakref.ref(copied))
        return copied

    def training_step(self, batch: Tensor) -> Tensor:
        return self.network(batch).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.num_held.append(self.num_alive())


class Widens(roomier.Module):
    """Computation that requires more memory than its batch, as in almost all models."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(1024, 16), *(nn.Tanh() for _ in range(99)))

    def training_step(self, batch: Tensor) -> Tensor:
        return self.network(batch).square().mean()


def test_one_micro_batch_is_moved_at_a_time_and_the_last_is_held_during_the_update(
    make_trainer: Callable[..., Any],
) -> None:
    module = Moves()
    trainer = make_trainer(
        optimizer="sgd", learning_rate=0.1, accumulate_grad_batches=3, max_steps=2, accelerator="cpu"
    )
    trainer.fit(module, [torch.ones(2, 1024)] * 6)
    assert module.num_held == [0, 0, 0, 1] * 2


@pytest.mark.parametrize(("like", "num_held"), [("cpu", 4), ("cuda", 1)])
def test_a_forecast_holds_as_many_micro_batches_as_the_loop(like: str, num_held: int) -> None:
    workload = Workload.of(Widens(), torch.zeros(64, 1024))
    machine = this_machine(1, 1, "cpu") if like == "cpu" else machine_of("a100")
    once = plan_from_flags(optimizer="sgd", accelerator=machine.device.kind)
    several = replace(once, batch=replace(once.batch, accumulate_grad_batches=4))
    before, after = (dry_run(workload, plan, like=like).peak_bytes for plan in (once, several))
    # gradients of earlier micro-batches, in addition to the batches
    gradients = abs(after - before - (num_held - 1) * BATCH_BYTES)
    assert gradients <= 4 * sum(each.numel() for each in workload.module.parameters()) + 64  # and losses
    forecast = Estimator(workload, machine).estimate(several, 64)
    assert forecast.tensor_bytes == pytest.approx(after, rel=1e-3)
