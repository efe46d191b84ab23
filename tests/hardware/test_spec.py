"""Machines that are specified by name or by file, and errors for invalid names and files."""

import json
from dataclasses import asdict, replace

import pytest
import yaml

from roomier import RoomierError
from roomier.planner.hardware import spec
from roomier.planner.hardware.devices import SHEETS
from roomier.planner.hardware.machine import Link
from roomier.planner.hardware.spec import machine_of, machine_of_dict

A_MACHINE = {
    "device": {
        "name": "mine",
        "kind": "cuda",
        "memory_bytes": "24GiB",
        "flops_per_s": {"fp32": "10e12", "bf16": 4e13},
        "memory_bytes_per_s": 5e11,
    },
    "devices_per_node": 2,
    "num_nodes": 3,
    "in_node": {"bytes_per_s": 1e10, "latency_s": 1e-5},
    "between_nodes": 1e9,
    "to_host": 1.2e10,
    "disk_read": 2e9,
    "disk_write": 1e9,
    "host_memory_bytes": "64GB",
}


@pytest.mark.parametrize(
    ("text", "device", "devices"),
    [
        ("a100-40gb:8", "a100-40gb", 8),
        ("8xa100-40gb", "a100-40gb", 8),
        ("4 x H100", "h100", 4),
        ("A100", "a100-40gb", 1),
        ("b200 : 2", "b200", 2),
        ("NVIDIA A100-SXM4-40GB:4", "a100-40gb", 4),
        ("4090", "rtx4090", 1),
        ("2x4090", "rtx4090", 2),
        (" RTX 3090:2 ", "rtx3090", 2),
    ],
)
def test_a_gpu_and_how_many(text, device, devices):
    machine = machine_of(text)
    assert (machine.device.name, machine.devices_per_node, machine.num_nodes) == (device, devices, 1)


def test_free_space_on_the_disk():
    assert machine_of("a100-40gb").disk_free_bytes is None
    assert machine_of_dict(A_MACHINE).disk_free_bytes is None
    machine = machine_of_dict({**A_MACHINE, "disk_free_bytes": "2TiB"})
    assert machine.disk_free_bytes == 2 * 2**40
    assert machine_of_dict(asdict(machine)) == machine
    with pytest.raises(RoomierError, match="disk_free_bytes"):
        machine_of_dict({**A_MACHINE, "disk_free_bytes": -1})


def test_the_number_of_nodes():
    assert machine_of("a100-40gb:8", num_nodes=4).num_ranks == 32


@pytest.mark.parametrize(
    ("text", "asked"), [("this", (1, 1, "auto")), ("This:4", (4, 1, "auto")), ("cpu:2", (2, 1, "cpu"))]
)
def test_the_current_machine(text, asked, monkeypatch):
    monkeypatch.setattr(spec, "this_machine", lambda devices, nodes, accelerator: (devices, nodes, accelerator))
    assert machine_of(text) == asked


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a1000", "hardware='a1000': .*Did you mean 'a100-40gb'\\?"),
        ("h10:8", "hardware='h10:8': .*Did you mean 'h100'\\?"),
        ("RTX 3090 Ti", "Did you mean 'rtx3090'"),
        ("potato", "Use one of: this, cpu, .*h100, .*YAML"),
        ("", "hardware='': "),
        ("a100:x", "'x' is not a number of devices. Add the number of devices per node: 'a100:8'"),
        ("a100:0", "'0' is not a number"),
        ("a100:-1", "'-1' is not a number"),
        ("a100:", "'' is not a number"),
        ("this:2.5", "'2.5' is not a number"),
        ("h100:1024", "a node has at most 16 devices. Use 'h100:8' with 128 nodes for 1024 devices"),
        ("nowhere.yaml", "hardware='nowhere.yaml': cannot be read: .*No such file"),
    ],
)
def test_an_invalid_machine_is_rejected_with_an_alternative(text, message):
    with pytest.raises(RoomierError, match=message):
        machine_of(text)


def test_zero_nodes_are_rejected():
    with pytest.raises(RoomierError, match="nodes=0"):
        machine_of("h100:8", num_nodes=0)


