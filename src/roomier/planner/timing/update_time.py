"""Duration of gradient clipping and of the optimizer step. Memory bandwidth limits both, so their duration is computed
from the number of bytes that they move.

[Note: bytes of an update]
Fused AdamW reads a weight, its gradient and its two moments, and writes all of them except the gradient. It therefore
moves seven times the size of a weight, or 28 bytes per element in float32. Optimizers that consist of several
operations read and write tensors in each of them; their bytes were counted with
:class:`~roomier.planner.dry_runs.work.WorkCounter` on torch 2.13. Optimizers that process blocks in a CPU's cache move
few bytes and are limited by computation. For them, the value is the time on one core, expressed as the number of bytes
that fused AdamW moves in that time (GPT of 14 M parameters).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import torch

from roomier.plan import Plan
from roomier.plan.choices import OPTIMIZERS, averages_itself
from roomier.plan.levers import lever_that_frees_gradients, rounding_in_force
from roomier.planner.dry_runs.work import Work, WorkKey
from roomier.planner.hardware.machine import Device, Machine
from roomier.planner.memory.walk import Layout, own_bytes
from roomier.planner.memory.weights import Unit, Weight
from roomier.planner.timing.collective_time import all_reduce_s, gather_s
from roomier.planner.timing.compute_time import Duration, duration, rate_of
from roomier.planner.timing.traffic import shard_group


@dataclass(frozen=True)
class Moved:
    """Bytes that an optimizer moves per element of a weight.

    Attributes:
        cuda_bytes: bytes read and written per element on a GPU.
        cpu_bytes: time per element on a CPU, in bytes that a fused AdamW moves in this time (28 for AdamW itself).
        num_operations: number of operations for each tensor; 0 for a fused optimizer, which runs one operation for all
        tensors.
        itemsize: element size that the bytes refer to. They are scaled to the actual element size.
    """

    cuda_bytes: float
    cpu_bytes: float
    num_operations: float = 0.0
    itemsize: int = 4


_CAUTIOUS = Moved(156, 131, 24)  # unfused AdamW, which reads the moments again to count elements
_MOMENTUM_BYTES = 8  # momentum of SGD, read and written
# AdamW and Lion with bfloat16 weights are not fused. Rounding takes most of their time.
_ROUNDED = {
    ("adamw", "split"): Moved(146, 121, 80, 2),
    ("adamw", "stochastic"): Moved(194, 169, 138, 2),
    ("lion", "split"): Moved(106, 84, 59, 2),
    ("lion", "stochastic"): Moved(154, 132, 117, 2),
}
_MUON_STEPS = 5
# Host times as multiples of the lightest operation. A step of fused AdamW took 22 times as long as the lightest
# operation, plus 2 to 3 times for each of 16 to 54 weights. An update in the backward pass, which updates one weight at
# a time, took 7 times as long for each weight (6.1 to 8; 10 for convolutions). Process times on one core of an Intel
# Xeon, torch 2.13.
_OPERATIONS_OF_STEP = 22
_OPERATIONS_OF_WEIGHT = {"none": 2, "exact": 7}


@dataclass(frozen=True)
class Update:
    """Duration of the optimizer update at the end of a step.

    Attributes:
        compute_s: duration of gradient clipping and of the optimizer step.
        exchange_s: duration of communication during the update, which does not overlap with computation.
    """

    compute_s: float
    exchange_s: float = 0.0


def update_time(
    units: Sequence[Unit],
    plan: Plan,
    machine: Machine,
    layout: Layout,
    *,
    blocks: Sequence[str] = (),
    work: Mapping[WorkKey, Work] | None = None,
) -> Update:
    """Return the duration of the optimizer update in one step, for this rank's shard of the weights.

    Args:
        units: units of the network.
        plan: plan that specifies the optimizer and the clipping.
        machine: machine that the forecast is for.
        layout: how the weights are sharded.
        blocks: names of the blocks, which contain the matrices that Muon updates.
        work: counted work, whose phase ``"update"`` is used if the module configures its own optimizer. If the phase is
            missing, fused AdamW is assumed.
    """
    device = machine.device
    counted = Work()
    for (phase, _), each in (work or {}).items():
        counted += each if phase == "update" else Work()
    if plan.optimizer.name is None and counted.num_operations:
        return Update(duration(counted, device).on(device), _clipping_exchange_s(plan, machine, layout))
    trained = [each for unit in units for each in unit.weights if each.is_trained]
    prefixes = tuple(f"{block}." for block in blocks)
    of_muon = [
        plan.optimizer.name == "muon" and len(each.shape) == 2 and each.name.startswith(prefixes) for each in trained
    ]
    hidden = list(compress(trained, of_muon))
    others = [each for each, is_hidden in zip(trained, of_muon, strict=True) if not is_hidden]
    found = _clipping(trained, plan, layout) + _started(len(trained), plan)
    found += _moved(others, _moved_by(plan, is_hidden=False), layout, device.kind)
    if hidden:
        found += _moved(hidden, _moved_by(plan, is_hidden=True), layout, device.kind)
    seconds = _seconds(found, device)
    if hidden:
        seconds += sum(_muon_flops(each.shape) for each in hidden) / rate_of(torch.bfloat16, device)
    exchange_s = _clipping_exchange_s(plan, machine, layout)
    group = shard_group(plan)
    if hidden and layout.is_sharded:  # full matrices are all-gathered before their update
        num_bytes = [math.prod(each.shape) * each.dtype.itemsize for each in hidden]
        exchange_s += sum(gather_s(each, group, machine) for each in num_bytes)
    if layout.is_sharded:
        exchange_s += sum(all_reduce_s(size, group, machine) for size in _all_reduced_bytes(plan, trained))
    if averages_itself(plan.optimizer.name):
        num_bytes_all = OPTIMIZERS[plan.optimizer.name].sent_bytes * sum(math.prod(each.shape) for each in trained)
        exchange_s += 2 * gather_s(num_bytes_all, group, machine)
    return Update(seconds, exchange_s)


def _all_reduced_bytes(plan: Plan, trained: Sequence[Weight]) -> list[int]:
    """Return the bytes of each all-reduce in the update of sharded parameters."""
    if plan.optimizer.name == "adafactor":  # sends column means, then norms of updates
        num_columns = sum(each.shape[1] for each in trained if len(each.shape) == 2)
        return [4 * (num_columns + 2 * len(trained)), 4 * len(trained)]
    return [8 * len(trained)] if _is_cautious(plan) else []  # counts of elements


def _is_cautious(plan: Plan) -> bool:
    return plan.optimizer.name == "adamw" and bool(plan.optimizer.options.get("cautious"))


def _seconds(work: Work, device: Device) -> float:
    # Updates have a different memory access pattern than copies, so the measured rate of updates is used if available.
    rate = device.update_bytes_per_s or device.memory_bytes_per_s
    return Duration(work.other_bytes / rate, work.num_operations * device.operation_s).on(device)


def _started(num_weights: int, plan: Plan) -> Work:
    of_weight = _OPERATIONS_OF_WEIGHT["none" if lever_that_frees_gradients(plan) is None else "exact"]
    return Work(num_operations=_OPERATIONS_OF_STEP + of_weight * num_weights)


def _moved_by(plan: Plan, *, is_hidden: bool) -> Moved:
    name = plan.optimizer.name or "adamw"
    if name == "muon" and not is_hidden:
        name = "adamw"
    rounded = _ROUNDED.get((name, rounding_in_force(plan) or ""))
    if rounded is not None:
        return rounded
    if _is_cautious(plan):
        return _CAUTIOUS
    costs = OPTIMIZERS[name]
    moved = Moved(costs.cuda_bytes, costs.cpu_bytes, costs.num_operations)
    if name == "sgd" and plan.optimizer.options.get("momentum"):
        moved = Moved(moved.cuda_bytes + _MOMENTUM_BYTES, moved.cpu_bytes + _MOMENTUM_BYTES)
    return moved


def _moved(weights: Sequence[Weight], moved: Moved, layout: Layout, kind: str) -> Work:
    of_weight = moved.cpu_bytes if kind == "cpu" else moved.cuda_bytes
    num_bytes = sum(own_bytes(each, layout) / moved.itemsize * of_weight for each in weights)
    return Work(other_bytes=num_bytes, num_operations=moved.num_operations * len(weights) + 1)


def _clipping(weights: Sequence[Weight], plan: Plan, layout: Layout) -> Work:
    shard_bytes = sum(own_bytes(each, layout) for each in weights)
    num_passes = 0
    if plan.batch.gradient_clip_val is not None:
        num_passes += 3 if plan.batch.clips_norm else 2  # the norm reads gradients; scaling reads and writes them
    if plan.precision.mode == "16-mixed" and num_passes:
        num_passes += 2  # unscaling
    num_operations = 2 * len(weights) if num_passes else 0
    return Work(other_bytes=num_passes * shard_bytes, num_operations=num_operations)


def _clipping_exchange_s(plan: Plan, machine: Machine, layout: Layout) -> float:
    clips = plan.batch.clips_norm and layout.is_sharded
    return all_reduce_s(4, shard_group(plan), machine) if clips else 0.0


def _muon_flops(shape: tuple[int, ...]) -> float:
    """Return the floating-point operations of the Newton-Schulz iterations: ``X X^T``, the square of this product, and
    the multiplication of both with ``X``."""
    short, long = sorted(shape)
    return _MUON_STEPS * (4 * short * short * long + 2 * short**3)
