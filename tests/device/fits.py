"""Fits of a small GPT on the simulated accelerator and on the CPU, with all values that a test compares."""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from roomier import Callback, Logger, Module, Trainer
from roomier.core.errors import PlanError
from roomier.plan import ActivationPlan
from roomier.planner.dry_runs.confirm import confirm
from roomier.planner.hardware.this_machine import this_machine
from roomier.planner.workload import Workload
from tests.simulator import simulated
from tests.simulator.gpt import CONTEXT, GPT, batches

NUM_STEPS = 5
WIDTH = 256  # large enough that the rounding of allocations is less than 1 % of the bytes
LEARNING_RATE, EPS = 3e-3, 1e-3  # an eps of this size does not amplify the rounding of small gradients
CHECKED_STEPS = range(2, NUM_STEPS - 1)  # the first steps create states, and the last step is a log step


@dataclass
class Fit:
    """Result of a fit on one rank.

    Attributes:
        losses: the losses of the rank's micro-batches.
        weights: the unsharded weights after the fit, on the CPU.
        races: conflicting accesses that no wait orders.
        waits: for each of ``CHECKED_STEPS`` in which the host waits, the number of waits by kind.
        peak_bytes: peak of the allocated bytes on the device from the third step on, without bytes that were allocated
            before the fit.
        forecast_bytes: forecast of the peak, for the rank with the highest peak. 0 on the other ranks.
        least_bytes: the same forecast with full recomputation, if the plan has an activation budget.
    """

    losses: Tensor
    weights: dict[str, Tensor]
    races: list[str] = field(default_factory=list)
    waits: dict[int, dict[str, int]] = field(default_factory=dict)
    peak_bytes: int = 0
    forecast_bytes: int = 0
    least_bytes: int = 0


class Language(Module):
    """A small GPT. ``training_step`` stores its losses without waiting for the device."""

    def __init__(self, *, num_blocks: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = GPT(width=WIDTH, num_blocks=num_blocks, dropout=dropout)
        self.losses: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.network(batch[0])
        self.losses.append(loss.detach())
        return loss


class NoRows(Logger):
    """Logger that discards all rows, so that log steps exist but write no files."""

    name = "none"

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        pass


class Watch(Callback):
    """Callback that counts the waits of the host in ``CHECKED_STEPS``, and the peak of the allocated bytes."""

    reads_parameters = False

    def __init__(self) -> None:
        self.waits: dict[int, dict[str, int]] = {}
        self.peak_bytes = 0
        self._before: dict[str, int] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches:
            return
        waits = simulated.host_waits()
        step = trainer.global_step
        counted = {kind: num - self._before.get(kind, 0) for kind, num in waits.items()}
        if step - 1 in CHECKED_STEPS and any(counted.values()):
            self.waits[step - 1] = {kind: num for kind, num in counted.items() if num}
        if step == CHECKED_STEPS[0]:
            torch.accelerator.reset_peak_memory_stats()
        self._before = waits

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.peak_bytes = torch.accelerator.max_memory_allocated()


def fit(
    accelerator: str,
    keywords: dict[str, Any],
    *,
    num_blocks: int = 2,
    dropout: float = 0.0,
    batch_size: int = 4,
    forecasts: bool = True,
) -> Fit:
    """Fit the GPT, and return the result of this rank. If ``forecasts`` is True, the result includes the forecast of
    the peak."""
    module = Language(num_blocks=num_blocks, dropout=dropout)
    shapes = Workload.of(copy.deepcopy(module), [torch.empty(batch_size, CONTEXT + 1, dtype=torch.int64)])
    watch = [] if accelerator == "cpu" else [Watch()]
    trainer = trainer_of(accelerator, keywords, watch)
    num_batches = NUM_STEPS * trainer.accumulate_grad_batches * trainer.world_size
    data = torch.cat(batches(num_batches, batch_size))
    gc.collect()
    bytes_before = torch.accelerator.memory_allocated()
    trainer.fit(module, DataLoader(TensorDataset(data), batch_size=batch_size))
    result = Fit(torch.stack(module.losses).cpu(), weights_of(module))
    for each in watch:
        result.races, result.waits = simulated.races(), each.waits
        result.peak_bytes = each.peak_bytes - bytes_before
    if forecasts and watch and trainer.is_global_zero:
        machine = this_machine(trainer.plan.parallel.devices, 1, accelerator)
        result.forecast_bytes = confirm(shapes, trainer.plan, machine).tensor_bytes
        if trainer.plan.activation.policy == "budget":
            least = replace(trainer.plan, activation=ActivationPlan("full"))
            result.least_bytes = confirm(shapes, least, machine).tensor_bytes
    return result


def trainer_of(accelerator: str, keywords: dict[str, Any], callbacks: Sequence[Callback] = ()) -> Trainer:
    """Return a Trainer that writes no files and takes ``NUM_STEPS`` steps."""
    return Trainer(
        accelerator=accelerator,
        max_steps=NUM_STEPS,
        logger=NoRows(),
        log_every_n_steps=1000,
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"optimizer": {"name": "adamw", "lr": LEARNING_RATE, "eps": EPS}, **keywords},
    )


def weights_of(module: Module) -> dict[str, Tensor]:
    """Return the unsharded weights on the CPU. Every rank must call this function."""
    full = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in module.state_dict().items()}
    return {name: value.detach().cpu().clone() for name, value in full.items()}


@dataclass
class Comparison:
    """Comparison of a fit on the simulated accelerator with the same fit on the CPU.

    Attributes:
        losses: largest relative difference of a loss.
        weights: largest difference of a weight, relative to the largest weight of its tensor.
        fit: result of the fit on the accelerator, without losses and weights.
    """

    losses: float
    weights: float
    fit: Fit


def compare(keywords: dict[str, Any], sizes: dict[str, int], is_rejected: bool = False) -> Comparison | None:
    """Run the same fit on the simulated accelerator and on the CPU.

    Args:
        keywords: arguments of the Trainer.
        sizes: arguments of ``fit``.
        is_rejected: True to check that the Trainer rejects the arguments, and to return None.
    """
    if is_rejected:
        with pytest.raises(PlanError):
            trainer_of(simulated.DEVICE, keywords)
        return None
    device = fit(simulated.DEVICE, keywords, **sizes)
    with simulated.allowed_host_waits():
        cpu = fit("cpu", keywords, **sizes)
    losses, weights = differences(device, cpu)
    return Comparison(losses, weights, replace(device, losses=torch.empty(0), weights={}))


def differences(one: Fit, other: Fit) -> tuple[float, float]:
    """Return the largest relative differences of the losses and of the weights."""
    assert one.weights.keys() == other.weights.keys()
    losses = float(((one.losses - other.losses).abs() / other.losses.abs()).max())
    weights = max(
        float((one.weights[name].float() - weight.float()).abs().max() / weight.float().abs().max().clamp(min=1e-12))
        for name, weight in other.weights.items()
    )
    return losses, weights
