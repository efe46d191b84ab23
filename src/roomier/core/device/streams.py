"""Streams and events of an accelerator.

Kernels and copies on one stream run in launch order. Work on different streams is unordered unless a stream waits for
an event of another stream. Work launched inside ``with stream:`` runs on ``stream``.
"""

from __future__ import annotations

import torch


def computing_stream(device: torch.device) -> torch.Stream:
    """Return the stream to which this thread submits kernels on ``device``."""
    return torch.accelerator.current_stream(device)


def timed_event(device: torch.device) -> torch.Event:
    """Record an event on the compute stream, and return it. ``Event.elapsed_time`` returns the time between two
    such events in milliseconds."""
    event = torch.Event(device, enable_timing=True)
    event.record(computing_stream(device))
    return event


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has finished all submitted work. For the CPU, return immediately."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
