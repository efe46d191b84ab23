"""Volume of the communication of a rank in a step, for each unit and strategy.

[Note: volumes of a step]
For a model with ``B`` bytes of gradients and ``G`` bytes of all-gathered weights, in ``M`` micro-batches on ``N``
ranks, each rank sends ``(N-1)/N`` times the following (Rajbhandari et al. 2020, "ZeRO", section 7: with ``M`` = 1 and
``G`` = ``B``, ZeRO-2 sends as much as DDP, and ZeRO-3 1.5 times as much)::

    ddp      2 B                  all-reduce after the last micro-batch
    zero1    G + B                one all-gather, one reduction after the last micro-batch
    zero2    M (G + B)
    zero3    M (2 G + B)          all-gathered again in each backward pass, except the root and embeddings
    hsdp     M (2 G + B)          within a group, and the all-reduce of shards, 2 (C-1)/C B/N, over ``C`` replicas

Each rank also copies data locally, because shards are packed into one buffer and unpacked from it. Ranks that send
their shards pairwise also sum the received shards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roomier.plan import Plan
from roomier.plan.choices import compression_named
from roomier.planner.hardware.machine import Machine
from roomier.planner.memory.walk import Layout, gradient_bytes, own_bytes, own_elements, unit_bytes
from roomier.planner.memory.weights import Unit, Weight
from roomier.planner.timing.collective_time import Group, all_reduce_s, gather_s, reduce_scatter_s

BUCKET_BYTES = 25 * 2**20  # default of torch's DDP


@dataclass(frozen=True)
class UnitExchange:
    """One collective.

    Attributes:
        link_s: time in seconds for which the collective occupies the link.
        copied_bytes: bytes that this rank reads and writes locally for packing, unpacking and sums.
    """

    link_s: float = 0.0
    copied_bytes: float = 0.0

    def __add__(self, other: UnitExchange) -> UnitExchange:
        return UnitExchange(self.link_s + other.link_s, self.copied_bytes + other.copied_bytes)


NOTHING = UnitExchange()


@dataclass(frozen=True)
class UnitTraffic:
    """Collectives of one unit.

    Attributes:
        name: name of the unit; empty for the root.
        gather: all-gather of the weights of the unit; empty for ``ddp``.
        reduce: reduction of the gradients of the unit; for ``ddp``, the unit's share of the buckets.
        in_each: whether the unit is all-gathered in the forward pass of each micro-batch, instead of only the first,
            and its gradients are reduced after each micro-batch, instead of only after the last.
        gathers_again: whether the unit is all-gathered again in each backward pass.
        is_last: whether the reduction waits for the end of the backward pass.
        num_weights: number of weights. The host handles each weight separately.
    """

    name: str
    gather: UnitExchange
    reduce: UnitExchange
    in_each: bool = False
    gathers_again: bool = False
    is_last: bool = False
    num_weights: int = 0


def traffic_of(units: Sequence[Unit], plan: Plan, layout: Layout, machine: Machine) -> list[UnitTraffic]:
    """Return the collectives of each unit in the order of the forward pass, starting with the root.

    Args:
        units: units of the network.
        plan: plan with a concrete strategy. The plan determines the number of ranks and their nodes.
        layout: result of :func:`roomier.planner.memory.predict.layout_of`.
        machine: machine whose links are used.
    """
    if layout.strategy == "single":  # includes 1-bit Adam, which communicates in the update
        return []
    if layout.strategy == "ddp":
        return _of_replicas(units, plan, machine)
    # ``step_in_backward="exact"`` runs two backward passes per micro-batch if gradients are clipped by norm.
    frees = layout.frees_parameters or layout.num_backwards > 1
    found = []
    known: dict[Any, tuple[UnitExchange, UnitExchange]] = {}  # cache for equal blocks
    for unit in units:
        alike = (unit.weights, unit.gathered_dtype, unit.sum_dtype)
        if alike not in known:
            known[alike] = _gather(unit, plan, layout, machine), _reduce(unit, plan, layout, machine)
        gather, reduce = known[alike]
        found.append(
            UnitTraffic(
                unit.name,
                gather,
                reduce,
                in_each=layout.strategy != "zero1",
                gathers_again=frees and not unit.is_root and not unit.is_looked_up,
                is_last=unit.is_root or unit.ends_late,
                num_weights=len(unit.weights),
            )
        )
    return found


def exchanges(
    traffic: Sequence[UnitTraffic], num_micro_batches: int, num_backwards: int = 1
) -> list[tuple[UnitExchange, int]]:
    """Return all collectives of one optimizer step, each with the number of its executions."""
    found = []
    for unit in traffic:
        num_each = num_micro_batches if unit.in_each else 1
        num_gathers = num_each + (num_micro_batches * num_backwards if unit.gathers_again else 0)
        found += [(unit.gather, num_gathers), (unit.reduce, num_each * num_backwards)]
    return found


def shard_group(plan: Plan) -> Group:
    """Return the ranks across which one replica is sharded; all ranks for ``ddp``."""
    parallel = plan.parallel
    num_ranks = parallel.num_shards if parallel.strategy == "hsdp" else parallel.num_ranks
    return Group.of_neighbours(num_ranks, parallel.devices)


def num_buckets_of(units: Sequence[Unit]) -> int:
    """Return the number of buckets that torch's DDP creates."""
    num_bytes = sum(gradient_bytes(unit.weights) for unit in units)
    return max(math.ceil(num_bytes / BUCKET_BYTES), 1)


