"""How long clipping and the optimizer take: both are limited by memory, so by the bytes they move.

[Note: bytes of an update]
Fused AdamW reads a weight, its gradient and two moments, and writes all but the gradient: seven times the size of a
weight, 28 bytes in float32. Optimizers that are made of several operations read and write once for each; their bytes
are those operations', counted with :class:`~roomier.planner.dry_runs.work.WorkCounter` on torch 2.13. Those that work
on a CPU's cache, piece by piece, move few bytes and compute much; there the figure is the time they take on one core,
in the bytes that fused AdamW moves in that time (GPT of 14 M parameters; ``bench/step_time.py`` measures it).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from roomier.hardware.machine import Device, Machine
from roomier.memory.walk import Layout, own_shape
from roomier.memory.weights import Unit, Weight
from roomier.plan import Plan
from roomier.plan.lever_rules import rounding_in_force
from roomier.planner.dry_runs.work import Part, Work
from roomier.planner.timing.collective_time import all_reduce_s, gather_s
from roomier.planner.timing.compute_time import Duration, duration, rate_of
from roomier.planner.timing.traffic import shard_group


@dataclass(frozen=True)
class Moved:
    """What an optimizer moves of a weight.

    Attributes:
        cuda_bytes, cpu_bytes: read and written.
        num_operations: that are started for each tensor; one of a fused optimizer is for all.
        itemsize: of the weight; of other sizes the bytes are in proportion.
    """

    cuda_bytes: float
    cpu_bytes: float
    num_operations: float = 0.0
    itemsize: int = 4


_FUSED_ADAMW = Moved(28, 28)
_MOVED = {
    "adamw": _FUSED_ADAMW,
    "adam": _FUSED_ADAMW,
    "sgd": Moved(12, 14),
    "rmsprop": Moved(56, 57, 6),
    "adagrad": Moved(48, 57, 6),
    "nadam": Moved(92, 111, 13),
    "radam": Moved(116, 116, 14),
    "adafactor": Moved(68, 164, 16),
    "lion": Moved(44, 49, 20),
    "adamw8bit": Moved(16, 60, 11),  # weight, gradient and weight again; two codes read and written
    "adamw4bit": Moved(14, 60, 11),
    "muon": Moved(48, 48, 7),  # of hidden matrices, beside their products
    "onebit_adam": Moved(140, 140, 20),
}
_MOMENTUM_BYTES = 8  # of SGD with momentum: read and written
# AdamW and Lion of bfloat16 weights, which are not fused: rounding takes most of it.
_ROUNDED = {
    ("adamw", "split"): Moved(146, 121, 80, 2),
    ("adamw", "stochastic"): Moved(194, 169, 138, 2),
    ("lion", "split"): Moved(106, 84, 59, 2),
    ("lion", "stochastic"): Moved(154, 132, 117, 2),
}
_SIGN_BYTES = 0.15625  # of 1-bit Adam on its way: a bit, and a float32 for each 128 (docs/design/communication.md)
_MUON_STEPS = 5
# In lightest operations: a step of fused AdamW took 22 and 2 to 3 for each of 16 to 54 weights; done in the backward, a
# weight at a time, 7 for each (6.1 to 8; convolutions 10), in process time on one core of an Intel Xeon, torch 2.13.
_OPERATIONS_OF_STEP = 22
_OPERATIONS_OF_WEIGHT = {"none": 2, "exact": 7}


@dataclass(frozen=True)
class Update:
    """The end of a step.

    Attributes:
        compute_s: clipping and the optimizer.
        exchange_s: what ranks tell each other meanwhile; nothing hides it.
        sent_bytes: by this rank.
    """

    compute_s: float
    exchange_s: float = 0.0
    sent_bytes: float = 0.0


def update_time(
    units: Sequence[Unit],
    plan: Plan,
    machine: Machine,
    layout: Layout,
    *,
    blocks: Sequence[str] = (),
    work: Mapping[Part, Work] | None = None,
) -> Update:
    """Of one optimizer step, on this rank's part of the weights.

    Args:
        blocks: names of the blocks; Muon's matrices are in them.
        work: where the module configures its optimizer itself, what was counted in phase ``"update"``; without such a
            count fused AdamW is assumed.
    """
    device = machine.device
    counted = Work()
    for (phase, _), each in (work or {}).items():
        counted += each if phase == "update" else Work()
    if plan.optimizer.name is None and counted.num_operations:
        return Update(duration(counted, device).on(device), *_clipping_exchange(plan, machine, layout))
    trained = [each for unit in units for each in unit.weights if each.is_trained]
    hidden = [each for each in trained if plan.optimizer.name == "muon" and _is_hidden(each, blocks)]
    others = [each for each in trained if each not in hidden] if hidden else trained
    found = _clipping(trained, plan, layout) + _started(len(trained), plan)
    found += _moved(others, _moved_by(plan, is_hidden=False), layout, device.kind)
    if hidden:
        found += _moved(hidden, _moved_by(plan, is_hidden=True), layout, device.kind)
    seconds = _seconds(found, device)
    if hidden:
        seconds += sum(_muon_flops(each.shape) for each in hidden) / rate_of(torch.bfloat16, device)
    exchange_s, sent_bytes = _clipping_exchange(plan, machine, layout)
    group = shard_group(plan)
    if hidden and layout.is_cut:  # whole matrices are gathered before their update
        num_bytes = [math.prod(each.shape) * each.dtype.itemsize for each in hidden]
        exchange_s += sum(gather_s(each, group, machine) for each in num_bytes)
        sent_bytes += group.share_sent * sum(num_bytes)
    if plan.optimizer.name == "onebit_adam":
        num_bytes_all = _SIGN_BYTES * sum(math.prod(each.shape) for each in trained)
        exchange_s += 2 * gather_s(num_bytes_all, group, machine)
        sent_bytes += 2 * group.share_sent * num_bytes_all
    return Update(seconds, exchange_s, sent_bytes)


def _seconds(work: Work, device: Device) -> float:
    # Updates touch memory in a way of their own; where that was measured, it counts.
    rate = device.update_bytes_per_s or device.memory_bytes_per_s
    return Duration(work.other_bytes / rate, work.num_operations * device.operation_s).on(device)


def _started(num_weights: int, plan: Plan) -> Work:
    of_weight = _OPERATIONS_OF_WEIGHT["none" if plan.optimizer.step_in_backward == "none" else "exact"]
    return Work(num_operations=_OPERATIONS_OF_STEP + of_weight * num_weights)


def _moved_by(plan: Plan, *, is_hidden: bool) -> Moved:
    name = plan.optimizer.name or "adamw"
    if name == "muon" and not is_hidden:
        return _FUSED_ADAMW
    rounded = _ROUNDED.get((name, rounding_in_force(plan) or ""))
    if rounded is not None:
        return rounded
    moved = _MOVED.get(name, _FUSED_ADAMW)
    if name == "sgd" and plan.optimizer.options.get("momentum"):
        moved = Moved(moved.cuda_bytes + _MOMENTUM_BYTES, moved.cpu_bytes + _MOMENTUM_BYTES)
    return moved


def _moved(weights: Sequence[Weight], moved: Moved, layout: Layout, kind: str) -> Work:
    of_weight = moved.cpu_bytes if kind == "cpu" else moved.cuda_bytes
    num_bytes = sum(_own_elements(each, layout) * each.dtype.itemsize / moved.itemsize * of_weight for each in weights)
    return Work(other_bytes=num_bytes, num_operations=moved.num_operations * len(weights) + 1)


def _clipping(weights: Sequence[Weight], plan: Plan, layout: Layout) -> Work:
    own_bytes = sum(_own_elements(each, layout) * each.dtype.itemsize for each in weights)
    num_passes = 0
    if plan.batch.gradient_clip_val is not None:
        num_passes += 3 if plan.batch.clips_norm else 2  # the norm reads; the factor reads and writes
    if plan.precision.mode == "16-mixed" and num_passes:
        num_passes += 2  # the loss scale is taken out before
    num_operations = 2 * len(weights) if num_passes else 0
    return Work(other_bytes=num_passes * own_bytes, num_operations=num_operations)


def _clipping_exchange(plan: Plan, machine: Machine, layout: Layout) -> tuple[float, float]:
    if not (plan.batch.clips_norm and layout.is_cut):
        return 0.0, 0.0
    group = shard_group(plan)
    return all_reduce_s(4, group, machine), 2 * group.share_sent * 4


def _is_hidden(weight: Weight, blocks: Sequence[str]) -> bool:
    return len(weight.shape) == 2 and any(weight.name.startswith(f"{block}.") for block in blocks)


def _muon_flops(shape: tuple[int, ...]) -> float:
    """Of Newton and Schulz's iterations: ``X X^T``, its square, and their product with ``X`` (``optim/muon.py``)."""
    short, long = sorted(shape)
    return _MUON_STEPS * (4 * short * short * long + 2 * short**3)


def _own_elements(weight: Weight, layout: Layout) -> int:
    return math.prod(own_shape(weight.shape, layout))
