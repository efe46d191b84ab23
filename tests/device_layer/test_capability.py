"""Capabilities of devices, and the paths that they select."""

from types import SimpleNamespace

import pytest
import torch

from roomier import PlanError
from roomier.core.device import capability
from roomier.core.device.capability import Capabilities, capabilities_of, check_computes_in, report_missing
from roomier.core.device.memory import free_and_total_bytes, release_cached, statistics
from roomier.core.device.streams import synchronize
from roomier.core.device.transfer import BatchMover
from roomier.techniques.activation.copies import Copies, StreamCopies, copies_on
from roomier.techniques.activation.live_bytes import AllocatorBytes, CountedBytes, live_bytes_on
from roomier.techniques.optim.adamw import StepValues
from roomier.techniques.optim.block_codes import dither

CPU = torch.device("cpu")
ALL = Capabilities(True, True, True, True, frozenset({"adam", "adamw", "sgd"}), capabilities_of(CPU).dtypes)
NONE = Capabilities(False, False, False, False, frozenset(), frozenset())


def with_capabilities(monkeypatch, has):
    """Make code treat the CPU as a device with the capabilities ``has``."""
    monkeypatch.setattr(capability, "_ON_CPU", has)


def test_the_cpu_is_the_host():
    has = capabilities_of(CPU)
    assert not any((has.has_streams, has.has_pinned_memory, has.copies_asynchronously, has.has_memory_statistics))
    assert has.fused_optimizers == {"adam", "adamw", "sgd"}
    assert has.dtypes == {torch.bfloat16, torch.float16, torch.float64}
    synchronize(CPU)
    release_cached(CPU)
    assert (statistics(CPU), free_and_total_bytes(CPU)) == ({}, None)


def test_devices_that_torch_cannot_use_have_no_capabilities():
    assert capabilities_of(torch.device("meta")) == NONE


def test_each_capability_is_tried(monkeypatch):
    """The device meta runs operations, but it has no memory and no streams."""
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    monkeypatch.setattr(capability, "is_known_to_torch", lambda device_type: device_type == "meta")
    has = capability._tried.__wrapped__("meta")
    assert not any((has.has_streams, has.has_pinned_memory, has.has_memory_statistics, has.has_memory_info))
    assert has.dtypes == {torch.bfloat16, torch.float16, torch.float64}


def test_dtypes_that_a_device_module_excludes(monkeypatch):
    class Module:
        def is_bf16_supported(self):
            return False

        def get_amp_supported_dtype(self):
            return [torch.bfloat16]

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module())
    dtypes = (torch.bfloat16, torch.float16, torch.float64)
    assert [capability._computes_in(dtype, CPU) for dtype in dtypes] == [False, False, True]


def test_memory_that_runs_out_during_an_attempt_is_not_a_missing_capability():
    def run_out():
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        capability._works(run_out)


@pytest.mark.parametrize("mode", ["bf16-mixed", "bf16-true", "16-mixed", "64-true"])
def test_a_precision_that_the_device_does_not_compute_in_is_rejected(mode, monkeypatch):
    check_computes_in(mode, CPU)
    with_capabilities(monkeypatch, NONE)
    check_computes_in("32-true", CPU)
    with pytest.raises(PlanError, match=rf"precision='{mode}': is not supported on cpu, .* Use precision='32-true'"):
        check_computes_in(mode, CPU)


def test_one_notice_reports_slower_paths(monkeypatch, capsys):
    monkeypatch.setattr(capability, "_tried", {"xpu": NONE, "mps": ALL}.__getitem__)
    report_missing.cache_clear()
    for kind in ("xpu", "mps", "cpu", "xpu"):
        report_missing(kind)
    lines = capsys.readouterr().err.splitlines()
    report_missing.cache_clear()
    assert len(lines) == 1
    assert "xpu has no pinned memory, so copies between host and device do not overlap" in lines[0]
    assert "no fused optimizers" in lines[0]
    assert "no memory statistics" in lines[0]


def test_capabilities_select_the_path(monkeypatch):
    made = []
    monkeypatch.setattr(torch, "Stream", lambda device: made.append(device) or object())
    with_capabilities(monkeypatch, ALL)
    assert isinstance(copies_on(CPU), StreamCopies)
    assert isinstance(live_bytes_on(CPU), AllocatorBytes)
    BatchMover(CPU)
    assert made == [CPU, CPU]
    without_pinned = Capabilities(True, False, False, False, frozenset(), frozenset())
    for has in (NONE, without_pinned):
        with_capabilities(monkeypatch, has)
        assert type(copies_on(CPU)) is Copies
        assert isinstance(live_bytes_on(CPU), CountedBytes)


def test_values_do_not_depend_on_capabilities(monkeypatch):
    values = StepValues(3, 0.9, 0.999, 1e-8, 0.99, 1e-3)
    expected = values.numbers(CPU), dither(7, 3, CPU)
    with_capabilities(monkeypatch, NONE)
    found = values.numbers(CPU), dither(7, 3, CPU)
    assert all(map(torch.equal, found, expected))
