"""Duration of computation: a roofline model of the work that a dry run or a trace counted.

[Note: roofline]
Matrix products take the longer of the times for their arithmetic and their bytes (Williams, Waterman and Patterson
2009, "Roofline: an insightful visual performance model"). All other operations take the time to move their bytes,
because memory limits them even on a CPU. The host takes time to launch each operation. On a GPU, the host runs ahead,
so the longer of the two times counts. On a CPU, both run in one thread, so the times are added.

[Note: cost of Python]
:attr:`~roomier.hardware.machine.Device.operation_s` of a CPU is the duration of the lightest operation that autograd
records. Launching an operation of a model takes four times as long, because of its module, its arguments and its
kernel. Models of a few thousand parameters, in which other costs are negligible, took the time of 3.7 to 4.3 lightest
operations for each counted operation (a GPT and a BERT-like encoder; an MLP took 2.9 and a convolutional network 6.3).
These are process times on one core of an Intel Xeon with torch 2.13.

Recomputation of a block costs 60 operations in addition to its computation, for hooks, random states and a second pass
through its modules. Python also handles each operation of the block. With ``"selective"``, it does so in both forwards.
With four blocks, the four models above took the time of 188, 360, 510 and 338 lightest operations per block with
``"full"``, for forwards of 5, 10, 30 and 7 operations, and 290, 648, 1035 and 449 with ``"selective"``.

Fusion in compiled blocks (``compile=True``), which moves fewer bytes, is not modeled, because no factor was measured. A
compiled plan has the same forecast as the plan without compilation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from roomier.activation.block_forward import Keep
from roomier.activation.recompute import keeps_of
from roomier.core.errors import RoomierError
from roomier.hardware.machine import Device
from roomier.plan import Plan
from roomier.planner.dry_runs.work import Part, Work

_RATES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}

_LIGHTEST_OPERATIONS = 4.0
_OPERATIONS_OF_REPEATING = 60.0  # cost of recomputing a block in each micro-batch
_SEEN_BY_PYTHON = {Keep.INPUT: 1.5, Keep.PRODUCTS: 6.0}  # cost per operation of the block's forward, in operations


@dataclass(frozen=True)
class Duration:
    """Duration of some work.

    Attributes:
        device_s: time in which the device computes.
        host_s: time in which the host launches operations.
    """

    device_s: float
    host_s: float

    def on(self, device: Device) -> float:
        """Return the seconds on ``device`` if no other work overlaps."""
        return self.device_s + self.host_s if device.kind == "cpu" else max(self.device_s, self.host_s)


def duration(work: Work, device: Device, matmul: str = "highest") -> Duration:
    """Return the duration of ``work`` on ``device``.

    Args:
        work: amount of computation.
        device: device that computes.
        matmul: precision of float32 matrix products: ``plan.precision.matmul``.

    Raises:
        RoomierError: the rate of a dtype is not known.
    """
    arithmetic_s = sum(flops / rate_of(dtype, device, matmul) for dtype, flops in work.flops.items())
    products_s = max(arithmetic_s, work.product_bytes / device.memory_bytes_per_s)
    device_s = products_s + work.other_bytes / device.memory_bytes_per_s
    lightest = _LIGHTEST_OPERATIONS if device.kind == "cpu" else 1.0  # a GPU's operation_s is already a kernel launch
    return Duration(device_s, lightest * work.num_operations * device.operation_s)


def rate_of(dtype: torch.dtype, device: Device, matmul: str = "highest") -> float:
    """Return the floating-point operations per second that matrix products of ``dtype`` reach.

    A device without 16-bit arithmetic converts to float32.

    Raises:
        RoomierError: the rate is not known.
    """
    rates = device.flops_per_s
    name = _RATES.get(dtype, str(dtype))
    if name == "fp32" and matmul != "highest":
        # CUDA uses tf32 for both other levels. A CPU uses bfloat16 for "medium" if it supports bfloat16.
        faster = "tf32" if device.kind == "cuda" else "bf16" if matmul == "medium" else "fp32"
        name = faster if rates.get(faster, 0) > rates["fp32"] else name
    if name in ("bf16", "fp16") and name not in rates:
        name = "fp32"
    if name not in rates:
        action = f"Add flops_per_s[{name!r}] to the description of the device"
        raise RoomierError("hardware", device.name, f"has no known rate of matrix products in {dtype}", action)
    return rates[name] * device.product_efficiency


def second_forward(work: Mapping[Part, Work], plan: Plan, blocks: Sequence[str]) -> dict[Part, Work]:
    """Return the work that the backward of each block recomputes, from the work of a step in forward.

    This is the full forward of each block with ``"full"``, of one block in ``n`` with ``"every_n"``, and all operations
    except matrix products with ``"selective"``. The choice of an activation budget is unknown before the run, so all
    blocks are assumed to be recomputed in full, as in its first steps.

    Args:
        work: work of a step, by phase and part.
        plan: plan with the activation policy.
        blocks: names of the blocks, in the order of the model.
    """
    found = {}
    for place, keep in _repeated(work, plan, blocks).items():
        first = work["forward", place]
        again = Work(other_bytes=first.other_bytes, num_operations=first.num_operations)
        found["backward", place] = again if keep is Keep.PRODUCTS else first
    return found


def repeating(work: Mapping[Part, Work], plan: Plan, blocks: Sequence[str]) -> dict[Part, Work]:
    """Return the overhead of recomputation, which a dry run does not count; see [Note: cost of Python].

    Args:
        work: work of all micro-batches, by phase and part.
        plan: plan with the activation policy.
        blocks: names of the blocks, in the order of the model.
    """
    hooks = _OPERATIONS_OF_REPEATING * plan.batch.accumulate_grad_batches
    return {
        ("backward", place): Work(num_operations=hooks + _SEEN_BY_PYTHON[keep] * work["forward", place].num_operations)
        for place, keep in _repeated(work, plan, blocks).items()
    }


def _repeated(work: Mapping[Part, Work], plan: Plan, blocks: Sequence[str]) -> dict[str, Keep]:
    """Return the recomputed blocks, with the activations that each block saves."""
    activation = plan.activation
    if activation.policy == "none":
        return {}
    keeps = keeps_of(activation, len(blocks)) if activation.policy != "budget" else [Keep.INPUT] * len(blocks)
    return {
        place: keep
        for place, keep in zip(blocks, keeps, strict=True)
        if keep is not Keep.ALL and ("forward", place) in work
    }
