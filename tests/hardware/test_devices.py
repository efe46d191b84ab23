"""The table of devices has plausible values and unambiguous names."""

from collections import Counter

import pytest
import torch

from roomier.planner.hardware.devices import LINK_EFFICIENCY, SHEETS, peak_flops_per_s, plain_name, sheet_of

every_sheet = pytest.mark.parametrize("sheet", SHEETS, ids=lambda sheet: sheet.name)


@every_sheet
def test_figures_of_a_device_are_positive(sheet):
    device = sheet.device
    figures = [*device.flops_per_s.values(), device.memory_bytes, device.memory_bytes_per_s, device.operation_s]
    figures += [sheet.in_node, sheet.host, sheet.network, sheet.node_memory_bytes]
    assert min(figures) > 0
    assert 0 < device.product_efficiency <= 1
    assert sheet.num_links >= 0


@every_sheet
def test_fewer_bits_are_never_slower(sheet):
    order = [name for name in ("fp32", "tf32", "bf16", "fp8") if name in sheet.device.flops_per_s]
    rates = [sheet.device.flops_per_s[name] for name in order]
    assert rates == sorted(rates)
    assert sheet.device.flops_per_s["fp16"] >= sheet.device.flops_per_s.get("bf16", 0)


@every_sheet
def test_memory_is_nearer_than_neighbours_and_neighbours_than_the_network(sheet):
    assert sheet.device.memory_bytes_per_s > sheet.in_node >= max(sheet.host, sheet.network)


@every_sheet
def test_a_device_holds_less_than_its_name_says(sheet):
    told = [part for part in sheet.name.replace("-", " ").split() if part.endswith("gb")]
    for part in told:
        named = int(part.removesuffix("gb"))
        assert 0.95 * named < sheet.device.memory_bytes / 2**30 < named


def test_a_name_means_one_device():
    names = Counter(name for sheet in SHEETS for name in {plain_name(each) for each in (sheet.name, *sheet.aliases)})
    assert [name for name, count in names.items() if count > 1] == []
    assert len({sheet.name for sheet in SHEETS}) == len(SHEETS)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("A100", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("rtx 3090", "rtx3090"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA L40", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
        ("", None),
    ],
)
def test_names_that_torch_and_people_give(name, device):
    found = sheet_of(name)
    assert (None if found is None else found.name) == device


def test_a_machine_of_a_sheet():
    machine = sheet_of("h100").machine(8, 4)
    assert machine.num_ranks == 32
    assert machine.source == "data sheets"
    assert machine.in_node.bytes_per_s == LINK_EFFICIENCY * 450e9
    assert machine.in_node.latency_s < machine.between_nodes.latency_s
    assert machine.to_host.bytes_per_s < machine.in_node.bytes_per_s


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "16", 989.5e12),
        ("NVIDIA H100 PCIe", "16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156e12),
        ("NVIDIA A100-SXM4-80GB", "32", 19.5e12),
        ("Tesla V100-SXM2-16GB", "tf32", None),
        ("Tesla V100-SXM2-16GB", "16", 125e12),
        ("NVIDIA L40S", "16", 362e12),
        ("NVIDIA L40", "16", None),
        ("NVIDIA A10G", "16", 70e12),
        ("NVIDIA RTX A1000", "16", None),
    ],
)
def test_peak(name, precision, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops_per_s(torch.device("cuda"), precision) == peak


def test_a_cpu_has_no_known_peak():
    assert peak_flops_per_s(torch.device("cpu"), "32") is None
