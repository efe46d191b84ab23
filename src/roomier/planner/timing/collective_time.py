"""What ranks exchange and how long that takes, from volumes and links.

[Note: volumes]
Of ``B`` bytes among ``N`` ranks each rank sends ``(N-1)/N B`` in an all-gather or a reduce-scatter, and twice that in
an all-reduce, which is one after the other (Rabenseifner 2004, "Optimization of collective reduction operations";
Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH", sections 4.1, 4.4
and 4.5).
No algorithm sends less. Ring and pairwise exchange both reach it; they differ in latency alone.

[Note: links]
A ring over several nodes crosses from node to node by as many links at once as a node has ranks in it (NCCL makes that
many rings, each with a part of the bytes), so the slower counts: the link of one rank within its node, or those of all
its ranks to the next. A ring of ``N`` ranks takes ``N-1`` steps, twice that for a sum; those between nodes have the
latency of the network. For a sum NCCL has trees as well (Sanders, Speck and Träff 2009, "Two-tree algorithms for full
bandwidth"): the same bytes, and a latency that grows with the logarithm of the nodes; it takes what is faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from roomier.hardware.machine import Link, Machine


@dataclass(frozen=True)
class Group:
    """Ranks that exchange.

    Attributes:
        num_ranks: how many there are.
        ranks_per_node: how many of them are on one node.
    """

    num_ranks: int
    ranks_per_node: int

    @classmethod
    def of_neighbours(cls, num_ranks: int, devices_per_node: int) -> Group:
        """Ranks that follow each other."""
        return cls(num_ranks, min(num_ranks, devices_per_node))

    @classmethod
    def of_copies(cls, num_ranks: int, shard_size: int, devices_per_node: int) -> Group:
        """Of ``num_ranks`` in groups of ``shard_size``: those that have the same place in each group."""
        num_copies = num_ranks // shard_size
        return cls(num_copies, min(num_copies, max(devices_per_node // shard_size, 1)))

    @property
    def num_nodes(self) -> int:
        return math.ceil(self.num_ranks / self.ranks_per_node)

    @property
    def share_sent(self) -> float:
        """Of what is gathered or reduced: what each rank hands to others."""
        return (self.num_ranks - 1) / self.num_ranks


def gather_s(num_bytes: float, group: Group, machine: Machine) -> float:
    """Of an all-gather: parts of ``num_bytes`` together."""
    if group.num_ranks == 1 or num_bytes == 0:
        return 0.0
    return _half_s(num_bytes, group, machine, machine.in_node)


def reduce_scatter_s(num_bytes: float, group: Group, machine: Machine) -> float:
    """Of a reduction of ``num_bytes``, of which each rank gets its part."""
    if group.num_ranks == 1 or num_bytes == 0:
        return 0.0
    return _half_s(num_bytes, group, machine, machine.in_node_reduce or machine.in_node)


def all_reduce_s(num_bytes: float, group: Group, machine: Machine) -> float:
    """Of a sum of ``num_bytes`` over the ranks, which all get."""
    if group.num_ranks == 1 or num_bytes == 0:
        return 0.0
    ring_s = gather_s(num_bytes, group, machine) + reduce_scatter_s(num_bytes, group, machine)
    if machine.device.kind != "cuda":
        return ring_s
    ring_latency_s = _ring_latency_s(group, machine.in_node, machine) * 2
    return ring_s - ring_latency_s + min(ring_latency_s, _tree_latency_s(group, machine))


def _half_s(num_bytes: float, group: Group, machine: Machine, within: Link) -> float:
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
    # Up and down: a chain within each node, a tree between the nodes.
    within_s = (group.ranks_per_node - 1) * machine.in_node.latency_s
    return 2 * (within_s + math.ceil(math.log2(group.num_nodes)) * machine.between_nodes.latency_s)
