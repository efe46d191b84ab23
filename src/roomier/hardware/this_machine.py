"""The machine this process runs on, as a value."""

from __future__ import annotations

import psutil
import torch

from roomier.hardware.machine import Device, Link, Machine


def this_machine(devices: int = 1, num_nodes: int = 1) -> Machine:
    """This machine with ``devices`` ranks on each of ``num_nodes`` nodes."""
    memory_bytes = psutil.virtual_memory().total
    device = Device("cpu", "cpu", memory_bytes // devices, {"fp32": 50e9 * torch.get_num_threads()}, 10e9)
    memory = Link(10e9)
    return Machine(device, devices, num_nodes, memory, memory, memory, Link(1e9), Link(1e9), memory_bytes, "assumed")
