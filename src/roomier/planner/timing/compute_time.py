"""Duration of computation, estimated with a roofline model from the work that a dry run or a trace has counted.

[Note: roofline]
The duration of matrix products is the longer of two times: the time for their arithmetic and the time to move their
bytes (Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model"). All other operations
are limited by memory bandwidth, even on a CPU, so their duration is the time to move their bytes. In addition, the host
needs time to launch each operation. On a GPU, the host runs ahead, so the longer of the host time and the device time
counts. On a CPU, both run in one thread, so the times are added.

[Note: cost of Python]
:attr:`~roomier.planner.hardware.machine.Device.operation_s` of a CPU is the duration of the lightest operation that
autograd records. Launching an operation of a model takes about four times as long, because its module, its arguments
and its kernel add overhead. This was measured with models of a few thousand parameters, in which other costs are
negligible: each counted operation took 3.7 to 4.3 times as long as the lightest operation in a GPT and a BERT-like
encoder, 2.9 times in an MLP and 6.3 times in a convolutional network (process time on one core of an Intel Xeon, torch
2.13).

Recomputing a block takes as long as 60 counted operations, in addition to the operations of the block itself, because
of hooks, random number generator states and a second pass through the modules of the block. Each operation of the block
also adds overhead in Python, in particular with ``"selective"``, for which Python handles each operation in both
forward passes. The overhead per block was measured in four models with four blocks each, as a multiple of the lightest
operation. For forward passes of 5, 10, 30 and 7 operations per block, it was 188, 360, 510 and 338 with ``"full"``, and
290, 648, 1035 and 449 with ``"selective"``.

In compiled blocks (``compile=True``), fusion reduces the number of bytes that are moved. It is not modeled, because it
has not been measured, so a plan has the same forecast with and without compilation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from roomier.core.errors import RoomierError
from roomier.plan import Plan
from roomier.planner.dry_runs.work import Work, WorkKey
from roomier.planner.hardware.machine import Device
from roomier.techniques.activation.block_forward import Keep
from roomier.techniques.activation.recompute import keeps_of

_RATES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}

_LIGHTEST_OPERATIONS = 4.0
_OPERATIONS_OF_REPEATING = 60.0  # overhead of recomputing a block in each micro-batch, in counted operations
_SEEN_BY_PYTHON = {Keep.INPUT: 1.5, Keep.PRODUCTS: 6.0}  # cost per operation of the block's forward pass, in operations


@dataclass(frozen=True)
class Duration:
    """Duration of an amount of computation on the device and on the host.

    Attributes:
        device_s: time that the device needs for the operations.
        host_s: time that the host needs to launch the operations.
    """

    device_s: float
    host_s: float

    def __add__(self, other: Duration) -> Duration:
        return Duration(self.device_s + other.device_s, self.host_s + other.host_s)

    def on(self, device: Device) -> float:
        """Return the duration in seconds on ``device`` without overlapping work."""
        return self.device_s + self.host_s if device.kind == "cpu" else max(self.device_s, self.host_s)


def duration(work: Work, device: Device, matmul: str = "highest") -> Duration:
    """Return the duration of ``work`` on ``device``.

    Args:
        work: amount of computation.
        device: device on which the operations run.
        matmul: precision of float32 matrix products, which is ``plan.precision.matmul``.

    Raises:
        RoomierError: the rate of a dtype is not known.
    """
    arithmetic_s = sum(flops / rate_of(dtype, device, matmul) for dtype, flops in work.flops.items())
    products_s = max(arithmetic_s, work.product_bytes / device.memory_bytes_per_s)
    device_s = products_s + work.other_bytes / device.memory_bytes_per_s
    lightest = _LIGHTEST_OPERATIONS if device.kind == "cpu" else 1.0  # a GPU's operation_s is a kernel launch time
    return Duration(device_s, lightest * work.num_operations * device.operation_s)


def rate_of(dtype: torch.dtype, device: Device, matmul: str = "highest") -> float:
    """Return the number of floating-point operations per second that matrix products of ``dtype`` achieve.

    A device without 16-bit arithmetic converts the inputs to float32.

    Raises:
        RoomierError: the rate is not known.
    """
    rates = device.flops_per_s
    name = _RATES.get(dtype, str(dtype))
    if name == "fp32" and matmul != "highest":
        # CUDA uses tf32 for both "high" and "medium". A CPU uses bfloat16 for "medium" if it supports bfloat16.
        faster = "tf32" if device.kind == "cuda" else "bf16" if matmul == "medium" else "fp32"
        name = faster if rates.get(faster, 0) > rates["fp32"] else name
    if name in ("bf16", "fp16") and name not in rates:
        name = "fp32"
    if name not in rates:
        action = f"Add flops_per_s[{name!r}] to the description of the device"
        raise RoomierError("hardware", device.name, f"has no known rate of matrix products in {dtype}", action)
    return rates[name] * device.product_efficiency


def second_forward(work: Mapping[WorkKey, Work], keeps: Mapping[str, Keep]) -> dict[WorkKey, Work]:
    """Return the work that the backward pass of each block recomputes, derived from the forward work of a step.

    A block that saves only its input recomputes the full forward pass. A block that saves the results of matrix
    products recomputes all other operations.

    Args:
        work: work of a step, by phase and part.
        keeps: recomputed blocks, and the activations that each block saves.
    """
    return {("backward", place): _again(work["forward", place], keep) for place, keep in keeps.items()}


def repeating(work: Mapping[WorkKey, Work], plan: Plan, keeps: Mapping[str, Keep]) -> dict[WorkKey, Work]:
    """Return the overhead of recomputation, which a dry run does not count; see [Note: cost of Python].

    Args:
        work: work of all micro-batches, by phase and part.
        plan: plan that specifies the number of micro-batches.
        keeps: recomputed blocks, and the activations that each block saves.
    """
    return {("backward", place): _overhead(work["forward", place], keep, plan) for place, keep in keeps.items()}


def recomputed_blocks(
    work: Mapping[WorkKey, Work], plan: Plan, blocks: Sequence[str], chosen: Mapping[str, Keep] | None = None
) -> dict[str, Keep]:
    """Return the recomputed blocks and the activations that each block saves.

    Args:
        work: work of a step, by phase and part.
        plan: plan that contains the activation policy.
        blocks: names of the blocks, in the order of the model.
        chosen: activations that each block saves, as chosen for an activation budget. If None, all blocks are assumed
            to be recomputed in full, as in the first steps of a run with a budget.
    """
    activation = plan.activation
    if activation.policy == "none":
        return {}
    if activation.policy == "budget":
        keeps: Sequence[object] = [Keep.INPUT if chosen is None else chosen.get(place, Keep.ALL) for place in blocks]
    else:
        keeps = keeps_of(activation, len(blocks))
    return {
        place: keep
        for place, keep in zip(blocks, keeps, strict=True)
        if isinstance(keep, Keep) and keep is not Keep.ALL and ("forward", place) in work
    }


def recomputation_ns(forward: Work, keep: Keep, plan: Plan, device: Device) -> int:
    """Return the time per step in nanoseconds that recomputing a block adds.

    Args:
        forward: work of the block's forward pass over all micro-batches.
        keep: activations that the block saves.
        plan: plan that contains the number of micro-batches and the precision of matrix products.
        device: device on which the operations run.
    """
    if keep is Keep.ALL:
        return 0
    work = _again(forward, keep) + _overhead(forward, keep, plan)
    return round(1e9 * duration(work, device, plan.precision.matmul).on(device))


def _again(forward: Work, keep: Keep) -> Work:
    if keep is Keep.PRODUCTS:
        return Work(other_bytes=forward.other_bytes, num_operations=forward.num_operations)
    return forward


def _overhead(forward: Work, keep: Keep, plan: Plan) -> Work:
    hooks = _OPERATIONS_OF_REPEATING * plan.batch.accumulate_grad_batches
    return Work(num_operations=hooks + _SEEN_BY_PYTHON[keep] * forward.num_operations)
