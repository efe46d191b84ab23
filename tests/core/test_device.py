"""Which device a name means here, and how fast it can be."""

import pytest
import torch

from roomier import RoomierError
from roomier.core.device import peak_flops_per_s, resolve_device


def test_cpu_is_always_there():
    assert resolve_device("cpu") == torch.device("cpu")


def test_auto_takes_an_accelerator_where_there_is_one():
    has_accelerator = torch.cuda.is_available() or torch.backends.mps.is_available()
    assert (resolve_device("auto").type == "cpu") is not has_accelerator


@pytest.mark.parametrize("accelerator", ["cuda", "gpu", "mps"])
def test_an_accelerator_that_is_not_there(accelerator, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(RoomierError, match=r"accelerator=.*this machine has none. Use one of: 'auto', 'cpu'"):
        resolve_device(accelerator)


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "16", 989e12),
        ("NVIDIA H100 PCIe", "16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156e12),
        ("Tesla V100-SXM2-16GB", "tf32", None),
        ("NVIDIA L40S", "16", 362e12),
        ("NVIDIA L40", "16", None),
        ("NVIDIA A10G", "16", None),
        ("NVIDIA RTX A1000", "16", None),
    ],
)
def test_peak(name, precision, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops_per_s(torch.device("cuda"), precision) == peak


def test_a_cpu_has_no_known_peak():
    assert peak_flops_per_s(torch.device("cpu"), "32") is None
