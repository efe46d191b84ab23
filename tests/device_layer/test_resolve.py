"""Devices that correspond to names of accelerators."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from roomier import RoomierError
from roomier.core.device import resolve
from roomier.core.device.resolve import group_backend, num_devices, resolve_device
from tests.device_layer.accelerators import have_accelerator


def test_the_accelerator_of_torch_is_resolved(monkeypatch):
    have_accelerator(monkeypatch, "xpu", index=1, count=4)
    for name in ("auto", "gpu", "xpu"):
        assert resolve_device(name) == torch.device("xpu", 1)
    assert resolve_device("cpu") == torch.device("cpu")
    assert num_devices(torch.device("xpu", 1)) == 4
    assert num_devices(torch.device("cpu")) == 1


@pytest.mark.parametrize("present", [None, "cuda", "mps", "xpu"])
def test_auto_selects_the_accelerator_or_the_cpu(present, monkeypatch):
    have_accelerator(monkeypatch, present)
    assert resolve_device("auto").type == (present or "cpu")


@pytest.mark.parametrize(
    ("present", "asked", "available"),
    [
        (None, "cuda", "'auto', 'cpu'"),
        (None, "gpu", "'auto', 'cpu'"),
        (None, "mps", "'auto', 'cpu'"),
        ("xpu", "cuda", "'auto', 'xpu', 'cpu'"),
        ("cuda", "a name that torch does not know", "'auto', 'cuda', 'cpu'"),
    ],
)
def test_an_unavailable_accelerator_is_rejected(present, asked, available, monkeypatch):
    have_accelerator(monkeypatch, present)
    with pytest.raises(RoomierError) as caught:
        resolve_device(asked)
    assert str(caught.value) == (f"accelerator={asked!r}: is not available on this machine. Use one of: {available}.")


@pytest.mark.parametrize(("name", "package"), [("npu", "torch-npu"), ("tpu", "torch-tpu")])
def test_a_missing_package_is_named(name, package, monkeypatch):
    have_accelerator(monkeypatch, None)
    with pytest.raises(RoomierError) as caught:
        resolve_device(name)
    assert str(caught.value) == (
        f"accelerator={name!r}: requires the package {package}, which is not installed. "
        f"Run `pip install {package}`. Use one of: 'auto', 'cpu'."
    )


def test_a_package_that_cannot_be_imported_is_reported(monkeypatch):
    def fail(name):
        raise OSError(f"{name}: libtpu.so is missing")

    have_accelerator(monkeypatch, None)
    monkeypatch.setattr(resolve, "import_module", fail)
    with pytest.raises(RoomierError, match=r"torch-tpu, which cannot be imported: torch_tpu: libtpu.so is missing"):
        resolve_device("tpu")


_PACKAGE = """
import types
import torch

torch.utils.rename_privateuse1_backend({name!r})
module = types.ModuleType("torch.{name}")
module.is_available = lambda: True
module.device_count = lambda: 2
torch._register_device_module({name!r}, module)
torch.accelerator.current_device_index = lambda: 1  # this package has no driver
"""


def run(folder: Path, program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.more
def test_the_package_of_tpu_is_imported_on_demand(tmp_path):
    (tmp_path / "torch_tpu.py").write_text(_PACKAGE.format(name="tpu"))
    run(
        tmp_path,
        """
import sys, torch
from roomier.core.device.resolve import resolve_device
assert "torch_tpu" not in sys.modules
assert resolve_device("auto").type == "cpu"
assert resolve_device("tpu") == resolve_device("auto") == torch.device("tpu", 1)
""",
    )


@pytest.mark.more
def test_the_name_of_a_device_that_a_package_added_is_accepted(tmp_path):
    (tmp_path / "added.py").write_text(_PACKAGE.format(name="added"))
    run(
        tmp_path,
        """
import torch
from roomier import PlanError, Trainer
from roomier.core.device.resolve import resolve_device
from roomier.plan import plan_from_flags
from roomier.plan.table import rows
try:
    plan_from_flags(accelerator="added")
except PlanError as error:
    assert "is unknown" in str(error)
else:
    raise AssertionError
import added
plan = plan_from_flags(accelerator="added", strategy="ddp", devices=2)
assert resolve_device(plan.parallel.accelerator) == torch.device("added", 1)
assert next(row.choice for row in rows(plan) if row.part == "accelerator") == "added"
assert Trainer(accelerator="added", strategy="ddp", devices="auto", logger=False).num_devices == 2
""",
    )


@pytest.mark.parametrize(
    ("device_type", "backend"),
    [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl"), ("mps", None), ("unknown", None)],
)
def test_backend_of_a_process_group(device_type, backend):
    assert group_backend(device_type) == backend