@pytest.mark.parametrize("sheet", SHEETS, ids=lambda sheet: sheet.name)
def test_every_machine_survives_json(sheet):
    machine = replace(sheet.machine(8, 2), in_node_reduce=Link(1e9, 1e-3))
    assert machine_of_dict(json.loads(json.dumps(asdict(machine)))) == machine


@pytest.mark.parametrize(("name", "write"), [("m.yaml", yaml.safe_dump), ("m.JSON", json.dumps)])
def test_a_custom_machine(name, write, tmp_path):
    path = tmp_path / name
    path.write_text(write(A_MACHINE))
    machine = machine_of(str(path))
    assert machine.device.memory_bytes == 24 * 2**30
    assert machine.device.flops_per_s == {"fp32": 1e13, "bf16": 4e13}
    assert machine.in_node == Link(1e10, 1e-5)
    assert machine.between_nodes == Link(1e9)
    assert machine.host_memory_bytes == 64 * 10**9
    assert machine.num_ranks == 6
    assert machine.source == "a file"
    assert machine_of(str(path), num_nodes=5).num_ranks == 10


def test_a_device_of_the_table_in_a_custom_node():
    machine = machine_of_dict({"device": "a100-80gb", "devices_per_node": 4, "between_nodes": 1e9})
    usual = machine_of("a100-80gb:4")
    assert machine.device == usual.device
    assert machine.between_nodes == Link(1e9)
    assert (machine.in_node, machine.num_ranks) == (usual.in_node, 4)
    assert "file" in machine.source


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": {**A_MACHINE["device"], "kind": "gpu"}}, "device.kind='gpu'"),
        ({"device": {**A_MACHINE["device"], "memory": 5}}, "device.memory=5: .*Did you mean 'memory_bytes'"),
        ({"device": {**A_MACHINE["device"], "flops_per_s": {"bf16": 1e12}}}, "must contain 'fp32'"),
        ({"device": {**A_MACHINE["device"], "flops_per_s": {"fp32": -1}}}, "device.flops_per_s.fp32=-1"),
        ({"device": {**A_MACHINE["device"], "product_efficiency": 1.5}}, "product_efficiency=1.5"),
        ({"device": {"name": "mine"}}, "device.kind=None: is missing"),
        ({"device": "a1000"}, "Did you mean 'a100-40gb'"),
        ({"device": 5}, "device=5: must map names to values"),
        ({"devices_per_node": 2.5}, "devices_per_node=2.5: must be an integer"),
        ({"devices_per_node": 0}, "devices_per_node=0"),
        ({"num_nodes": True}, "num_nodes=True"),
        ({"in_node": {"bytes_per_s": "fast"}}, "in_node.bytes_per_s='fast'"),
        ({"in_node": {"latency_s": 0.1}}, "in_node.bytes_per_s=None: is missing"),
        ({"between_nodes": float("inf")}, "between_nodes=inf"),
        ({"disk_read": None}, "disk_read=None"),
        ({"host_memory_bytes": "much"}, "host_memory_bytes='much': is not a number of bytes"),
        ({"nodes": 3}, "nodes=3: is not a field of a machine. Did you mean 'num_nodes'"),
    ],
)
def test_an_invalid_field_of_a_file_is_rejected(change, message):
    with pytest.raises(RoomierError, match=message):
        machine_of_dict({**A_MACHINE, **change})


@pytest.mark.parametrize("content", ["- 1", "a: [", "", "{"])
def test_a_file_without_a_mapping_is_rejected(content, tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text(content)
    with pytest.raises(RoomierError, match=r"cannot be read|must map names"):
        machine_of(str(path))


def test_time_of_reads_and_writes_at_the_same_time() -> None:
    machine = replace(machine_of("a100"), disk_read=Link(2e9), disk_write=Link(4e9))
    assert machine.disk_time_s(8e9, 4e9) == 8 / 2 + 4 / 4
    both = replace(machine, disk_both=Link(5e9))
    assert both.disk_time_s(8e9, 4e9) == 8 / 5 + 4 / 2
    assert both.disk_time_s(0, 4e9) == 4 / 4
    assert both.disk_time_s(0, 0) == 0
