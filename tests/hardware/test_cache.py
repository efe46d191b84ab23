"""Later processes use stored measurements only under equal conditions."""

import json
import os
from dataclasses import replace

import pytest
import torch

from roomier.planner.hardware import measured, this_machine
from roomier.planner.hardware.measured import Measured, circumstances_of, store, stored
from roomier.planner.hardware.measuring import measure_quickly

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "cache_file", lambda: tmp_path / "roomier" / "hardware.json")
    this_machine._quick_look.cache_clear()


def a_measurement(num_ranks=1, **changed):
    kept = Measured(
        circumstances=circumstances_of(CPU, num_ranks),
        measured_at="2026-01-02T03:04:05+00:00",
        is_quick=False,
        flops_per_s={"fp32": 1e11, "bf16": 2e11},
        memory_bytes_per_s=1e10,
        operation_s=3e-6,
        update_bytes_per_s=8e9,
        gather=(2e9, 1e-4) if num_ranks > 1 else None,
        reduce=(1e9, 2e-4) if num_ranks > 1 else None,
        disk_read=2e9,
        disk_write=3e8,
    )
    return replace(kept, **changed)


def a_quick_look(monkeypatch):
    """Replace the next quick measurement with this value."""
    quick = a_measurement(is_quick=True, flops_per_s={"fp32": 7e9}, disk_read=None, disk_write=None)
    monkeypatch.setattr(
        this_machine,
        "measure_quickly",
        lambda device, num_ranks: replace(quick, circumstances=circumstances_of(device, num_ranks)),
    )


def test_a_stored_measurement_replaces_one_with_equal_conditions():
    one, two = a_measurement(1), a_measurement(2)
    assert store([one, two])
    assert stored() == [one, two]
    assert store([replace(one, operation_s=9e-6)])
    assert stored() == [two, replace(one, operation_s=9e-6)]


def test_a_machine_has_the_measured_rates():
    store([a_measurement(1), a_measurement(2)])
    machine = this_machine.this_machine(2, accelerator="cpu")
    assert machine.num_ranks == 2
    assert machine.device.flops_per_s == {"fp32": 1e11, "bf16": 2e11}
    assert machine.device.product_efficiency == 1
    assert machine.device.update_bytes_per_s == 8e9
    assert (machine.in_node.bytes_per_s, machine.in_node_reduce.bytes_per_s) == (2e9, 1e9)
    assert (machine.disk_read.bytes_per_s, machine.disk_write.bytes_per_s) == (2e9, 3e8)
    assert "2026-01-02T03:04:05" in machine.source
    assert 0 < machine.device.memory_bytes <= machine.host_memory_bytes / 2


@pytest.mark.parametrize(
    "other",
    [{"host": "elsewhere"}, {"cpu": "another"}, {"torch": "1.0"}, {"num_threads": 77}, {"kind": "cuda"}],
    ids=lambda other: next(iter(other)),
)
def test_measurements_under_other_conditions_are_not_used(other, monkeypatch):
    kept = a_measurement(1)
    store([replace(kept, circumstances=replace(kept.circumstances, **other))])
    a_quick_look(monkeypatch)
    machine = this_machine.this_machine(accelerator="cpu")
    assert machine.device.flops_per_s == {"fp32": 7e9}
    assert "a quick measurement" in machine.source
    assert ("disk assumed" in machine.source) is ("host" in other)


def test_a_quick_measurement_runs_once_per_process_and_lists_assumed_values(monkeypatch):
    looks = []

    def look(device, num_ranks):
        looks.append(num_ranks)
        return replace(measure_quickly(device, num_ranks), flops_per_s={"fp32": 1e9})

    monkeypatch.setattr(this_machine, "measure_quickly", look)
    machines = [this_machine.this_machine(2, accelerator="cpu") for _ in range(3)]
    assert looks == [2]
    assert all("disk and collectives assumed" in machine.source for machine in machines)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"version": 0}',
        '{"version": 1, "measured": 5}',
        '{"version": 1, "measured": [{}]}',
        '{"version": 1, "measured": [{"circumstances": {}}]}',
        "\x00\xff",
    ],
)
def test_a_damaged_file_is_reported_and_ignored(content, capsys, monkeypatch):
    path = measured.cache_file()
    path.parent.mkdir()
    path.write_text(content)
    a_quick_look(monkeypatch)
    assert "a quick measurement" in this_machine.this_machine(accelerator="cpu").source
    assert "roomier hardware" in capsys.readouterr().err
    assert store([a_measurement()])
    assert stored() == [a_measurement()]


@pytest.mark.parametrize("rate", [0, -1.0, "fast", None, float("nan")])
def test_invalid_rates_count_as_damage(rate, capsys):
    store([a_measurement()])
    content = json.loads(measured.cache_file().read_text())
    content["measured"][0]["memory_bytes_per_s"] = rate
    measured.cache_file().write_text(json.dumps(content))
    assert stored() == []
    assert "contains no valid measurements" in capsys.readouterr().err


def test_a_failed_write_keeps_the_old_file(monkeypatch, capsys):
    store([a_measurement()])

    def fail(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    assert not store([a_measurement(2)])
    assert stored() == [a_measurement()]
    assert [path.name for path in measured.cache_file().parent.iterdir()] == ["hardware.json"]
    assert "no space left" in capsys.readouterr().err


def test_the_file_can_be_removed():
    store([a_measurement()])
    assert measured.forget()
    assert not measured.forget()
    assert stored() == []
