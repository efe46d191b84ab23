"""Duration of collectives, computed from the volume of the data and the links.

[Note: volumes]
For ``B`` bytes on ``N`` ranks, each rank sends ``(N-1)/N B`` in an all-gather or a reduce-scatter, and twice as much in
an all-reduce, which consists of both (Rabenseifner 2004, "Optimization of collective reduction operations"; Thakur,
Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH", sections 4.1, 4.4 and 4.5).
No algorithm sends less. Rings and pairwise exchanges both reach this minimum and differ only in latency.

[Note: links]
Over several nodes, NCCL creates as many rings as there are ranks on each node, and each ring sends a fraction of the
bytes over its own link between the nodes. The bandwidth is therefore the lower of two values: the bandwidth of one
rank's link within its node, and the total bandwidth of the links from one node to the next. In a ring of ``N`` ranks,
an all-gather or a reduce-scatter takes ``N-1`` steps, and an all-reduce takes ``2(N-1)`` steps. Steps between nodes
have the latency of the network. For an all-reduce, NCCL can also use trees (Sanders, Speck and Träff 2009, "Two-tree
algorithms for full bandwidth"), which send the same number of bytes, but whose latency grows only with the logarithm of
the number of nodes. NCCL selects the faster algorithm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from roomier.planner.hardware.machine import Link, Machine


@dataclass(frozen=True)
class Group:
    """Ranks of a collective.

    Attributes:
        num_ranks: number of ranks.
        ranks_per_node: number of ranks of the group on one node.
    """

    num_ranks: int
    ranks_per_node: int

    @classmethod
    def of_neighbours(cls, num_ranks: int, devices_per_node: int) -> Group:
        """Return a group of ``num_ranks`` consecutive ranks."""
        return cls(num_ranks, min(num_ranks, devices_per_node))

    @classmethod
    def of_copies(cls, num_ranks: int, shard_size: int, devices_per_node: int) -> Group:
        """Return a group of ranks that have the same index in their shard groups of ``shard_size`` ranks."""
        num_copies = num_ranks // shard_size
        return cls(num_copies, min(num_copies, max(devices_per_node // shard_size, 1)))

    @property
    def num_nodes(self) -> int:
        """Number of nodes that contain ranks of the group."""
        return math.ceil(self.num_ranks / self.ranks_per_node)

    @property
    def share_sent(self) -> float:
        """Fraction of the bytes of a collective that each rank sends."""
        return (self.num_ranks - 1) / self.num_ranks


def gather_s(num_bytes: float, group: Group, machine: Machine) -> float:
    """Return the duration of an all-gather in seconds. ``num_bytes`` is the total size of all shards."""
    return _half_s(num_bytes, group, machine, machine.in_node)


def reduce_scatter_s(num_bytes: float, group: Group, machine: Machine) -> float:
    """Return the duration of a reduce-scatter in seconds. ``num_bytes`` is the size of the input on each rank."""
    return _half_s(num_bytes, group, machine, machine.in_node_reduce or machine.in_node)


def all_reduce_s(num_bytes: float, group: Group, machine: Machine) -> float:
    """Return the duration of an all-reduce of ``num_bytes`` in seconds."""
    if group.num_ranks == 1 or num_bytes == 0:
        return 0.0
    ring_s = gather_s(num_bytes, group, machine) + reduce_scatter_s(num_bytes, group, machine)
    if machine.device.kind != "cuda":
        return ring_s
    ring_latency_s = _ring_latency_s(group, machine.in_node, machine) * 2
    return ring_s - ring_latency_s + min(ring_latency_s, _tree_latency_s(group, machine))


def _half_s(num_bytes: float, group: Group, machine: Machine, within: Link) -> float:
    if group.num_ranks == 1 or num_bytes == 0:
        return 0.0
    latency_s = _ring_latency_s(group, within, machine)
    return latency_s + group.share_sent * num_bytes / _bytes_per_s(group, within, machine)


def _bytes_per_s(group: Group, within: Link, machine: Machine) -> float:
    if group.num_nodes == 1:
        return within.bytes_per_s
    between = group.ranks_per_node * machine.between_nodes.bytes_per_s
    return between if group.ranks_per_node == 1 else min(within.bytes_per_s, between)


def _ring_latency_s(group: Group, within: Link, machine: Machine) -> float:
    num_between = group.num_nodes - 1
    num_within = group.num_ranks - 1 - num_between
    return num_within * within.latency_s + num_between * machine.between_nodes.latency_s


def _tree_latency_s(group: Group, machine: Machine) -> float:
    # In both directions, data is sent through a chain within each node and a tree between the nodes.
    within_s = (group.ranks_per_node - 1) * machine.in_node.latency_s
    return 2 * (within_s + math.ceil(math.log2(group.num_nodes)) * machine.between_nodes.latency_s)
