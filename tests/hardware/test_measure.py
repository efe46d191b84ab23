"""Measurements on this machine have a plausible order of magnitude. The tests do not check their accuracy."""

import subprocess
import sys

import pytest
import torch

from roomier import RoomierError
from roomier.planner.hardware.measure import (
    memory_rate,
    operation_seconds,
    product_rate,
    seconds_of,
    update_rate,
)
from roomier.planner.hardware.measuring import disk_rates, measure_quickly, measure_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
def test_matrix_products_have_a_plausible_rate(dtype):
    rate = product_rate(dtype, CPU, 0.05)
    assert 1e7 < rate < 1e14


def test_a_cpu_has_no_tf32():
    assert product_rate("tf32", CPU, 0.05) is None


def test_measuring_restores_the_matmul_precision():
    before = torch.get_float32_matmul_precision()
    product_rate("fp32", CPU, 0.01)
    assert torch.get_float32_matmul_precision() == before


def test_larger_products_take_longer():
    small, large = (torch.ones(size, size) for size in (64, 512))
    took = [min(seconds_of(lambda each=each: each @ each, CPU) for _ in range(5)) for each in (small, large)]
    assert took[1] > 4 * took[0]


def test_memory_operations_and_updates():
    assert 1e7 < memory_rate(CPU, 0.02, 2**22) < 1e13
    assert 1e-8 < operation_seconds(CPU, 0.02) < 1e-2
    assert 1e6 < update_rate(CPU, 0.02, 2**16) < 1e13


def test_the_disk_measurement_leaves_no_file(tmp_path):
    folder = tmp_path / "new"
    rates = disk_rates(folder, 1.0, 2**24)
    assert all(1e5 < rate < 1e12 for rate in rates.values())
    assert list(folder.iterdir()) == []


def test_a_folder_that_is_not_writable_is_rejected(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RoomierError, match=r"folder=.*is not writable.*Choose a writable folder"):
        disk_rates(tmp_path / "file", 0.1)


def test_a_quick_measurement_restores_the_number_of_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    before = torch.get_num_threads()
    looked = measure_quickly(CPU, 4)
    assert torch.get_num_threads() == before
    assert looked.is_quick
    assert looked.circumstances.num_threads == 2
    assert {"fp32", "bf16"} <= looked.flops_per_s.keys()
    assert looked.disk_read is None
    assert looked.gather is None


def test_a_rank_that_fails_is_reported(monkeypatch, tmp_path):
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho 'no memory left' >&2\nexit 7\n")
    failing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(failing))
    with pytest.raises(RoomierError, match=r"devices=2: .*rank [01] ended with exit code 7: no memory left"):
        measure_ranks(CPU, 2)


def test_a_rank_that_hangs_is_killed(monkeypatch, tmp_path):
    started = []

    class Watched(subprocess.Popen):
        def __init__(self, *args, **keywords):
            super().__init__(*args, **keywords)
            started.append(self)

    sleeping = tmp_path / "python"
    sleeping.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeping.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeping))
    monkeypatch.setattr(subprocess, "Popen", Watched)
    monkeypatch.setattr("roomier.planner.hardware.measuring._PATIENCE_S", 0.2)
    with pytest.raises(RoomierError, match="did not end within"):
        measure_ranks(CPU, 2)
    assert [process.poll() is None for process in started] == [False, False]
