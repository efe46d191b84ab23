"""Time that transfers of model states between the device and lower tiers add to a step.

[Note: time of the modes]
``C`` is the duration of the forward and backward passes, ``F`` the duration of the first forward pass, ``U`` the
duration of the update, and ``IO`` the duration of all transfers of the update. ``ring`` is the part of ``IO`` that
fills the buffers during the backward pass:

    plain        C + max(U, IO - ring)
    deferred     C - F + max(F + U, IO - ring)
    speculative  max(C + U, IO)

With a single buffer, updates wait for all transfers, and each mode takes ``C + U + IO``.

On a machine with two cores and a disk, measured steps differed from these formulas by 10 to 15 %. A disk divides its
time between reads and writes. On that machine, a reader alone reached 2.15 GiB/s, a writer alone 7.3 GiB/s, and both
together 1.67 GiB/s each. All devices of a node share the disk. A link between a device and its host transfers in both
directions at the same time. If parameters are offloaded, the forward and backward passes take at least as long as their
transfers. Transfers of activations are assumed not to slow down transfers of model states.
"""

from __future__ import annotations

from dataclasses import dataclass

from roomier.planner.forecast import Traffic
from roomier.planner.formula.offloaded import Offloaded
from roomier.planner.hardware.machine import Machine


@dataclass(frozen=True)
class Durations:
    """Durations of a step without tiers, in seconds.

    Attributes:
        first_forward_s: duration of the forward pass of the first micro-batch.
        forward_s: duration of the forward passes of all micro-batches.
        backward_s: duration of the backward passes of all micro-batches.
        update_s: duration of clipping and of the optimizer step.
    """

    first_forward_s: float
    forward_s: float
    backward_s: float
    update_s: float


def added_s(away: Offloaded, machine: Machine, step: Durations) -> float:
    """Return the seconds that the transfers add to a step. See [Note: time of the modes].

    Args:
        away: model states in lower tiers.
        machine: machine that the forecast is for.
        step: durations without tiers.
    """
    forward_s = max(step.forward_s, transfer_s(away.forward_traffic, machine))
    backward_s = max(step.backward_s, transfer_s(away.backward_traffic, machine))
    added = forward_s - step.forward_s + backward_s - step.backward_s
    window = Durations(step.first_forward_s, forward_s, backward_s, step.update_s)
    transfers_s = transfer_s(away.update_traffic, machine)
    return added + (transfers_s if away.is_serial else waits_s(away.mode, transfers_s, away.ring_share, window))


def waits_s(mode: str, transfers_s: float, ring_share: float, step: Durations) -> float:
    """Return the seconds that a step waits for the transfers of its updates. See [Note: time of the modes].

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
