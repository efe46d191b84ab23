"""Device memory that is used in addition to the tensors of a step, and that a dry run does not include.

These values were not measured with roomier itself. The values come from the sources below, and :func:`calibrate`
replaces them with values from a run.

[Note: fixed bytes of a GPU]
*context*: memory that CUDA uses for a process and its loaded kernels. The context uses 426 MiB with PyTorch 2.10 and
CUDA 13 on an RTX 6000 Ada before the first kernel (unslothai/unsloth-zoo#1053). The context uses about 400 MB if
kernels are loaded at their first use, which is PyTorch's default (pytorch/pytorch#109888, #86509). The kernels of a
training step are assumed to require 100 MiB.

*communication*: buffers of NCCL. For each connection of a channel, the receiver has buffers of 4 MiB (protocol Simple,
``NCCL_BUFFSIZE``), 4.7 MiB (LL128) and 0.5 MiB (LL). These buffers occupy 10 MiB, because memory is allocated in pieces
of 2 MiB. The sender has a buffer of 2 MiB (NVIDIA/nccl#1685 lists buffers of 10,485,760 and 2,097,152 bytes). The
number of channels is 2 for each NVLink, which is sufficient to saturate the link (NVIDIA/nccl#1703), up to a total of
32 channels (an H100 has 32, #1685). Over PCIe, the number of channels is assumed to be 4. With 24 channels on A100
GPUs, 544 MiB were measured with 2 devices and 688 MiB with 3 or 4 devices (#964). These measurements correspond to a
constant of 256 MiB, plus 12 MiB per channel with two devices, or 18 MiB per channel with more devices. A second node
adds a network buffer for each channel (#1450). A third node adds no buffer (#986, on #864). Each communicator has
separate buffers. Strategy hsdp has one communicator across replicas, one inside each replica, and one for all ranks.
PyTorch's allocator does not include the memory of NCCL in its statistics.

*workspace*: workspaces of cuBLAS, one for each of the two threads that run matrix products (forward and backward). The
default of ``CUBLAS_WORKSPACE_CONFIG`` is 2 x 4096 + 8 x 16 KiB (8,519,680 bytes in discuss.pytorch.org/t/178671). The
default is 32 MiB on Hopper (pytorch/pytorch#89027) and Blackwell (#175344), and 64 MiB on AMD (ROCm/hipBLASLt#1212).
PyTorch's allocator provides the workspaces, so ``memory_allocated`` includes them, unlike the other kinds of fixed
bytes.

*allocator*: memory that the caching allocator reserves but cannot use. Blocks are rounded to 512 bytes. Blocks below 1
MiB come from segments of 2 MiB, blocks below 10 MiB from segments of 20 MiB, and larger blocks are rounded to 2 MiB
(``CUDACachingAllocator.cpp``, cited from memory). The remaining unusable memory is fragmentation, which is proportional
to the tensor bytes. Fragmentation is small if all steps allocate the same memory. For steps with recomputation,
sharding or offloading, an allocator without fragmentation saved 15 % on average over eight models (GMLake, Guo et al.
2024, arXiv 2401.08156, abstract). This result predates the change in ``fully_shard`` that frees memory without
``record_stream`` (pytorch/pytorch#114299). This module assumes a fragmentation of 4 % for steps that all allocate the
same memory, 10 % for other steps, and 2 % with ``expandable_segments``, because segments that can grow leave fewer
gaps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.plan import Plan
from roomier.planner.hardware import cache
from roomier.planner.hardware.devices import Sheet, sheet_of
from roomier.planner.hardware.machine import Machine
from roomier.techniques.optim.adamw import WORTH_COMPILING

MIB = 2**20
CONTEXT_BYTES = (426 + 100) * MIB
NCCL_BYTES = 256 * MIB
_NCCL_RECEIVER_BYTES, _NCCL_SENDER_BYTES = 10 * MIB, 2 * MIB
_MOST_CHANNELS, _CHANNELS_PCIE = 32, 4
_SEGMENT_BYTES = (2 + 20) * MIB  # one segment of each size, because the last segment is partly empty
FRAGMENTED_STEADY, FRAGMENTED, FRAGMENTED_EXPANDABLE = 0.04, 0.10, 0.02
_SECTION = "fixed_bytes"
COMPILER_HOST_BYTES = 116 * MIB
"""Host memory that a process retains after it compiles the update of 8-bit or 4-bit optimizer states. The value was
measured as the increase in resident memory on a CPU with torch 2.13. A process that loads the result from the cache of
torch uses less."""


@dataclass(frozen=True)
class Calibration:
    """Values obtained from runs on one kind of device. Unknown values are None.

    Attributes:
        context_bytes: device memory outside the allocator, in a run with one rank.
        communication_bytes: device memory outside the allocator and the context, in a run on several ranks.
        fragmented: excess of peak reserved memory over peak allocated memory in steps with recomputation, sharding or
            activation offloading, as a fraction of peak allocated memory.
        fragmented_steady: the same fraction in steps without these techniques.
    """

    context_bytes: int | None = None
    communication_bytes: int | None = None
    fragmented: float | None = None
    fragmented_steady: float | None = None


def fixed_bytes(plan: Plan, machine: Machine, tensor_bytes: int = 0) -> dict[str, int]:
    """Return device memory in addition to tensors, by purpose; see [Note: fixed bytes of a GPU].

    The result is empty for a CPU, because forecasts for a CPU are compared with the bytes of tensors. The result is
    also empty for Apple's GPUs, which share the memory of the host, and for other devices without CUDA, because their
    values are not known.

    Args:
        plan: plan whose strategy and techniques determine communication and fragmentation.
        machine: machine that contains the device.
        tensor_bytes: total size of all tensors at the peak, in bytes, to which fragmentation is proportional.
    """
    if machine.device.kind != "cuda":
        return {}
    learned, sheet = _learned(machine.device.name), sheet_of(machine.device.name)
    workspace_bytes = _workspace_bytes(sheet)
    share = learned.fragmented_steady if _is_steady(plan) else learned.fragmented
    fragmented = _fragmented(plan) if share is None else share
    found = {
        "context": CONTEXT_BYTES if learned.context_bytes is None else learned.context_bytes,
        "communication": _communication_bytes(plan, machine, sheet),
        "workspace": workspace_bytes,
        "allocator": _SEGMENT_BYTES + int(fragmented * (tensor_bytes + workspace_bytes)),
    }
    if found["communication"] and learned.communication_bytes is not None:
        found["communication"] = learned.communication_bytes
    return {name: num_bytes for name, num_bytes in found.items() if num_bytes}


def compiler_bytes(plan: Plan, num_parameters: int) -> int:
    """Return the host memory of the compiler on one rank, or 0 if the plan compiles no update of low-bit states.

    Embeddings and small parameters keep 32-bit states, so a model with slightly more parameters than the limit can
    still have an uncompiled update.
    """
    is_coded = plan.optimizer.name in ("adamw8bit", "adamw4bit") and plan.optimizer.options.get("compiled") is not False
    return COMPILER_HOST_BYTES if is_coded and num_parameters >= WORTH_COMPILING else 0


def calibrate(
    plan: Plan, machine: Machine, *, allocated_bytes: int, reserved_bytes: int, used_bytes: int | None = None
) -> Calibration:
    """Derive fixed bytes from one run of ``plan``, and store these values for all plans on devices of this kind.

    ``roomier plan --calibrated_by RUN`` calls this function. The measured fragmentation applies only to plans of the
    same class as ``plan``: either plans that use recomputation, sharding or activation offloading, or plans that use
    none of them.

    Args:
        plan: plan of the run.
        machine: machine of the run.
        allocated_bytes: ``torch.accelerator.max_memory_allocated()`` after some steps.
        reserved_bytes: ``torch.accelerator.max_memory_reserved()`` at the same time.
        used_bytes: memory in use on the device at the same time (total minus free, from
            ``torch.accelerator.get_memory_info()``); None if other processes use the device.

    Raises:
        RoomierError: the values cannot come from one run on a GPU.
    """
    _check(machine, allocated_bytes, reserved_bytes, used_bytes)
    before = _learned(machine.device.name)
    context, communication = before.context_bytes, before.communication_bytes
    if used_bytes is not None:
        outside = used_bytes - reserved_bytes
        if plan.parallel.num_ranks == 1:
            context = outside
        else:
            communication = max(0, outside - (CONTEXT_BYTES if context is None else context))
    share = max(0.0, (reserved_bytes - _SEGMENT_BYTES) / allocated_bytes - 1)
    known = replace(before, context_bytes=context, communication_bytes=communication)
    learned = replace(known, fragmented_steady=share) if _is_steady(plan) else replace(known, fragmented=share)
    kept = cache.read(_SECTION)
    kept = kept if isinstance(kept, dict) else {}
    cache.write(_SECTION, {**kept, machine.device.name: asdict(learned)})
    return learned


def _check(machine: Machine, allocated_bytes: int, reserved_bytes: int, used_bytes: int | None) -> None:
    if machine.device.kind != "cuda":
        problem = "has no fixed bytes to calibrate"
        raise RoomierError("machine", machine.device.name, problem, "Calibrate with a run on a GPU")
    order = [0, allocated_bytes, reserved_bytes, *([] if used_bytes is None else [used_bytes])]
    if allocated_bytes <= 0 or order != sorted(order):
        problem = "must not decrease from the allocated to the reserved to the used bytes"
        raise RoomierError("calibrate", tuple(order[1:]), problem, "Pass all three values of the same run, in bytes")


def _workspace_bytes(sheet: Sheet | None) -> int:
    """Return the total size of the workspaces of the threads that run forward and backward, in bytes. Unknown devices
    are treated like recent devices."""
    if sheet is not None and sheet.capability == 0:
        return 2 * 64 * MIB
    is_large = sheet is None or sheet.capability >= 9
    return 2 * (32 * MIB if is_large else 2 * 4096 * 1024 + 8 * 16 * 1024)


def _communication_bytes(plan: Plan, machine: Machine, sheet: Sheet | None) -> int:
    parallel = plan.parallel
    groups = [parallel.num_ranks]
    if parallel.strategy == "hsdp":
        groups += [parallel.num_shards, parallel.num_ranks // parallel.num_shards]
    groups = [size for size in groups if size > 1]
    if not groups:
        return 0
    channels = _num_channels(sheet)
    crossed = channels * _NCCL_RECEIVER_BYTES if machine.num_nodes > 1 else 0
    connected = channels * (_NCCL_RECEIVER_BYTES + _NCCL_SENDER_BYTES)
    # With more than two ranks, each rank has additional neighbors in NCCL's tree.
    return NCCL_BYTES + sum(int(connected * (1.0 if size == 2 else 1.5)) + crossed for size in groups)


def _num_channels(sheet: Sheet | None) -> int:
    if sheet is None or (sheet.num_links == 0 and sheet.in_node > sheet.host):
        return _MOST_CHANNELS
    return min(_MOST_CHANNELS, 2 * sheet.num_links) or _CHANNELS_PCIE


def _fragmented(plan: Plan) -> float:
    settings = ",".join(os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    if "expandable_segments:true" in settings.lower().replace(" ", ""):
        return FRAGMENTED_EXPANDABLE
    return FRAGMENTED_STEADY if _is_steady(plan) else FRAGMENTED


def _is_steady(plan: Plan) -> bool:
    """Return whether all steps allocate the same memory without freeing and reallocating memory in between."""
    is_kept = plan.activation.policy == "none" and plan.offload.activations == "none"
    return is_kept and plan.parallel.strategy in ("single", "ddp")


def _learned(device: str) -> Calibration:
    path = cache.cache_file()
    return _kept(device, str(path), path.stat().st_mtime_ns if path.exists() else 0)


@lru_cache(maxsize=64)
def _kept(device: str, path: str, changed_at: int) -> Calibration:
    """Return the stored calibration of ``device`` in the file at ``path``, which was modified at ``changed_at``."""
    sections: Any = cache.read(_SECTION) if changed_at else None
    entry = sections.get(device) if isinstance(sections, Mapping) else None
    if entry is None:
        return Calibration()
    try:
        learned = Calibration(**entry)
        figures = [value for value in asdict(learned).values() if value is not None]
        if any(not float(value) >= 0 for value in figures):
            raise ValueError("a negative value")
    except (TypeError, ValueError):
        notice(f"{path} contains an unreadable calibration for {device}, which is ignored")
        return Calibration()
    return learned
