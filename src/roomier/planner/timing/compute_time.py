"""How long a device computes: the roofline of what a dry run or a trace counted.

[Note: roofline]
Products take the longer of their arithmetic and their bytes (Williams, Waterman and Patterson 2009, "Roofline: an
insightful visual performance model"); all other operations take their bytes, since even on a CPU their arithmetic waits
for memory. The host takes a while to start each operation. On a GPU it runs ahead, so that the longer of the two
counts; on a CPU both are one thread, and add up.

[Note: what Python costs]
What :attr:`~roomier.hardware.machine.Device.operation_s` says of a CPU is the lightest operation that autograd records.
One of a model takes four times as long to start: its module, its arguments, its kernel. Models of a few thousand
parameters, where nothing else counts, took 3.7 to 4.3 of them for each operation that was counted (a GPT, an encoder as
BERT; 2.9 and 6.3 an MLP and a network of convolutions), in process time on one core of an Intel Xeon, torch 2.13.

A block that computes again costs as much as 60 operations for that alone: hooks, random states, a second way through
its modules. Each of its operations is seen by Python then, under ``"selective"`` in both forwards. Of the four models
above, with four blocks: 188, 360, 510 and 338 lightest operations a block under ``"full"``, with 5, 10, 30 and 7
operations in its forward; 290, 648, 1035 and 449 under ``"selective"``.

Not modelled: that compiled blocks (``compile=True``) fuse operations and move fewer bytes. No factor was measured, so
a compiled plan is forecast as slow as the same plan without.
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
_OPERATIONS_OF_REPEATING = 60.0  # of a block, in each micro-batch
_SEEN_BY_PYTHON = {Keep.INPUT: 1.5, Keep.PRODUCTS: 6.0}  # in operations, for each of the block's forward


@dataclass(frozen=True)
class Duration:
    """Of some work.

    Attributes:
        device_s: the device computes.
        host_s: the host starts operations.
    """

    device_s: float
    host_s: float

    def on(self, device: Device) -> float:
        """Seconds, if nothing runs before it or after it."""
        return self.device_s + self.host_s if device.kind == "cpu" else max(self.device_s, self.host_s)


def duration(work: Work, device: Device, matmul: str = "highest") -> Duration:
    """How long ``work`` takes.

    Args:
        matmul: how products of float32 are computed: ``plan.precision.matmul``.

    Raises:
        RoomierError: the rate of a dtype is not known.
    """
    arithmetic_s = sum(flops / rate_of(dtype, device, matmul) for dtype, flops in work.flops.items())
    products_s = max(arithmetic_s, work.product_bytes / device.memory_bytes_per_s)
    device_s = products_s + work.other_bytes / device.memory_bytes_per_s
    lightest = _LIGHTEST_OPERATIONS if device.kind == "cpu" else 1.0  # those of GPUs are what their kernels take
    return Duration(device_s, lightest * work.num_operations * device.operation_s)


def rate_of(dtype: torch.dtype, device: Device, matmul: str = "highest") -> float:
    """Floating-point operations a second that products of ``dtype`` reach.

    A device without 16-bit arithmetic converts to float32 and computes in that.

    Raises:
        RoomierError: it is not known.
    """
    rates = device.flops_per_s
    name = _RATES.get(dtype, str(dtype))
    if name == "fp32" and matmul != "highest":
        # CUDA has tf32 for both other levels; a CPU bfloat16 for "medium" where it has units for that.
        faster = "tf32" if device.kind == "cuda" else "bf16" if matmul == "medium" else "fp32"
        name = faster if rates.get(faster, 0) > rates["fp32"] else name
    if name in ("bf16", "fp16") and name not in rates:
        name = "fp32"
    if name not in rates:
        action = f"Add flops_per_s[{name!r}] to the description of the device"
        raise RoomierError("hardware", device.name, f"how fast it multiplies {dtype} is not known", action)
    return rates[name] * device.product_efficiency


def second_forward(work: Mapping[Part, Work], plan: Plan, blocks: Sequence[str]) -> dict[Part, Work]:
    """What the backward of each block computes again, from a step's work in forward.

    ``"full"`` is the whole forward of each block, ``"every_n"`` that of one in ``n``, ``"selective"`` all of it but
    products. What a budget makes of blocks is known when it runs: here it is all of them, as in its first steps.

    Args:
        blocks: names of the blocks, in the order of the model.
    """
    found = {}
    for place, keep in _repeated(work, plan, blocks).items():
        first = work["forward", place]
        again = Work(other_bytes=first.other_bytes, num_operations=first.num_operations)
        found["backward", place] = again if keep is Keep.PRODUCTS else first
    return found


def repeating(work: Mapping[Part, Work], plan: Plan, blocks: Sequence[str]) -> dict[Part, Work]:
    """What it takes to have blocks compute again, beside what they compute: nothing that a dry run sees. See [Note:
    what Python costs].

    Args:
        work: of all micro-batches.
    """
    hooks = _OPERATIONS_OF_REPEATING * plan.batch.accumulate_grad_batches
    return {
        ("backward", place): Work(num_operations=hooks + _SEEN_BY_PYTHON[keep] * work["forward", place].num_operations)
        for place, keep in _repeated(work, plan, blocks).items()
    }


def _repeated(work: Mapping[Part, Work], plan: Plan, blocks: Sequence[str]) -> dict[str, Keep]:
    """The blocks that compute again, with what they keep."""
    activation = plan.activation
    if activation.policy == "none":
        return {}
    keeps = keeps_of(activation, len(blocks)) if activation.policy != "budget" else [Keep.INPUT] * len(blocks)
    return {
        place: keep
        for place, keep in zip(blocks, keeps, strict=True)
        if keep is not Keep.ALL and ("forward", place) in work
    }
