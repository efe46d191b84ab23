"""Bytes of a device that no tensor of a step accounts for: what a dry run cannot see.

Nothing here was measured by roomier: figures and formulas are those of the sources named beside them, and what
:func:`calibrate` learned from a run takes their place.

[Note: beside the tensors of a GPU]
*context*: what CUDA keeps for a process and the kernels it has loaded. 426 MiB for PyTorch 2.10 with CUDA 13 on an RTX
6000 Ada before the first kernel (unslothai/unsloth-zoo#1053); about 400 MB with kernels loaded when first used, as
PyTorch has them (pytorch/pytorch#109888, #86509). The kernels of a training step: 100 MiB, assumed.

*communication*: NCCL's buffers. A connection of a channel takes 4 MiB (protocol Simple, ``NCCL_BUFFSIZE``), 4.7 MiB
(LL128) and 0.5 MiB (LL): in pieces of 2 MiB 10 MiB, beside 2 MiB for its sender (NVIDIA/nccl#1685 counts buffers of
10,485,760 and 2,097,152 bytes). Channels: 2 for each NVLink, which saturates it (NVIDIA/nccl#1703), 32 at most (32 on
H100, #1685); 4 over PCIe, assumed. With 24 channels, on A100, 544 MiB were measured among 2 devices and 688 MiB among 3
or 4 (#964): 256 MiB once, and 12 MiB for each channel among two, 18 MiB among more. A second node adds a buffer of each
channel for the network (#1450); a third adds none (#986, of #864). Memory is linear in communicators: hsdp has one for
the copies, one inside each, and the one of all ranks. PyTorch's allocator knows nothing of it.

*workspace*: of cuBLAS, one for each thread that multiplies, which are the forward's and the backward's. Of each, by
``CUBLAS_WORKSPACE_CONFIG``, 2 x 4096 + 8 x 16 KiB (8,519,680 bytes in discuss.pytorch.org/t/178671); 32 MiB on Hopper
(pytorch/pytorch#89027) and on Blackwell (#175344); 64 MiB on AMD (ROCm/hipBLASLt#1212). Unlike the others it comes from
PyTorch's allocator: ``memory_allocated`` holds it.

*allocator*: what the caching allocator reserves and cannot use. Blocks are rounded to 512 bytes; below 1 MiB they come
from segments of 2 MiB, below 10 MiB from segments of 20 MiB, else rounded to 2 MiB (``CUDACachingAllocator.cpp``, from
memory); the rest is fragmentation, in proportion to the tensors. Steps that allocate the same each time lose little;
of those that compute again, shard or offload, an allocator without fragmentation saved 15 % on average over eight
models (GMLake, Guo et al. 2024, arXiv 2401.08156, abstract), before ``fully_shard`` freed without ``record_stream``
(pytorch/pytorch#114299). Taken here: 4 and 10 %, and 2 % with ``expandable_segments``, which grow instead: assumed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.hardware import cache
from roomier.hardware.devices import Sheet, sheet_of
from roomier.hardware.machine import Machine
from roomier.plan import Plan

MIB = 2**20
CONTEXT_BYTES = (426 + 100) * MIB
NCCL_BYTES = 256 * MIB
_NCCL_RECEIVER_BYTES, _NCCL_SENDER_BYTES = 10 * MIB, 2 * MIB
_MOST_CHANNELS, _CHANNELS_PCIE = 32, 4
_SEGMENT_BYTES = (2 + 20) * MIB  # of which the last one is partly empty
FRAGMENTED_STEADY, FRAGMENTED, FRAGMENTED_EXPANDABLE = 0.04, 0.10, 0.02
_SECTION = "fixed_bytes"


@dataclass(frozen=True)
class Calibration:
    """What a run on one kind of device taught; None where it taught nothing.

    Attributes:
        context_bytes: beside the allocator, in a run of one rank.
        communication_bytes: beside the allocator and the context, in a run of several.
        fragmented: what was reserved beyond what was allocated, as a share of that, at their peaks, in steps that
            compute again, shard or offload.
        fragmented_steady: the same in steps that do none of these.
    """

    context_bytes: int | None = None
    communication_bytes: int | None = None
    fragmented: float | None = None
    fragmented_steady: float | None = None


def fixed_bytes(plan: Plan, machine: Machine, tensor_bytes: int = 0) -> dict[str, int]:
    """By what they are for, see [Note: beside the tensors of a GPU].

    On a CPU there are none: what a forecast is held against there are the bytes of tensors. Apple's GPUs share the
    host's memory, and nothing is known of theirs: none either.

    Args:
        tensor_bytes: of all tensors at the peak, of which fragmentation is a share.
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


