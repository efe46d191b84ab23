"""Bytes of a device that no tensor of a step accounts for: what a dry run cannot see."""

from __future__ import annotations

from roomier.hardware.machine import Machine
from roomier.plan import Plan


def fixed_bytes(plan: Plan, machine: Machine) -> dict[str, int]:
    """By what they are for. On a CPU there are none: the bytes of a run there are those of its tensors."""
    return {}
