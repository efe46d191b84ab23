"""``roomier hardware``: measurement, output and storage."""

import json

import pytest

from roomier.cli import hardware_verb
from roomier.cli.main import main
from roomier.planner.hardware import measured
from roomier.planner.hardware.this_machine import this_machine


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "cache_file", lambda: tmp_path / "cache" / "hardware.json")
    monkeypatch.setattr(hardware_verb, "_SECONDS", 0.05)


@pytest.mark.slow
def test_two_ranks_are_measured_and_stored_for_planning(capsys, tmp_path):
    (tmp_path / "disk").mkdir()
    words = ["hardware", "--accelerator", "cpu", "--devices", "2", "--folder", str(tmp_path / "disk"), "--json"]
    assert main(words) == 0
    expected = json.loads(capsys.readouterr().out)
    (machine,) = expected["machines"]
    assert expected["is_kept"]
    assert machine["devices_per_node"] == 2
    assert {"fp64", "fp32", "bf16", "fp16"} == machine["device"]["flops_per_s"].keys()
    for link in ("in_node", "in_node_reduce", "disk_read", "disk_write", "disk_both"):
        assert 1e4 < machine[link]["bytes_per_s"] < 1e13
    assert machine["device"]["update_bytes_per_s"] > 0
    assert list((tmp_path / "disk").iterdir()) == []
    kept = this_machine(2, accelerator="cpu")
    assert kept.device.flops_per_s == machine["device"]["flops_per_s"]
    assert kept.source == machine["source"]


def test_quick_measurement_prints_a_table_and_can_be_removed(capsys):
    assert main(["hardware", "--quick", "--devices", "1", "--accelerator", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "products in fp32" in out
    assert "1 rank" in out
    assert f"stored in {measured.cache_file()}" in out.replace("\n", "")
    assert measured.cache_file().exists()
    assert main(["hardware", "--forget"]) == 0
    assert not measured.cache_file().exists()
    assert main(["hardware", "--forget", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["forgotten"] is False


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--devices", "0"], "devices=0"),
        (["--devices", "1000000"], "devices=1000000: must be from 1 to"),
        (["--devices", "two"], "two"),
        (["--accelerator", "tpu"], "accelerator='tpu'"),
        (["--device", "2"], "unrecognized arguments"),
    ],
)
def test_invalid_options_are_rejected_without_a_measurement(words, expected, capsys):
    assert main(["hardware", *words]) == 2
    printed = capsys.readouterr()
    assert expected in printed.err
    assert printed.out == ""
    assert not measured.cache_file().exists()