def calibrate(
    plan: Plan, machine: Machine, *, allocated_bytes: int, reserved_bytes: int, used_bytes: int | None = None
) -> Calibration:
    """Learn from one run of ``plan``, and keep it for all plans on devices of this kind: ``roomier plan
    --calibrated_by RUN`` does. What it tells of fragmentation is for plans that are steady as it is, or as it is not.

    Args:
        allocated_bytes: ``torch.cuda.max_memory_allocated()`` after some steps.
        reserved_bytes: ``torch.cuda.max_memory_reserved()`` then.
        used_bytes: of the whole device then, if no other process uses it: total less free, as
            ``torch.cuda.mem_get_info()`` tells them.

    Raises:
        RoomierError: the figures cannot be of one run on a GPU.
    """
    _check(machine, allocated_bytes, reserved_bytes, used_bytes)
    before = _learned(machine.device.name)
    context, communication = before.context_bytes, before.communication_bytes
    if used_bytes is not None:
        beside = used_bytes - reserved_bytes
        if plan.parallel.num_ranks == 1:
            context = beside
        else:
            communication = max(0, beside - (CONTEXT_BYTES if context is None else context))
    share = max(0.0, (reserved_bytes - _SEGMENT_BYTES) / allocated_bytes - 1)
    known = replace(before, context_bytes=context, communication_bytes=communication)
    learned = replace(known, fragmented_steady=share) if _is_steady(plan) else replace(known, fragmented=share)
    kept = cache.read(_SECTION)
    kept = kept if isinstance(kept, dict) else {}
    cache.write(_SECTION, {**kept, machine.device.name: asdict(learned)})
    return learned


def _check(machine: Machine, allocated_bytes: int, reserved_bytes: int, used_bytes: int | None) -> None:
    if machine.device.kind != "cuda":
        problem = "has no bytes beside those of tensors to learn"
        raise RoomierError("machine", machine.device.name, problem, "Calibrate with a run on a GPU")
    order = [0, allocated_bytes, reserved_bytes, *([] if used_bytes is None else [used_bytes])]
    if allocated_bytes <= 0 or order != sorted(order):
        problem = "are not the bytes allocated, reserved and used of one run: each holds the one before"
        raise RoomierError("calibrate", tuple(order[1:]), problem, "Give all three of the same run, in bytes")


def _workspace_bytes(sheet: Sheet | None) -> int:
    """Of the two threads that multiply. A device that is not in the table is taken for a new one."""
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
    return NCCL_BYTES + sum(int(channels * _connected_bytes(size)) + crossed for size in groups)


def _connected_bytes(num_ranks: int) -> float:
    """Of one channel of a communicator. Among more than two, the tree's neighbours are not all the ring's."""
    return (1.0 if num_ranks == 2 else 1.5) * (_NCCL_RECEIVER_BYTES + _NCCL_SENDER_BYTES)


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
    """Whether its steps allocate the same each time, and free nothing in between to allocate it again."""
    is_kept = plan.activation.policy == "none" and plan.offload.activations == "none"
    return is_kept and plan.parallel.strategy in ("single", "ddp")


def _learned(device: str) -> Calibration:
    path = cache.cache_file()
    return _kept(device, str(path), path.stat().st_mtime_ns if path.exists() else 0)


@lru_cache(maxsize=64)
def _kept(device: str, path: str, changed_at: int) -> Calibration:
    """What is kept for ``device`` in the file at ``path`` since ``changed_at``."""
    sections: Any = cache.read(_SECTION) if changed_at else None
    entry = sections.get(device) if isinstance(sections, Mapping) else None
    if entry is None:
        return Calibration()
    try:
        learned = Calibration(**entry)
        figures = [value for value in asdict(learned).values() if value is not None]
        if any(not float(value) >= 0 for value in figures):
            raise ValueError("a negative figure")
    except (TypeError, ValueError):
        notice(f"{path} holds no calibration of {device} that can be read: it is ignored")
        return Calibration()
    return learned
