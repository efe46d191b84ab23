"""Device memory that is used in addition to tensors, by the CUDA context, NCCL, cuBLAS and the caching allocator.

A dry run does not include this memory. The values come from the sources below and were not measured with roomier.

[Note: fixed bytes of a GPU]
*context*: memory that CUDA uses for a process and its loaded kernels. Before the first kernel, it uses 426 MiB with
PyTorch 2.10 and CUDA 13 on an RTX 6000 Ada (unslothai/unsloth-zoo#1053), and about 400 MB if kernels are loaded at
their first use, which is PyTorch's default (pytorch/pytorch#109888, #86509). The kernels of a training step are assumed
to require 100 MiB.

*communication*: buffers of NCCL, which PyTorch's allocator does not include in its statistics. For each connection of a
channel, the receiver has buffers of 4 MiB (protocol Simple, ``NCCL_BUFFSIZE``), 4.7 MiB (LL128) and 0.5 MiB (LL), which
occupy 10 MiB because memory is allocated in multiples of 2 MiB, and the sender has a buffer of 2 MiB (NVIDIA/nccl#1685
lists buffers of 10,485,760 and 2,097,152 bytes). There are two channels for each NVLink, which saturate the link
(NVIDIA/nccl#1703), but at most 32 channels (an H100 has 32, #1685). Over PCIe, 4 channels are assumed. With 24 channels
on A100 GPUs, 544 MiB were measured with 2 devices and 688 MiB with 3 or 4 devices (#964), which corresponds to a
constant of 256 MiB, plus 12 MiB per channel with two devices, or 18 MiB per channel with more devices. A second node
adds a network buffer for each channel (#1450), but a third node does not (#986, on #864). Each communicator has
separate buffers. The strategy hsdp has one communicator across replicas, one inside each replica, and one for all
ranks.

*workspace*: workspaces of cuBLAS, one for each of the two threads that run matrix products, in the forward and in the
backward pass. The default of ``CUBLAS_WORKSPACE_CONFIG`` is 2 x 4096 + 8 x 16 KiB (8,519,680 bytes in
discuss.pytorch.org/t/178671), 32 MiB on Hopper (pytorch/pytorch#89027) and Blackwell (#175344), and 64 MiB on AMD
(ROCm/hipBLASLt#1212). PyTorch's allocator provides the workspaces, so ``memory_allocated`` includes them, unlike the
other kinds.

*allocator*: memory that the caching allocator reserves but cannot use. Blocks are rounded to 512 bytes. Blocks below 1
MiB come from segments of 2 MiB, blocks below 10 MiB from segments of 20 MiB, and larger blocks are rounded to 2 MiB
(``CUDACachingAllocator.cpp``, cited from memory). The rest is fragmentation, which is assumed to be proportional to the
size of the tensors: 4 % if a step does not repeatedly free and allocate memory, 10 % for other steps, and 2 % with
``expandable_segments``, because segments that can grow leave fewer gaps. For comparison, an allocator without
fragmentation saved 15 % on average over eight models with recomputation, sharding or offloading (GMLake, Guo et al.
2024, arXiv 2401.08156, abstract), before ``fully_shard`` was changed to free memory without ``record_stream``
(pytorch/pytorch#114299).
"""

from __future__ import annotations

import os

from roomier.plan import Plan
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
COMPILER_HOST_BYTES = 116 * MIB
"""Host memory that a process retains after it compiles the update of 8-bit or 4-bit optimizer states, measured as the
increase in resident memory on a CPU with torch 2.13. A process that loads the compiled code from torch's cache uses
less."""


def fixed_bytes(plan: Plan, machine: Machine, tensor_bytes: int = 0) -> dict[str, int]:
    """Return the device memory that is used in addition to tensors, by purpose; see [Note: fixed bytes of a GPU].

    The result is empty for devices without CUDA. On a CPU, forecasts are compared with the size of the tensors only;
    for other devices, the values are not known.

    Args:
        plan: plan whose strategy and techniques determine communication and fragmentation.
        machine: machine that contains the device.
        tensor_bytes: total size of all tensors at the peak, in bytes, to which fragmentation is proportional.
    """
    if machine.device.kind != "cuda":
        return {}
    sheet = sheet_of(machine.device.name)
    workspace_bytes = _workspace_bytes(sheet)
    found = {
        "context": CONTEXT_BYTES,
        "communication": _communication_bytes(plan, machine, sheet),
        "workspace": workspace_bytes,
        "allocator": _SEGMENT_BYTES + int(_fragmented(plan) * (tensor_bytes + workspace_bytes)),
    }
    return {name: num_bytes for name, num_bytes in found.items() if num_bytes}


def compiler_bytes(plan: Plan, num_parameters: int) -> int:
    """Return the host memory of the compiler on one rank; 0 if the plan does not compile an update of low-bit states.

    The number of parameters is an approximation: embeddings and small parameters have 32-bit states, so the update of a
    model slightly above the limit may not be compiled.
    """
    is_coded = plan.optimizer.name in ("adamw8bit", "adamw4bit") and plan.optimizer.options.get("compiled") is not False
    return COMPILER_HOST_BYTES if is_coded and num_parameters >= WORTH_COMPILING else 0


def _workspace_bytes(sheet: Sheet | None) -> int:
    """Return the total size in bytes of the workspaces for the forward and the backward pass. Unknown devices are
    treated like recent devices."""
    if sheet is not None and sheet.capability == 0:
        return 2 * 64 * MIB
    is_large = sheet is None or sheet.capability >= 9
    return 2 * (32 * MIB if is_large else 2 * 4096 * 1024 + 8 * 16 * 1024)


def _communication_bytes(plan: Plan, machine: Machine, sheet: Sheet | None) -> int:
    parallel = plan.parallel
    groups = [parallel.num_ranks, parallel.context_parallel_size]
    if parallel.strategy == "hsdp":
        groups += [parallel.num_shards, parallel.num_ranks // parallel.num_shards]
    groups = [size for size in groups if size > 1]
    if not groups:
        return 0
    channels = _num_channels(sheet)
    crossed = channels * _NCCL_RECEIVER_BYTES if machine.num_nodes > 1 else 0
    connected = channels * (_NCCL_RECEIVER_BYTES + _NCCL_SENDER_BYTES)
    # With more than two ranks, each rank has more neighbors in NCCL's tree.
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
    """Return whether a step does not repeatedly free and reallocate memory."""
    is_kept = plan.activation.policy == "none" and plan.offload.activations == "none"
    return is_kept and plan.parallel.strategy in ("single", "ddp")
