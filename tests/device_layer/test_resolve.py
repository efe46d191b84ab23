"""Devices for the names of accelerators."""

import pytest
import torch

from roomier import RoomierError
from roomier.device.resolve import resolve_device


def test_cpu_is_always_available():
    assert resolve_device("cpu") == torch.device("cpu")


def test_auto_selects_an_accelerator_if_available():
    has_accelerator = torch.cuda.is_available() or torch.backends.mps.is_available()
    assert (resolve_device("auto").type == "cpu") is not has_accelerator


@pytest.mark.parametrize("accelerator", ["cuda", "gpu", "mps"])
def test_an_unavailable_accelerator_is_rejected(accelerator, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(
        RoomierError, match=r"accelerator=.*is not available on this machine. Use one of: 'auto', 'cpu'"
    ):
        resolve_device(accelerator)