def _gather(unit: Unit, plan: Plan, layout: Layout, machine: Machine) -> UnitExchange:
    group, whole_bytes = shard_group(plan), unit_bytes(unit, layout).gathered
    stored_bytes = sum(own_bytes(each, layout) for each in _sharded(unit))
    copied_bytes = stored_bytes + whole_bytes / layout.num_shards + 2 * whole_bytes
    return UnitExchange(gather_s(whole_bytes, group, machine), copied_bytes)


def _reduce(unit: Unit, plan: Plan, layout: Layout, machine: Machine) -> UnitExchange:
    num_own = sum(own_elements(each, layout) for each in _sharded(unit) if each.is_trained)
    if not num_own:
        return NOTHING
    group, whole_bytes = shard_group(plan), unit_bytes(unit, layout).sent
    copied_bytes = num_own * layout.num_shards * unit.gathered_dtype.itemsize + whole_bytes
    part_bytes = num_own * unit.sum_dtype.itemsize
    if layout.on_gloo and machine.in_node_reduce is None:  # each rank copies its shard and adds the others
        copied_bytes += whole_bytes + part_bytes * (2 * layout.num_shards - 1)
    found = UnitExchange(reduce_scatter_s(whole_bytes, group, machine), copied_bytes)
    parallel = plan.parallel
    if parallel.num_ranks == layout.num_shards:
        return found
    copies = Group.of_copies(parallel.num_ranks, layout.num_shards, parallel.devices)
    return found + UnitExchange(all_reduce_s(part_bytes, copies, machine))


def _sharded(unit: Unit) -> list[Weight]:
    # Scalars are not sharded. They are reduced once per step, in negligible time.
    return [each for each in unit.weights if each.shape]


def _of_replicas(units: Sequence[Unit], plan: Plan, machine: Machine) -> list[UnitTraffic]:
    # The latency is proportional to the number of buckets, not of units. Each unit has a share of it.
    wire = torch.bfloat16 if plan.parallel.reduce_dtype == "bf16" else None
    group = shard_group(plan)
    trained = [[each for each in unit.weights if each.is_trained] for unit in units]
    whole_bytes = [sum(math.prod(each.shape) * each.dtype.itemsize for each in weights) for weights in trained]
    num_bytes = [sum(_travelling_bytes(each, wire, plan) for each in weights) for weights in trained]
    if not sum(whole_bytes):
        return []
    num_buckets = num_buckets_of(units)
    link_s = num_buckets * all_reduce_s(sum(num_bytes) / num_buckets, group, machine)
    adds_up = machine.device.kind == "cpu" and machine.in_node_reduce is None
    copied = 2 + (3 * group.share_sent if adds_up else 0)  # passes: the copy into the bucket, and the sum
    compression = compression_named(plan.parallel.gradient_compression)
    if compression is not None:
        copied += compression.num_passes
        link_s += (compression.num_collectives - 1) * num_buckets * all_reduce_s(1, group, machine)
    found = []
    for unit, whole, wired in zip(units, whole_bytes, num_bytes, strict=True):
        share = wired / max(sum(num_bytes), 1)
        reduce = UnitExchange(share * link_s, copied * whole)
        found.append(UnitTraffic(unit.name, NOTHING, reduce, is_last=unit.is_root))
    return found


def _travelling_bytes(weight: Weight, wire: torch.dtype | None, plan: Plan) -> float:
    compression = compression_named(plan.parallel.gradient_compression)
    if compression is not None:
        return compression.load().sent_bytes(weight.shape, weight.dtype.itemsize, plan.parallel)  # type: ignore[no-any-return]
    return math.prod(weight.shape) * (wire or weight.dtype).itemsize
