"""Forecasts of plans in which ranks share sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import Plan, plan_from_flags
from roomier.planner.dry_runs.confirm import confirm
from roomier.planner.formula.estimate import Estimator
from roomier.planner.formula.trace import take_trace
from roomier.planner.hardware.spec import machine_of
from roomier.planner.report.what_if import longest_sequences
from roomier.planner.workload import Workload
from tests.context.fitting import Case, Fitted
from tests.context.networks import LAYERS, WIDTH, batch_of
from tests.covering import few

LENGTH, SAMPLES, SIZE = 40, 3, 2


def workload(network: str = "gpt") -> Workload:
    return Workload.of(Fitted(Case(network)), batch_of(network, SAMPLES, LENGTH, seed=1))


def plan_of(strategy: str = "zero3", size: int = SIZE, **flags: Any) -> Plan:
    chosen: Any = {"name": strategy, "context_parallel_size": size}
    return plan_from_flags(strategy=chosen, devices=4, accelerator="cuda", optimizer="adamw", **flags)


@pytest.mark.parametrize("recompute", few(["full", None]))
def test_the_exchanges_of_a_step_are_counted(recompute: str | None) -> None:
    """Each block exchanges its query, key and value together, and its output. Recomputation repeats these exchanges."""
    trace = take_trace(workload(), plan_of(activation_checkpointing=recompute), is_sharded=True)
    slice_bytes = SAMPLES * LENGTH // SIZE * WIDTH * 4
    gathered_bytes = SIZE * slice_bytes  # each rank sends its slice to all ranks, and then gradients of all tokens
    for phase, num in (("forward", 4), ("backward", 4 if recompute is None else 8)):
        works = [each for (own, _), each in trace.work.items() if own == phase]
        assert sum(each.num_exchanges for each in works) == num // 2 * LAYERS + 1
        assert sum(each.exchanged_bytes for each in works) == num * LAYERS * slice_bytes + gathered_bytes


@pytest.mark.more
def test_slower_links_make_the_step_slower() -> None:
    given, fast = workload(), machine_of("h100:4")
    slow = replace(fast, in_node=replace(fast.in_node, bytes_per_s=fast.in_node.bytes_per_s / 1e4))
    times = [Estimator(given, machine).estimate(plan_of("ddp"), SAMPLES).time for machine in (fast, slow)]
    assert times[0] is not None
    assert times[1] is not None
    assert times[0].compute_s == times[1].compute_s
    assert times[0].exposed_s < times[1].exposed_s


@pytest.mark.more
@pytest.mark.parametrize(
    ("network", "strategy", "flags"),
    [
        ("gpt", "zero3", {}),
        ("gpt", "ddp", {"activation_checkpointing": "full"}),
        ("gpt", "zero2", {"chunked_loss": True, "accumulate_grad_batches": 2}),
        ("llama 1", "zero1", {"precision": "bf16-mixed", "activation_checkpointing": "selective"}),
        pytest.param("bert padded", "zero3", {}, marks=pytest.mark.slow),
    ],
)
def test_the_closed_form_equals_the_dry_run(network: str, strategy: str, flags: dict[str, Any]) -> None:
    given, machine, plan = workload(network), machine_of("h100:4"), plan_of(strategy, **flags)
    closed, dry = Estimator(given, machine).estimate(plan, SAMPLES), confirm(given, plan, machine)
    assert closed.tensor_bytes == pytest.approx(dry.tensor_bytes, rel=0.01)
    assert closed.time is not None
    assert dry.time is not None
    assert closed.time.total_s == pytest.approx(dry.time.total_s, rel=0.1)


@pytest.mark.more
def test_more_ranks_per_sequence_allow_longer_sequences() -> None:
    class Sized(Fitted):
        """A GPT for longer sequences, in which activations dominate."""

        def __init__(self) -> None:
            super().__init__(Case("gpt"))
            self.network = GPT(GPTConfig(32, 4096, num_layers=3, num_heads=4, width=64, dropout=0.0))

    def at_length(length: int) -> Workload:
        return Workload.of(Sized(), batch_of("gpt", 1, length, seed=1))

    machine, budget_bytes = machine_of("h100:4"), 40 * 2**20
    machine = replace(machine, device=replace(machine.device, kind="cpu"))  # whose communicators need no memory
    shown = Estimator(at_length(512), machine).estimate(plan_of("zero2", 1), 1)
    longest = longest_sequences(at_length, 512, 4096, shown, budget_bytes)
    assert list(longest) == [1, 2, 4]
    assert longest[1] < longest[2] <= longest[4] <= 4096
    for size, length in longest.items():
        plan = plan_of("zero2", size, accumulate_grad_batches=size)
        lengths = [length, *([length + 64] if length < 4096 - 64 else [])]
        peaks = [Estimator(at_length(each), machine).estimate(plan, 1).peak_bytes for each in lengths]
        assert [each <= budget_bytes for each in peaks] == [True, False][: len(peaks)]
