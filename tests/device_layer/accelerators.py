"""Accelerators that are not on this machine, for code that requests only their names from torch."""

import pytest
import torch


def have_accelerator(monkeypatch: pytest.MonkeyPatch, kind: str | None, *, index: int = 0, count: int = 1) -> None:
    """Make ``torch.accelerator`` report ``count`` devices of ``kind``. None reports no accelerator."""
    found = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: index)
