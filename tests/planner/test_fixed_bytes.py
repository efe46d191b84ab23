"""GPU memory outside of tensors, by formula. No GPU is required."""

from dataclasses import replace

import pytest

from roomier import Plan
from roomier.planner.formula.fixed_bytes import CONTEXT_BYTES, MIB, fixed_bytes
from roomier.planner.hardware.spec import machine_of

GIB = 2**30
AN_A100 = machine_of("a100")
A_CPU = replace(AN_A100, device=replace(AN_A100.device, name="a processor", kind="cpu"))


@pytest.fixture(autouse=True)
def _without_user_settings(monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)


def plan_of(strategy="single", devices=1, num_nodes=1, **parts):
    parallel = {"strategy": strategy, "accelerator": "cuda", "devices": devices, "num_nodes": num_nodes}
    return Plan.from_dict({"parallel": parallel, **parts})


def test_a_cpu_has_no_fixed_bytes():
    plan = Plan.from_dict({"parallel": {"accelerator": "cpu"}})
    assert fixed_bytes(plan, A_CPU, 10 * GIB) == {}


def test_one_rank_has_no_communication_buffers():
    found = fixed_bytes(plan_of(), machine_of("a100-40gb"))
    assert sorted(found) == ["allocator", "context", "workspace"]
    assert found["context"] == CONTEXT_BYTES


@pytest.mark.parametrize(("devices", "num_mib"), [(2, 544), (4, 688)])
def test_nccl_needs_the_memory_that_was_measured_on_a100(devices, num_mib):
    # NVIDIA/nccl issue 964: four A100 with NVLink
    found = fixed_bytes(plan_of("zero2", devices), machine_of(f"a100-40gb:{devices}"))
    assert found["communication"] == num_mib * MIB


def test_nodes_and_communicators_increase_the_buffers_but_ranks_do_not():
    def communication(strategy, devices, nodes):
        machine = machine_of(f"h100:{devices}", nodes)
        return fixed_bytes(plan_of(strategy, devices, nodes), machine)["communication"]

    assert communication("zero3", 4, 1) == communication("zero3", 8, 1)
    assert communication("zero3", 8, 1) < communication("zero3", 8, 2) == communication("zero3", 8, 128)
    assert communication("hsdp", 8, 2) > 2 * communication("zero3", 8, 2)


def test_cards_without_nvlink_have_smaller_buffers():
    small, large = (
        fixed_bytes(plan_of("ddp", 2), machine_of(name))["communication"] for name in ("rtx4090:2", "h100:2")
    )
    assert small < large / 2


def test_workspaces_depend_on_the_architecture():
    assert fixed_bytes(plan_of(), machine_of("a100"))["workspace"] == 2 * 8_519_680
    assert fixed_bytes(plan_of(), machine_of("h100"))["workspace"] == 2 * 32 * MIB


def test_fragmentation_is_proportional_to_tensors_and_smaller_with_expandable_segments(monkeypatch):
    machine = machine_of("a100-80gb")
    again = {"activation": {"policy": "full"}}

    def allocator(tensor_bytes, **parts):
        return fixed_bytes(plan_of(**parts), machine, tensor_bytes)["allocator"]

    assert allocator(20 * GIB) - allocator(10 * GIB) == pytest.approx(0.04 * 10 * GIB, abs=2)
    assert allocator(20 * GIB, **again) > 2 * allocator(20 * GIB)
    fixed = allocator(20 * GIB, **again)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert allocator(20 * GIB, **again) < fixed / 2
