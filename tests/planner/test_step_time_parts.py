"""Parts of step_time: collectives, the volume that each strategy sends, and the update."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from roomier.api.blocks import find_blocks
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import Plan
from roomier.planner.dry_runs.work import Work, WorkCounter
from roomier.planner.hardware.machine import Device, Link, Machine
from roomier.planner.memory.predict import layout_of
from roomier.planner.memory.walk import Layout
from roomier.planner.memory.weights import Unit, units_with_weights
from roomier.planner.timing.collective_time import Group, all_reduce_s, gather_s, reduce_scatter_s
from roomier.planner.timing.traffic import exchanges, traffic_of
from roomier.planner.timing.update_time import update_time

B = 2.0**20


def machine(kind: str = "cuda", within: Link | None = None, between: Link | None = None, **changes: Any) -> Machine:
    device = Device("made up", kind, 2**30, {"fp32": 1e9, "bf16": 1e9}, 1e9)
    fast = Link(1e9)
    made = Machine(device, 8, 2, within or fast, between or fast, fast, fast, fast, 2**30, "made up")
    return replace(made, **changes)


def gpt_units(compute_dtype: torch.dtype | None = None, **config: Any) -> tuple[nn.Module, list[Unit]]:
    sizes = {"vocab_size": 1024, "context": 32, "num_layers": 3, "num_heads": 2, "width": 64, **config}
    with torch.device("meta"):
        network = GPT(GPTConfig(**sizes))
    return network, units_with_weights(network, find_blocks(network), compute_dtype)


def plan_of(strategy: str, devices: int, num_nodes: int = 1, **parts: Any) -> Plan:
    parallel = {"strategy": strategy, "devices": devices, "num_nodes": num_nodes, **parts.pop("parallel", {})}
    return Plan.of({"parallel": parallel, "optimizer": {"name": "adamw"}, **parts})


def sent(plan: Plan, units: list[Unit], kind: str = "cuda") -> float:
    layout = layout_of(plan, torch.device(kind))
    traffic = traffic_of(units, plan, layout, machine(kind))  # the links have no latency
    counted = exchanges(traffic, plan.batch.accumulate_grad_batches, layout.num_backwards)
    return sum(each.link_s * count for each, count in counted) * machine(kind).in_node.bytes_per_s


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_collectives_take_the_minimum_number_of_bytes(num_ranks: int) -> None:
    group = Group.of_neighbours(num_ranks, 8)
    half_s = (num_ranks - 1) / num_ranks * B / 1e9
    assert gather_s(B, group, machine()) == pytest.approx(half_s)
    assert reduce_scatter_s(B, group, machine()) == pytest.approx(half_s)
    assert all_reduce_s(B, group, machine()) == pytest.approx(2 * half_s)


def test_one_rank_does_not_communicate() -> None:
    assert gather_s(B, Group(1, 1), machine(within=Link(1.0, 1.0))) == 0
    assert all_reduce_s(B, Group(1, 1), machine(within=Link(1.0, 1.0))) == 0


def test_between_nodes_the_ring_uses_the_links_of_all_devices() -> None:
    quick, slow = Link(1e9), Link(1e7)
    group = Group.of_neighbours(16, 8)
    found = gather_s(B, group, machine(within=quick, between=slow))
    assert found == pytest.approx(15 / 16 * B / (8 * 1e7))
    # The links of a node are not the bottleneck if they are together faster than one link within the node.
    assert gather_s(B, group, machine(within=quick, between=quick)) == pytest.approx(15 / 16 * B / 1e9)


def test_replicas_on_different_nodes_have_one_link_each() -> None:
    group = Group.of_copies(16, 8, 8)
    assert (group.num_ranks, group.ranks_per_node, group.num_nodes) == (2, 1, 2)
    assert all_reduce_s(B, group, machine(between=Link(1e7))) == pytest.approx(B / 1e7)
    within = Group.of_copies(16, 2, 8)  # four replicas on each of two nodes
    assert (within.num_ranks, within.ranks_per_node, within.num_nodes) == (8, 4, 2)


def test_latency_of_a_ring_grows_with_ranks_and_of_a_tree_with_the_logarithm_of_nodes() -> None:
    links = {"within": Link(1e30, 1e-6), "between": Link(1e30, 1e-3)}
    group = Group.of_neighbours(64, 8)
    ring_s = 7 * 1e-3 + 56 * 1e-6
    assert gather_s(B, group, machine(**links)) == pytest.approx(ring_s)
    assert all_reduce_s(B, group, machine("cpu", **links)) == pytest.approx(2 * ring_s)
    assert all_reduce_s(B, group, machine("cuda", **links)) == pytest.approx(2 * (3 * 1e-3 + 7 * 1e-6))


def test_a_separately_measured_reduction_has_its_own_rate() -> None:
    apart = machine("cpu", in_node_reduce=Link(1e8))
    group = Group.of_neighbours(2, 8)
    assert reduce_scatter_s(B, group, apart) == pytest.approx(B / 2 / 1e8)
    assert gather_s(B, group, apart) == pytest.approx(B / 2 / 1e9)
    assert all_reduce_s(B, group, apart) == pytest.approx(B / 2 / 1e8 + B / 2 / 1e9)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_volumes_equal_zero_section_7(num_ranks: int) -> None:
    network, units = gpt_units()
    whole_bytes = 4 * sum(each.numel() for each in network.parameters())
    root_bytes = 4 * sum(math.prod(weight.shape) for unit in units if unit.is_root for weight in unit.weights)
    looked_up = 4 * sum(math.prod(weight.shape) for unit in units if unit.is_looked_up for weight in unit.weights)
    share = (num_ranks - 1) / num_ranks
    found = {name: sent(plan_of(name, num_ranks), units) for name in ("ddp", "zero1", "zero2", "zero3")}
    assert found["ddp"] == pytest.approx(2 * share * whole_bytes)
    # A tensor is padded if the number of ranks does not divide its rows.
    assert found["zero1"] == found["zero2"] == pytest.approx(2 * share * whole_bytes, rel=1e-3)
    assert found["zero3"] == pytest.approx(share * (3 * whole_bytes - root_bytes - looked_up), rel=1e-3)


def test_communicated_bytes_depend_on_the_dtype() -> None:
    _, whole = gpt_units(vocab_size=16)  # embeddings are sent in float32
    _, mixed = gpt_units(torch.bfloat16, vocab_size=16)
    precision = {"precision": {"mode": "bf16-mixed"}}
    # Gathered in 16 bits. NCCL reduces in 32 bits, and the pairwise collectives reduce in 16 bits.
    assert sent(plan_of("zero2", 2, **precision), mixed) == pytest.approx(
        3 / 4 * sent(plan_of("zero2", 2), whole), rel=0.05
    )
    found = sent(plan_of("zero2", 2, **precision), mixed, "cpu")
    assert found == pytest.approx(1 / 2 * sent(plan_of("zero2", 2), whole, "cpu"), rel=0.05)
    for strategy, share in (("ddp", 1 / 2), ("zero2", 3 / 4)):
        low = plan_of(strategy, 2, parallel={"reduce_dtype": "bf16"})
        assert sent(low, whole) == pytest.approx(share * sent(plan_of(strategy, 2), whole))


def test_hsdp_communicates_within_its_group_and_reduces_shards_over_replicas() -> None:
    network, units = gpt_units()
    whole_bytes = 4 * sum(each.numel() for each in network.parameters())
    among_four = sent(plan_of("zero3", 4), units)
    found = sent(plan_of("hsdp", 4, 2), units)
    assert found == pytest.approx(among_four + 2 * 1 / 2 * whole_bytes / 4, rel=1e-3)


def test_an_exact_step_in_backward_gathers_and_reduces_in_both_backwards() -> None:
    _, units = gpt_units()
    parts = {"optimizer": {"name": "adamw", "step_in_backward": "exact"}, "batch": {"gradient_clip_val": 1.0}}
    once = sent(plan_of("zero3", 2), units)
    twice = sent(Plan.of({"parallel": {"strategy": "zero3", "devices": 2}, **parts}), units)
    assert 1.5 * once < twice < 2 * once


def test_powersgd_sends_two_factors_of_each_matrix() -> None:
    _, units = gpt_units()
    compressed = {"gradient_compression": "powersgd", "compression_rank": 2}
    matrices = [each for unit in units for each in unit.weights if len(each.shape) == 2]
    vectors = [each for unit in units for each in unit.weights if len(each.shape) == 1]
    numbers = sum(2 * sum(each.shape) for each in matrices) + sum(each.shape[0] for each in vectors)
    assert sent(plan_of("ddp", 2, parallel=compressed), units) == pytest.approx(
        4 * numbers + 2
    )  # one byte per further collective


def update_s(name: str, kind: str = "cuda", strategy: str = "single", devices: int = 1, **parts: Any) -> float:
    network, units = gpt_units()
    options = parts.pop("optimizer", {})
    plan = Plan.of(
        {"parallel": {"strategy": strategy, "devices": devices}, "optimizer": {"name": name, **options}, **parts}
    )
    blocks = [f"blocks.{index}" for index in range(3)]
    layout: Layout = layout_of(plan, torch.device(kind))
    found = update_time(units, plan, machine(kind), layout, blocks=blocks)
    return found.compute_s / sum(each.numel() for each in network.parameters()) * 1e9  # bytes at 1e9 bytes/s


def test_fused_adamw_moves_28_bytes_per_weight() -> None:
    assert update_s("adamw") == pytest.approx(28)
    assert update_s("sgd") == pytest.approx(12)
    assert update_s("sgd", optimizer={"options": {"momentum": 0.9}}) == pytest.approx(20)


def test_each_rank_updates_its_shard() -> None:
    assert update_s("adamw", strategy="ddp", devices=4) == pytest.approx(28)
    assert update_s("adamw", strategy="zero1", devices=4) == pytest.approx(7, rel=1e-2)


def test_clipping_reads_the_gradient_twice_and_writes_it_one_time() -> None:
    assert update_s("adamw", batch={"gradient_clip_val": 1.0}) == pytest.approx(28 + 12)
    by_value = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}
    assert update_s("adamw", batch=by_value) == pytest.approx(28 + 8)


def test_8_bit_states_move_fewer_bytes_on_a_gpu_and_take_twice_as_long_on_a_cpu() -> None:
    assert update_s("adamw8bit") < 0.6 * update_s("adamw")
    assert 1.8 < update_s("adamw8bit", "cpu") / update_s("adamw", "cpu") < 2.4


def test_muon_multiplies_only_matrices_of_blocks() -> None:
    network, units = gpt_units()
    shapes = [each.shape for unit in units for each in unit.weights if "blocks." in each.name and len(each.shape) == 2]
    flops = sum(5 * (4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3) for s in shapes)
    num_parameters = sum(each.numel() for each in network.parameters())
    hidden = sum(math.prod(shape) for shape in shapes)
    moved = (48 * hidden + 28 * (num_parameters - hidden)) / num_parameters
    assert update_s("muon") == pytest.approx(flops / num_parameters + moved, rel=1e-3)


def test_an_optimizer_of_the_module_takes_its_counted_work() -> None:
    _, units = gpt_units()
    plan = Plan.of({})
    work = {("update", ""): Work(other_bytes=5e9, num_operations=10)}
    found = update_time(units, plan, machine(), layout_of(plan, torch.device("cuda")), work=work)
    assert found.compute_s == pytest.approx(5)


def counted(run: Any) -> Work:
    counter = WorkCounter()
    with counter.counting(lambda: ("forward", "")):
        run()
    return counter.by_part["forward", ""]


def test_allocations_and_views_are_no_work() -> None:
    tensor = torch.zeros(8)
    assert counted(lambda: (torch.empty(2**20), tensor.view(2, 4), torch.empty_like(tensor))) == Work()


def test_an_embedding_reads_rows_and_not_the_full_table() -> None:
    table, rows = torch.zeros(1000, 4), torch.tensor([1, 2])
    read_and_written = 2 * 2 * 4 * 4
    assert counted(lambda: nn.functional.embedding(rows, table)).other_bytes == read_and_written + rows.nbytes
    assert counted(lambda: table + 1).other_bytes == 2 * table.nbytes
