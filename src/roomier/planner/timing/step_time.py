"""Forecast of the step time, from computation, communication and the update.

[Note: forecast of time]
The parts of the model are simulated in execution order (``timeline.py``), each with its duration from the roofline
model (``compute_time.py``) and the collectives of its unit (``traffic.py``). The difference to a second simulation
without collectives is the exposed communication time. The duration of the update (``update_time.py``) is then added.
The forecast is suitable for ranking plans. It excludes costs that all plans share, such as the loader, callbacks, and
the extra time of kernels that are slower than their roofline. Compiled blocks have the same forecast as eager blocks.

[Note: time of the modes]
The duration of a step depends on ``C``, the duration of the forward and backward passes, ``F``, the duration of the
first forward pass, ``U``, the duration of the update, ``IO``, the duration of all transfers of the update, and
``ring``, the part of ``IO`` that fills the buffers during the backward pass:

    plain        C + max(U, IO - ring)
    deferred     C - F + max(F + U, IO - ring)
    speculative  max(C + U, IO)

With a single buffer, updates wait for all transfers, and each mode takes ``C + U + IO``.

On a machine with two cores, measured step times with offload to disk differed from these formulas by 10 to 15 %.
Simultaneous reads and writes slow each other down: on this machine, a reader alone reached 2.15 GiB/s, a writer alone
7.3 GiB/s, and both together 1.67 GiB/s each. All devices of a node share the disk, but a link between a device and its
host transfers at the full rate in both directions. If parameters are offloaded, the forward and backward passes take at
least as long as their transfers. Transfers of activations are assumed not to slow down transfers of model states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from roomier.api.module import network_of
from roomier.plan import Plan
from roomier.planner.dry_runs.work import Work, WorkKey
from roomier.planner.forecast import StepTime, Traffic
from roomier.planner.formula.offloaded import Offloaded
from roomier.planner.hardware.machine import Device, Machine
from roomier.planner.memory.predict import layout_of
from roomier.planner.memory.walk import Layout
from roomier.planner.memory.weights import Unit, units_with_weights, with_adapters
from roomier.planner.timing.collective_time import Group, all_reduce_s, gather_s
from roomier.planner.timing.compute_time import Duration, duration, recomputed_blocks, repeating, second_forward
from roomier.planner.timing.timeline import Segment, Transfer, play
from roomier.planner.timing.traffic import UnitExchange, UnitTraffic, exchanges, num_buckets_of, traffic_of
from roomier.planner.timing.update_time import update_time
from roomier.planner.workload import Workload
from roomier.techniques.activation.block_forward import Keep
from roomier.techniques.precision.policy import precision_of

# Host time of a sharded unit, as multiples of the lightest operation (see [Note: cost of Python]), measured for a model
# of eight tiny units with a process group that does not communicate. The lightest operation took 3.2 us, an all-gather
# 0.25 ms, a reduce-scatter 0.19 ms, and the hooks of a unit 0.27 ms (torch 2.13).
_OPERATIONS_OF_GATHER = 75
_OPERATIONS_OF_REDUCTION = 60
_OPERATIONS_OF_HOOKS = 85
# Host time of each weight in a unit. Measurements of the process time on two gloo ranks, for an encoder with 54 small
# weights and an MLP with 16 weights, resulted in 13 to 30 operations per weight. The sum of the two values below is
# near the middle of this range.
_OPERATIONS_OF_WEIGHT_GATHERED = 8
_OPERATIONS_OF_WEIGHT_REDUCED = 12
_OPERATIONS_OF_EXCHANGE = 10  # host time of an all-to-all without copying its data, measured in the same way
_COUNT_BYTES = 8  # size of the number of terms in a loss, which the ranks sum


def step_time(
    workload: Workload,
    plan: Plan,
    machine: Machine,
    work: Mapping[WorkKey, Work],
    *,
    units: Sequence[Unit] | None = None,
    kept_bytes: Mapping[str, float] | None = None,
    away: Offloaded | None = None,
    chosen: Mapping[str, Keep] | None = None,
) -> StepTime:
    """Return the duration of one optimizer step.

    Args:
        workload: workload with the micro-batch of ``plan``.
        plan: plan with a concrete strategy.
        machine: machine that the forecast is for.
        work: work of one optimizer step on one rank for each phase and part of the model, summed over all
            micro-batches. The keys are in the order of execution. ``work`` includes recomputation and excludes
            communication. The work of phase ``"update"`` is used if the plan names no optimizer.
        units: units of the network; None computes the units.
        kept_bytes: bytes that each block saves for backward in one micro-batch, for activation offloading. The default
            is half of the bytes that the forward pass of the block moves outside matrix products, because each result
            is written and read once.
        away: offloaded model states; None if all model states are on the device.
        chosen: activations that each block saves, as chosen for an activation budget. If None and ``plan`` has an
            activation budget, all blocks are assumed to be recomputed in full.

    Raises:
        RoomierError: the rate of the device is not known for a dtype.
    """
    network = network_of(workload.module)
    # The installed torch may not support the device of a planned machine. A device with separate memory is then planned
    # like CUDA.
    device = torch.device("cuda" if machine.device.has_own_memory else machine.device.kind)
    precision = precision_of(plan.precision.mode, device)
    if units is None:
        adapted, blocks_of_adapted = with_adapters(network, workload.blocks, plan.adapter)
        units = units_with_weights(adapted, blocks_of_adapted, precision.autocast_dtype, precision.weight_dtype)
    names = {module: name for name, module in network.named_modules()}
    treats_blocks = (plan.activation.policy, plan.offload.activations) != ("none", "none")
    blocks = [names[each] for each in workload.blocks] if treats_blocks or plan.optimizer.name == "muon" else []
    layout = layout_of(plan, device)
    traffic = traffic_of(units, plan, layout, machine)
    keeps = recomputed_blocks(work, plan, blocks, chosen)
    again = second_forward(work, keeps)
    for part, each in repeating(work, plan, keeps).items():
        again[part] += each
        work = {**work, part: work.get(part, Work()) + each}
    step = _Step(plan, machine, layout, traffic, num_buckets_of(units), work)
    copies_s = step.copies_s(blocks, kept_bytes)
    alone_s = step.seconds()
    exchanging_s = step.seconds(exchanges=True)
    copying_s = step.seconds(exchanges=True, copies_s=copies_s) if copies_s else exchanging_s
    update = update_time(units, plan, machine, layout, blocks=blocks, work=work)
    start_s = _start_exchange_s(workload, plan, machine)
    waits_s = 0.0
    if away is not None and away.is_used:
        forward_s = step.forward_s()
        durations = Durations(forward_s / step.num_micro_batches, forward_s, alone_s - forward_s, update.compute_s)
        waits_s = added_s(away, machine, durations)
    return StepTime(
        compute_s=alone_s,
        recompute_s=sum(_duration(each, machine.device, plan).on(machine.device) for each in again.values()),
        communication_s=step.communication_s() + start_s + update.exchange_s,
        exposed_s=exchanging_s - alone_s + start_s + update.exchange_s,
        offload_s=copying_s - exchanging_s + waits_s,
        update_s=update.compute_s,
    )


def _duration(work: Work, device: Device, plan: Plan) -> Duration:
    return duration(work, device, plan.precision.matmul)


def _start_exchange_s(workload: Workload, plan: Plan, machine: Machine) -> float:
    """Return the duration in seconds of the communication before the first forward pass.

    The ranks sum the numbers of terms in their mean losses. With DDP, rank 0 also broadcasts the buffers.
    """
    parallel = plan.parallel
    if parallel.num_ranks == 1:
        return 0.0
    group = Group.of_neighbours(parallel.num_ranks, parallel.devices)
    seconds = all_reduce_s(_COUNT_BYTES, group, machine) if workload.module.loss_reduction == "mean" else 0.0
    if parallel.strategy == "ddp":
        seconds += gather_s(_changing_buffer_bytes(network_of(workload.module)), group, machine)
    return seconds


def _changing_buffer_bytes(network: nn.Module) -> int:
    return sum(
        buffer.numel() * buffer.itemsize
        for module in network.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in getattr(module, "constant_buffers", ())
    )


@dataclass(frozen=True)
class _Step:
    """Forward and backward passes of one optimizer step.

    Attributes:
        plan: plan with a concrete strategy.
        machine: machine that the forecast is for.
        layout: how the model is sharded.
        traffic: collectives of each unit, starting with the root.
        num_buckets: number of buckets in which DDP reduces gradients.
        work: work of all micro-batches.
    """

    plan: Plan
    machine: Machine
    layout: Layout
    traffic: Sequence[UnitTraffic]
    num_buckets: int
    work: Mapping[WorkKey, Work]

    @property
    def num_micro_batches(self) -> int:
        return self.plan.batch.accumulate_grad_batches

    def seconds(self, *, exchanges: bool = False, copies_s: Mapping[str, float] | None = None) -> float:
        segments = self._segments(copies_s or {}, exchanges=exchanges)
        if exchanges:
            segments = self._with_exchanges(segments)
        is_ddp = self.layout.strategy == "ddp"
        link_s = sum(each.reduce.link_s for each in self.traffic)
        return play(
            [segment for _, segment in segments],
            self.num_micro_batches,
            is_cpu=self.machine.device.kind == "cpu",
            waits_each=not is_ddp,
            bucket_s=link_s / self.num_buckets if is_ddp and exchanges else 0.0,
            is_sequential=self.layout.is_sequential,
        )

    def forward_s(self) -> float:
        """Return the duration of the forward passes of all micro-batches in seconds, excluding exchanges and copies."""
        return sum(
            _duration(each, self.machine.device, self.plan).on(self.machine.device)
            for (phase, _), each in self.work.items()
            if phase == "forward"
        )

    def communication_s(self) -> float:
        """Return the total duration of all collectives in seconds, including packing."""
        counted = exchanges(self.traffic, self.num_micro_batches, self.layout.num_backwards)
        of_units_s = sum(count * (each.link_s + self._copied_s(each)) for each, count in counted)
        return of_units_s + sum(self._exchange(each).device_s for each in self.work.values())

    def _exchange(self, work: Work) -> Duration:
        """Return the duration of the all-to-alls between the ranks that share a sequence, which do not overlap with
        computation."""
        if not work.num_exchanges:
            return Duration(0.0, 0.0)
        parallel, device = self.plan.parallel, self.machine.device
        group = Group.of_neighbours(parallel.context_parallel_size, parallel.devices)
        once_s = gather_s(work.exchanged_bytes / work.num_exchanges, group, self.machine)
        host_s = _OPERATIONS_OF_EXCHANGE * device.operation_s
        return Duration(work.num_exchanges * once_s, work.num_exchanges * host_s)

    def copies_s(self, blocks: Sequence[str], kept_bytes: Mapping[str, float] | None) -> dict[str, float]:
        """Return the time to copy the activations of each block to its tier in one micro-batch and one direction, in
        seconds."""
        if self.plan.offload.activations == "none":
            return {}
        if kept_bytes is None:
            forward = {place: each for (phase, place), each in self.work.items() if phase == "forward"}
            kept_bytes = {
                place: forward[place].other_bytes / 2 / self.num_micro_batches for place in blocks if place in forward
            }
        return {place: self._copy_s(kept_bytes[place]) for place in blocks if place in kept_bytes}

    def _copy_s(self, num_bytes: float) -> float:
        if self.plan.offload.activations == "cpu":
            return self.machine.to_host.time_s(num_bytes)
        on_link = round(num_bytes) if self.machine.device.has_own_memory else 0
        return transfer_s(Traffic(to_device_bytes=on_link, disk_read_bytes=round(num_bytes)), self.machine)

    def _segments(self, copies_s: Mapping[str, float], *, exchanges: bool) -> list[tuple[str, Segment]]:
        share = 1 / self.num_micro_batches

        def duration_of(work: Work) -> Duration:
            computed = _duration(work, self.machine.device, self.plan)
            return computed + self._exchange(work) if exchanges else computed

        return [
            (
                place,
                Segment(
                    duration_of(each * share),
                    is_backward=phase == "backward",
                    copy_s=copies_s.get(place, 0.0),
                ),
            )
            for (phase, place), each in self.work.items()
            if phase in ("forward", "backward")
        ]

    def _with_exchanges(self, segments: Sequence[tuple[str, Segment]]) -> list[tuple[str, Segment]]:
        places = [place for place, _ in segments]
        gathers: dict[tuple[str, bool], list[Transfer]] = {}
        reduces: dict[str, list[Transfer]] = {}
        first = places[0] if places else ""
        for unit in self.traffic:
            place = _place_of(unit.name, places)
            if self.layout.is_sharded:
                hooks = Transfer(0.0, host_s=_OPERATIONS_OF_HOOKS * self.machine.device.operation_s)
                gathers.setdefault((first if place is None else place, False), []).extend((self._gather(unit), hooks))
            if unit.gathers_again:
                gathers.setdefault((place or "", True), []).append(self._gather(replace(unit, in_each=True)))
            reduces.setdefault(place or "", []).append(self._reduction(unit))
        found, last = [], len(segments) - 1
        for index, (place, segment) in enumerate(segments):
            own_reduces = reduces.pop(place, []) if segment.is_backward else []
            if index == last:  # reductions of the root and of units without a part
                own_reduces = own_reduces + [each for rest in reduces.values() for each in rest]
            own_gathers = gathers.pop((place, segment.is_backward), [])
            found.append((place, replace(segment, gathers=tuple(own_gathers), reduces=tuple(own_reduces))))
        return found

    def _gather(self, unit: UnitTraffic) -> Transfer:
        num_operations = _OPERATIONS_OF_GATHER + _OPERATIONS_OF_WEIGHT_GATHERED * unit.num_weights
        host_s = num_operations * self.machine.device.operation_s
        return Transfer(
            unit.gather.link_s,
            self._copied_s(unit.gather),
            host_s,
            when="each" if unit.in_each else "first",
        )

    def _reduction(self, unit: UnitTraffic) -> Transfer:
        num_backwards = self.layout.num_backwards
        num_operations = _OPERATIONS_OF_REDUCTION + _OPERATIONS_OF_WEIGHT_REDUCED * unit.num_weights
        host_s = num_operations * self.machine.device.operation_s if self.layout.is_sharded else 0.0
        return Transfer(
            unit.reduce.link_s * num_backwards,
            self._copied_s(unit.reduce) * num_backwards,
            host_s * num_backwards,
            when="each" if unit.in_each else "last",
            is_late=unit.is_last,
        )

    def _copied_s(self, exchange: UnitExchange) -> float:
        return exchange.copied_bytes / self.machine.device.memory_bytes_per_s


def _place_of(unit: str, places: Sequence[str]) -> str | None:
    """Return the name of the part of the model that is, contains or is inside ``unit``; None for the root, or if there
    is no such part."""
    if not unit:
        return None
    around = [each for each in places if each and (unit == each or unit.startswith(f"{each}."))]
    if around:
        return max(around, key=len)
    return next((each for each in places if each.startswith(f"{unit}.")), None)


@dataclass(frozen=True)
class Durations:
    """Durations in a step without offload, in seconds.

    Attributes:
        first_forward_s: duration of the forward pass of the first micro-batch.
        forward_s: duration of the forward passes of all micro-batches.
        backward_s: duration of the backward passes of all micro-batches.
        update_s: duration of gradient clipping and of the optimizer step.
    """

    first_forward_s: float
    forward_s: float
    backward_s: float
    update_s: float


def added_s(away: Offloaded, machine: Machine, step: Durations) -> float:
    """Return the time in seconds that the transfers add to a step. See [Note: time of the modes].

    Args:
        away: offloaded model states.
        machine: machine that the forecast is for.
        step: durations without offload.
    """
    forward_s = max(step.forward_s, transfer_s(away.forward_traffic, machine))
    backward_s = max(step.backward_s, transfer_s(away.backward_traffic, machine))
    added = forward_s - step.forward_s + backward_s - step.backward_s
    window = Durations(step.first_forward_s, forward_s, backward_s, step.update_s)
    transfers_s = transfer_s(away.update_traffic, machine)
    return added + (transfers_s if away.is_serial else waits_s(away.mode, transfers_s, away.ring_share, window))


def waits_s(mode: str, transfers_s: float, ring_share: float, step: Durations) -> float:
    """Return the time in seconds that a step waits for the transfers of its updates. See [Note: time of the modes].

    Args:
        mode: ``"plain"``, ``"deferred"`` or ``"speculative"``.
        transfers_s: duration of the transfers.
        ring_share: fraction of the transfers that fills the buffers during the backward pass.
        step: durations without the transfers.
    """
    if mode == "speculative":
        return max(0.0, transfers_s - step.forward_s - step.backward_s - step.update_s)
    window_s = step.update_s + (step.first_forward_s if mode == "deferred" else 0.0)
    return max(0.0, transfers_s * (1 - ring_share) - window_s)


def transfer_s(traffic: Traffic, machine: Machine) -> float:
    """Return the duration of the transfers of one rank in seconds, if all ranks of the node transfer at the same
    time."""
    link_bytes = max(traffic.to_device_bytes, traffic.to_host_bytes)
    link_s = machine.to_host.time_s(link_bytes) if link_bytes else 0.0
    ranks = machine.devices_per_node
    disk_s = machine.disk_time_s(traffic.disk_read_bytes * ranks, traffic.disk_written_bytes * ranks)
    return max(link_s, disk_s)
