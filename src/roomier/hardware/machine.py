"""A machine as a value: what one device of it holds and how fast it is, and the links between devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A way for bytes, used in one direction by one rank at a time.

    Attributes:
        latency_s: before the first byte arrives.
    """

    bytes_per_s: float
    latency_s: float = 0.0

    def time_s(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Device:
    """What one rank computes on.

    Attributes:
        name: ``"a100-40gb"``; for this machine's CPU its model.
        kind: ``"cuda"``, ``"mps"`` or ``"cpu"``.
        memory_bytes: of the device; of the whole host where the device is a CPU.
        flops_per_s: rates of matrix products, by ``"fp64"``, ``"fp32"``, ``"tf32"``, ``"bf16"``, ``"fp16"``, ``"fp8"``.
        memory_bytes_per_s: to and from the device's own memory, reads and writes together.
        product_efficiency: share of ``flops_per_s`` that products of a model reach: 1 where the rates were measured.
        operation_s: what the host takes to start one operation.
        update_bytes_per_s: what a fused AdamW reads and writes (4 numbers read and 3 written for each parameter); None
            where it was not measured: as ``memory_bytes_per_s``.
    """

    name: str
    kind: str
    memory_bytes: int
    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    product_efficiency: float = 1.0
    operation_s: float = 0.0
    update_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Machine:
    """Nodes with equal devices.

    Attributes:
        in_node: what one device sends to others of its node while all of them send, as in an all-gather.
        between_nodes: between two nodes, for each device.
        to_host: between a device and its host's memory; the same in each direction, both at once.
        disk_read, disk_write: between the host and its disk, for all its devices together.
        host_memory_bytes: of one node.
        source: where the figures come from: ``"data sheets"``, or when and how they were measured.
        in_node_reduce: as ``in_node``, of a reduce-scatter, with the adding up; None where it is not known apart.
    """

    device: Device
    devices_per_node: int
    num_nodes: int
    in_node: Link
    between_nodes: Link
    to_host: Link
    disk_read: Link
    disk_write: Link
    host_memory_bytes: int
    source: str
    in_node_reduce: Link | None = None

    @property
    def num_ranks(self) -> int:
        return self.devices_per_node * self.num_nodes
