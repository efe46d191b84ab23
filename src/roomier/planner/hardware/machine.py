"""Description of a machine: memory and speed of its devices, and the links between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """One direction of a link, used by one rank at a time.

    Attributes:
        bytes_per_s: bandwidth.
        latency_s: seconds before the first byte arrives.
    """

    bytes_per_s: float
    latency_s: float = 0.0

    def time_s(self, num_bytes: float) -> float:
        """Return the time in seconds to send ``num_bytes``."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Device:
    """Device of one rank.

    Attributes:
        name: name such as ``"a100-40gb"``; for the CPU of this machine, its model name.
        kind: device type, such as ``"cuda"``, ``"mps"`` or ``"cpu"``.
        memory_bytes: memory of the device; for a CPU, memory of the host.
        flops_per_s: rates of matrix products in FLOP/s, with the keys ``"fp64"``, ``"fp32"``, ``"tf32"``, ``"bf16"``,
            ``"fp16"`` and ``"fp8"``.
        memory_bytes_per_s: bandwidth of the device's memory, reads plus writes.
        product_efficiency: fraction of ``flops_per_s`` that the matrix products of a model reach; 1 for measured rates.
        operation_s: time in seconds that the host needs to launch one operation.
        update_bytes_per_s: bytes that a fused AdamW reads and writes per second (4 numbers read and 3 written per
            parameter). If None, the rate was not measured, and ``memory_bytes_per_s`` is used.
    """

    name: str
    kind: str
    memory_bytes: int
    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    product_efficiency: float = 1.0
    operation_s: float = 0.0
    update_bytes_per_s: float | None = None

    @property
    def has_own_memory(self) -> bool:
        """True if the device has its own memory. Apple's GPUs share the memory of the host."""
        return self.kind not in ("cpu", "mps")


@dataclass(frozen=True)
class Machine:
    """One or more nodes with identical devices.

    Attributes:
        device: the device of each rank.
        devices_per_node: number of devices in a node.
        num_nodes: number of nodes.
        in_node: link from one device to the other devices in its node while all devices send data, as in an all-gather.
        between_nodes: link between two nodes, per device.
        to_host: link between a device and the memory of its host. Both directions can be used at the same time.
        disk_read, disk_write: links between the host and its disk, shared by all devices of the node.
        host_memory_bytes: host memory of one node.
        source: origin of the values: ``"data sheets"``, or the time and method of the measurement.
        disk_both: total rate of reads and writes if both run at the same time; None if this rate is not known.
        disk_free_bytes: free space on the disk of one node; None if it is not known.
        in_node_reduce: link like ``in_node``, but for a reduce-scatter including the sum; None if this link was not
            measured.
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
    disk_free_bytes: int | None = None
    disk_both: Link | None = None

    @property
    def num_ranks(self) -> int:
        """Number of devices in all nodes."""
        return self.devices_per_node * self.num_nodes

    def disk_time_s(self, read_bytes: float, written_bytes: float) -> float:
        """Return the time in seconds for simultaneous reads and writes on the disk of a node.

        If ``disk_both`` is None, reads and writes are assumed to run one after the other.
        """
        both_bytes = 0.0 if self.disk_both is None else min(read_bytes, written_bytes)
        parts = (
            (self.disk_both, 2 * both_bytes),
            (self.disk_read, read_bytes - both_bytes),
            (self.disk_write, written_bytes - both_bytes),
        )
        return sum(link.time_s(num_bytes) for link, num_bytes in parts if link is not None and num_bytes)
