"""Step times that can be computed by hand, and properties that hold for any machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from roomier.api.module import Module
from roomier.core.errors import RoomierError
from roomier.plan import Plan
from roomier.planner.dry_runs.work import Work, WorkKey
from roomier.planner.forecast import StepTime
from roomier.planner.hardware.machine import Device, Link, Machine
from roomier.planner.timing.step_time import step_time
from roomier.planner.workload import Workload

FREE = Link(1e30)
WIDTH, NUM_BLOCKS = 64, 4
WEIGHT_BYTES = WIDTH * WIDTH * 4


class Blocks(Module):
    """Model that consists only of equal layers, each of which is a separate unit."""

    def __init__(self, width: int = WIDTH, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        with torch.device("meta"):
            self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_blocks))

    def model_blocks(self) -> list[nn.Module]:
        return list(self.blocks)

    def training_step(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.mean()


def workload(num_blocks: int = NUM_BLOCKS, width: int = WIDTH, batch_size: int = 8) -> Workload:
    return Workload(Blocks(width, num_blocks), torch.empty(batch_size, width, device="meta"), batch_size)


def machine_of(kind: str = "cuda", link: Link = FREE, num_ranks: int = 1, **changes: Any) -> Machine:
    rates = {"fp32": 1e9, "tf32": 8e9, "bf16": 16e9}
    device = Device("made up", kind, 2**30, rates, 1e30)
    known = {each: changes.pop(each) for each in list(changes) if each in Device.__dataclass_fields__}
    machine = Machine(replace(device, **known), num_ranks, 1, link, link, FREE, FREE, FREE, 2**30, "made up")
    return replace(machine, **changes)


def plan_of(strategy: str = "single", devices: int = 1, micro_batches: int = 1, **parts: Any) -> Plan:
    parallel = {"strategy": strategy, "devices": devices, "accelerator": "cpu", **parts.pop("parallel", {})}
    optimizer = {"name": "sgd", **parts.pop("optimizer", {})}
    batch = {"accumulate_grad_batches": micro_batches, **parts.pop("batch", {})}
    return Plan.of({"parallel": parallel, "optimizer": optimizer, "batch": batch, **parts})


def even_work(seconds: float, num_blocks: int = NUM_BLOCKS, dtype: torch.dtype = torch.float32) -> dict[WorkKey, Work]:
    """Return work in which each block takes ``seconds`` in forward, at 1e9 operations/s, and twice that in backward."""
    names = [f"blocks.{index}" for index in range(num_blocks)]
    forward = {("forward", name): Work({dtype: seconds * 1e9}) for name in names}
    backward = {("backward", name): Work({dtype: 2 * seconds * 1e9}) for name in reversed(names)}
    return {**forward, **backward}


def time_of(plan: Plan, machine: Machine, work: Mapping[WorkKey, Work], **sizes: int) -> StepTime:
    return step_time(workload(**sizes), plan, machine, work)


def test_a_linear_layer_takes_its_operations_divided_by_the_rate() -> None:
    flops = 6 * 8 * WIDTH * WIDTH  # the matrix product of forward, and both matrix products of backward
    work = {
        ("forward", "blocks.0"): Work({torch.float32: flops / 3}),
        ("backward", "blocks.0"): Work({torch.float32: flops * 2 / 3}),
    }
    found = time_of(plan_of(), machine_of(), work, num_blocks=1)
    assert found.compute_s == pytest.approx(flops / 1e9)
    assert found.total_s == pytest.approx(found.compute_s)


def test_products_limited_by_memory_take_as_long_as_their_bytes() -> None:
    work = {("forward", "blocks.0"): Work({torch.float32: 1e9}, product_bytes=3e9, other_bytes=1e9)}
    assert time_of(plan_of(), machine_of(memory_bytes_per_s=1e9), work).compute_s == pytest.approx(3 + 1)


def test_products_reach_a_fraction_of_the_rate() -> None:
    assert time_of(plan_of(), machine_of(product_efficiency=0.5), even_work(1)).compute_s == pytest.approx(24)


@pytest.mark.parametrize(
    ("kind", "matmul", "rate"),
    [("cuda", "highest", 1), ("cuda", "high", 8), ("cuda", "medium", 8), ("cpu", "high", 1), ("cpu", "medium", 16)],
)
def test_float32_products_have_the_rate_of_the_matmul_precision(kind: str, matmul: str, rate: float) -> None:
    found = time_of(plan_of(precision={"matmul": matmul}), machine_of(kind), even_work(1))
    assert found.compute_s == pytest.approx(12 / rate)


def test_a_device_without_16_bit_arithmetic_computes_in_float32() -> None:
    work = even_work(1, dtype=torch.bfloat16)
    assert time_of(plan_of(), machine_of(flops_per_s={"fp32": 1e9}), work).compute_s == pytest.approx(12)


def test_an_unknown_rate_of_a_dtype_is_an_error() -> None:
    with pytest.raises(RoomierError, match=r"has no known rate of matrix products in torch.float64"):
        time_of(plan_of(), machine_of(), even_work(1, dtype=torch.float64))


def test_launch_time_overlaps_on_a_gpu_and_adds_up_on_a_cpu() -> None:
    work = {part: replace(each, num_operations=100) for part, each in even_work(1).items()}
    slow, quick = {"operation_s": 0.03}, {"operation_s": 0.0001}
    assert time_of(plan_of(), machine_of("cuda", **slow), work).compute_s == pytest.approx(8 * 3.0, rel=0.1)
    assert time_of(plan_of(), machine_of("cuda", **quick), work).compute_s == pytest.approx(12, rel=0.01)
    as_lightest = 4 * 800 * 0.0001
    assert time_of(plan_of(), machine_of("cpu", **quick), work).compute_s == pytest.approx(12 + as_lightest)


def test_selective_recompute_has_more_python_overhead_than_full() -> None:
    machine = machine_of("cpu", operation_s=1e-5, memory_bytes_per_s=1e30)
    work = {part: Work(num_operations=10) for part in even_work(1)}
    plain, full, selective = (
        time_of(plan_of(activation={"policy": policy}), machine, work) for policy in ("none", "full", "selective")
    )
    assert plain.compute_s < full.compute_s < selective.compute_s
    assert full.compute_s - plain.compute_s == pytest.approx(NUM_BLOCKS * (60 + 1.5 * 10) * 4e-5)
    assert full.recompute_s == pytest.approx(NUM_BLOCKS * (60 + 2.5 * 10) * 4e-5)


def test_a_step_in_backward_launches_more_operations() -> None:
    machine = machine_of("cpu", operation_s=1e-5)
    together, in_backward = (
        time_of(plan_of(optimizer={"step_in_backward": when}), machine, even_work(1)) for when in ("none", "exact")
    )
    assert in_backward.update_s - together.update_s == pytest.approx(5 * NUM_BLOCKS * 1e-5)


def test_recompute_time_is_reported_separately() -> None:
    work = {part: each * (1.5 if part[0] == "backward" else 1) for part, each in even_work(1).items()}
    found = time_of(plan_of(activation={"policy": "full"}), machine_of(), work)
    assert (found.compute_s, found.recompute_s) == (pytest.approx(16), pytest.approx(4))
    assert time_of(plan_of(activation={"policy": "every_n"}), machine_of(), work).recompute_s == pytest.approx(2)
    assert time_of(plan_of(), machine_of(), work).recompute_s == 0


def test_zero3_communicates_1_5_times_as_much_as_ddp() -> None:
    machine = machine_of(link=Link(1e6), num_ranks=4)
    found = {
        strategy: time_of(plan_of(strategy, 4), machine, even_work(1)).communication_s
        for strategy in ("ddp", "zero1", "zero2", "zero3")
    }
    assert found["ddp"] == pytest.approx(2 * 3 / 4 * NUM_BLOCKS * WEIGHT_BYTES / 1e6, rel=1e-3)
    assert found["zero1"] == pytest.approx(found["ddp"], rel=1e-3)
    assert found["zero2"] == pytest.approx(found["ddp"], rel=1e-3)
    assert found["zero3"] == pytest.approx(1.5 * found["ddp"], rel=1e-3)


@pytest.mark.parametrize(("strategy", "times"), [("ddp", 1), ("zero1", 1), ("zero2", 4), ("zero3", 4)])
def test_sharded_gradients_are_reduced_in_each_micro_batch(strategy: str, times: int) -> None:
    machine = machine_of(link=Link(1e6), num_ranks=2)
    one, four = (time_of(plan_of(strategy, 2, count), machine, even_work(1)) for count in (1, 4))
    assert four.communication_s == pytest.approx(times * one.communication_s, rel=1e-3)


def test_long_computation_hides_all_but_the_first_gather_and_the_last_reduction() -> None:
    machine = machine_of(link=Link(1e6), num_ranks=2)
    unit_s = WEIGHT_BYTES / 2 / 1e6
    found = time_of(plan_of("zero3", 2), machine, even_work(1))
    # The backward begins with the all-gather of its first unit, which was resharded after the forward.
    assert found.exposed_s == pytest.approx(3 * unit_s, rel=1e-3)
    assert found.communication_s == pytest.approx(3 * NUM_BLOCKS * unit_s, rel=1e-3)
    many = time_of(plan_of("zero3", 2), machine, even_work(1, 16), num_blocks=16)
    assert many.exposed_s == pytest.approx(found.exposed_s, rel=1e-3)


def test_short_computation_is_hidden_by_communication() -> None:
    machine = machine_of(link=Link(1e6), num_ranks=2)
    unit_s = WEIGHT_BYTES / 2 / 1e6
    found = time_of(plan_of("zero3", 2), machine, even_work(unit_s / 100))
    assert found.exposed_s == pytest.approx(found.communication_s, rel=0.05)
    assert found.exposed_s < found.communication_s


def test_ddp_exposes_only_its_last_bucket_if_computation_is_long() -> None:
    width = 2048  # 16 MiB per block: 64 MiB in three buckets
    machine = machine_of(link=Link(1e9), num_ranks=2)
    found = time_of(plan_of("ddp", 2), machine, even_work(1), width=width)
    assert found.communication_s == pytest.approx(4 * width * width * 4 / 1e9, rel=1e-3)
    assert found.exposed_s == pytest.approx(found.communication_s / 3, rel=1e-2)


def test_communication_between_cpu_ranks_does_not_overlap() -> None:
    machine = machine_of("cpu", Link(1e6), num_ranks=2)
    found = time_of(plan_of("zero3", 2), machine, even_work(1))
    assert found.exposed_s == pytest.approx(found.communication_s)


def test_latency_dominates_the_communication_of_small_units() -> None:
    machine = machine_of("cpu", Link(1e9, 1e-3), num_ranks=2)
    few, many = (
        time_of(plan_of("zero2", 2), machine, even_work(1, count), num_blocks=count).communication_s for count in (4, 8)
    )
    latency_s = 2 * 1e-3  # an all-gather and a reduce-scatter, or one all-reduce of the terms of losses
    assert few == pytest.approx(4 * latency_s + latency_s, rel=0.05)
    assert many == pytest.approx(8 * latency_s + latency_s, rel=0.05)


def test_offloading_costs_the_time_that_does_not_overlap() -> None:
    plan = plan_of(offload={"activations": "cpu"}, parallel={"accelerator": "cuda"})
    kept = {f"blocks.{index}": 1e9 for index in range(NUM_BLOCKS)}

    def offload_s(bytes_per_s: float) -> float:
        machine = machine_of(to_host=Link(bytes_per_s))
        return step_time(workload(), plan, machine, even_work(1), kept_bytes=kept).offload_s

    assert offload_s(1e12) < 0.002
    assert offload_s(1e12) < offload_s(1e8) < offload_s(1e7)
    assert offload_s(1e7) == pytest.approx(8 * 100, rel=0.1)


@given(
    strategy=st.sampled_from(["ddp", "zero1", "zero2", "zero3"]),
    kind=st.sampled_from(["cpu", "cuda"]),
    micro_batches=st.integers(1, 5),
    seconds=st.floats(1e-6, 1),
    bytes_per_s=st.floats(1e3, 1e12),
    latency_s=st.floats(0, 1e-2),
    faster=st.floats(1, 100),
)
@settings(max_examples=60, deadline=None)
def test_a_faster_link_or_device_is_never_slower(
    strategy: str,
    kind: str,
    micro_batches: int,
    seconds: float,
    bytes_per_s: float,
    latency_s: float,
    faster: float,
) -> None:
    plan = plan_of(strategy, 4, micro_batches, batch={"gradient_clip_val": 1.0})
    slow = machine_of(kind, Link(bytes_per_s, latency_s), 4, memory_bytes_per_s=1e9, operation_s=1e-6)
    link = Link(bytes_per_s * faster, latency_s)
    rates = {name: rate * faster for name, rate in slow.device.flops_per_s.items()}
    with_link = replace(slow, in_node=link, between_nodes=link)
    with_rates = replace(slow, device=replace(slow.device, flops_per_s=rates))
    with_memory = replace(slow, device=replace(slow.device, memory_bytes_per_s=1e9 * faster))
    before = time_of(plan, slow, even_work(seconds))
    for other in (with_link, with_rates, with_memory):
        assert time_of(plan, other, even_work(seconds)).total_s <= before.total_s * (1 + 1e-9)
    assert 0 <= before.exposed_s * (1 - 1e-9) <= before.communication_s + 1e-2
    assert before.compute_s >= 12 * seconds * (1 - 1e-9)


@given(
    strategy=st.sampled_from(["ddp", "zero1", "zero2", "zero3"]),
    num_ranks=st.sampled_from([2, 4, 8, 16, 64]),
    devices=st.sampled_from([2, 4, 8]),
)
@settings(max_examples=30, deadline=None)
def test_more_ranks_never_reduce_the_communication_of_a_rank(strategy: str, num_ranks: int, devices: int) -> None:
    def of(count: int) -> float:
        per_node = min(devices, count)
        plan = plan_of(strategy, per_node, parallel={"num_nodes": count // per_node})
        machine = machine_of(link=Link(1e6, 1e-5), num_ranks=per_node, between_nodes=Link(1e5, 1e-4))
        return time_of(plan, machine, even_work(1)).communication_s

    assert of(num_ranks * 2) >= of(num_ranks) * (1 - 1e-9)
