"""Description of the current machine if it has a GPU. The tests patch the functions of torch that describe the GPU."""

from types import SimpleNamespace

import pytest
import torch

from roomier import RoomierError
from roomier.planner.hardware import measured, this_machine
from roomier.planner.hardware.devices import sheet_of
from roomier.planner.hardware.measured import Measured, circumstances_of, store
from tests.device_layer.accelerators import have_accelerator

TOTAL_BYTES = 85_000_000_000


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "cache_file", lambda: tmp_path / "roomier" / "hardware.json")
    this_machine._quick_look.cache_clear()


@pytest.fixture
def has_gpu(monkeypatch):
    def have(name):
        have_accelerator(monkeypatch, "cuda")
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        properties = SimpleNamespace(total_memory=TOTAL_BYTES)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    return have


def measured_on_gpu(num_ranks=8):
    return Measured(
        circumstances=circumstances_of(torch.device("cuda", 0), num_ranks),
        measured_at="2026-01-02T03:04:05+00:00",
        is_quick=False,
        flops_per_s={"fp32": 5e13, "tf32": 3.5e14, "bf16": 0.7 * 989.5e12, "fp16": 0.7 * 989.5e12},
        memory_bytes_per_s=3e12,
        operation_s=4e-6,
        update_bytes_per_s=2.8e12,
        host_bytes_per_s=5.5e10,
        gather=(3e11, 2e-5),
        reduce=(2.9e11, 2e-5),
        disk_read=5e9,
        disk_write=3e9,
    )


def test_a_gpu_of_the_table_has_the_rates_of_its_sheet_and_the_memory_it_really_has(has_gpu):
    has_gpu("NVIDIA H100 80GB HBM3")
    machine = this_machine.this_machine(8, 2)
    sheet = sheet_of("h100")
    assert machine.device.name == "h100"
    assert machine.device.memory_bytes == TOTAL_BYTES
    assert machine.device.flops_per_s == sheet.device.flops_per_s
    assert machine.in_node == sheet.machine(8, 2).in_node
    assert machine.num_ranks == 16
    assert "data sheet" in machine.source


def test_measured_rates_take_the_place_of_the_sheet_and_fp8_follows_bf16(has_gpu):
    has_gpu("NVIDIA H100 80GB HBM3")
    store([measured_on_gpu()])
    machine = this_machine.this_machine(8)
    assert machine.device.flops_per_s["bf16"] == 0.7 * 989.5e12
    assert machine.device.flops_per_s["fp8"] == pytest.approx(0.7 * 1979e12)
    assert machine.device.product_efficiency == 1
    assert machine.device.memory_bytes == TOTAL_BYTES
    assert (machine.in_node.bytes_per_s, machine.to_host.bytes_per_s) == (3e11, 5.5e10)
    assert machine.between_nodes == sheet_of("h100").machine(8, 1).between_nodes
    assert "measured" in machine.source


def test_a_gpu_that_is_not_in_the_table_is_looked_at(has_gpu, monkeypatch):
    has_gpu("NVIDIA GeForce RTX 9090")
    monkeypatch.setattr(this_machine, "measure_quickly", lambda device, num_ranks: measured_on_gpu(num_ranks))
    machine = this_machine.this_machine(2)
    assert machine.device.name == "NVIDIA GeForce RTX 9090"
    assert machine.device.kind == "cuda"
    assert machine.device.flops_per_s["tf32"] == 3.5e14
    assert "fp8" not in machine.device.flops_per_s


def test_a_processor_can_be_asked_for_where_there_is_a_gpu(has_gpu, monkeypatch):
    has_gpu("NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(this_machine, "measure_quickly", lambda device, num_ranks: measured_on_gpu(num_ranks))
    assert this_machine.this_machine(accelerator="cpu").device.kind == "cpu"


def test_an_accelerator_that_is_not_there_is_refused(monkeypatch):
    have_accelerator(monkeypatch, None)
    with pytest.raises(RoomierError, match="accelerator='cuda'"):
        this_machine.this_machine(accelerator="cuda")
