"""Predicted and measured model states of each strategy, on each rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from roomier.api.module import Module
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.engine.build import build
from roomier.engine.eager import EagerEngine
from roomier.engine.optimizers import configure
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import Plan
from roomier.planner.memory.kinds import MODEL_STATES, Kind
from roomier.planner.memory.predict import predict, predict_built
from roomier.planner.memory.tracker import MemoryTracker, tracking
from tests.covering import covering, few
from tests.ranks.pool import RankPool

TOLERANCE = 0.03
CASES = [
    # precision, tied output layer, micro-batches, optimizer
    ("32-true", False, 1, {"name": "adamw"}),
    ("bf16-mixed", False, 1, {"name": "adamw"}),
    ("bf16-mixed", True, 1, {"name": "sgd", "lr": 0.1, "options": {"momentum": 0.9}}),
    ("32-true", True, 2, {"name": "adamw"}),
    ("bf16-mixed", False, 2, {"name": "adamw"}),
    ("bf16-true", False, 2, {"name": "rmsprop", "weight_rounding": "nearest"}),
]


class Model(Module):
    """Model with a vocabulary of 101 tokens, a prime number, so that no number of ranks divides its rows."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.net = GPT(
            GPTConfig(vocab_size=101, context=16, num_layers=2, num_heads=2, width=32, dropout=0.0, tied_head=tied)
        )

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        return self.net(*batch)[1]


def make_plan(strategy: str, num_ranks: int, precision: str, num_micro_batches: int, optimizer: dict[str, Any]) -> Plan:
    strategy, _, communication = strategy.partition(", ")
    parallel = {"strategy": strategy, "devices": num_ranks, "accelerator": "cpu"}
    parallel["communication"] = communication or "overlapped"
    if strategy == "hsdp":
        parallel["shard_size"] = 2
    return Plan.from_dict(
        {
            "parallel": parallel,
            "precision": {"mode": precision},
            "batch": {"accumulate_grad_batches": num_micro_batches},
            "optimizer": optimizer,
        }
    )


def make_engine(plan: Plan, module: Module, ranks: Ranks) -> EagerEngine:
    engine, _ = build(plan, module, lambda blocks: configure(plan, module, lambda: 1.0, blocks), EagerEngine, ranks)
    return engine


def ranks_here() -> Ranks:
    return Ranks(World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), 0, dist.get_world_size()))


def tracked_step(engine: EagerEngine, module: Module, num_micro_batches: int) -> MemoryTracker:
    batch = (torch.randint(0, 101, (1, 16)), torch.randint(0, 101, (1, 16)))

    def step(tracker: MemoryTracker | None = None) -> None:
        if tracker is not None:
            tracker.enter("forward")
        engine.forward_backward(lambda batch, _: module.training_step(batch), [batch] * num_micro_batches)
        if tracker is not None:
            tracker.enter("update")
        engine.step()

    for _ in range(2):
        step()
    with tracking(engine) as tracker:
        step(tracker)
        tracker.restart()
        step(tracker)
    return tracker


def measured_and_formula(strategy: str, cases: list[Any]) -> list[dict[str, Any]]:
    """For each case, return this rank's bytes by kind, between steps and at the peak of model states."""
    found = []
    for precision, tied, num_micro_batches, optimizer in cases:
        ranks, module = ranks_here(), Model(tied)
        plan = make_plan(strategy, ranks.world.size, precision, num_micro_batches, optimizer)
        before = predict(module, plan, rank=ranks.world.rank)
        engine = make_engine(plan, module, ranks)
        tracker = tracked_step(engine, module, num_micro_batches)
        engine.settle()
        after = predict_built(engine, plan, ranks.world.rank)
        found.append(
            {
                "case": (precision, tied, num_micro_batches, optimizer["name"]),
                "measured": tracker.now().num_bytes,
                "formula": before.between_steps.num_bytes,
                "measured_peak": tracker.peak(MODEL_STATES).num_bytes,
                "formula_peak": before.peak.num_bytes,
                "buffers": tracker.peak([Kind.COMMUNICATION]).num_bytes[Kind.COMMUNICATION],
                "formula_buffers": max(each.num_bytes[Kind.COMMUNICATION] for each in before.moments),
                "is_the_same_when_built": before == after,
            }
        )
    return found


@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    few(
        [
            *covering(["zero2", "zero3", "ddp", "zero1"], [2, 3]),
            ("hsdp", 4),
            ("zero3, sequential", 2),
            ("zero1, sequential", 3),
        ],
    ),
)
def test_formula_matches_the_measurement_on_each_rank(on_ranks: RankPool, strategy: str, num_ranks: int) -> None:
    check_formula(on_ranks, strategy, num_ranks, CASES[1::2] if num_ranks == 2 else CASES[1:4:2])


@pytest.mark.more
@pytest.mark.parametrize("strategy", ["zero2", "ddp", "zero3, sequential"])
def test_formula_matches_the_measurement_of_the_other_cases(on_ranks: RankPool, strategy: str) -> None:
    check_formula(on_ranks, strategy, 2, CASES[::2])


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["ddp", "zero1", "zero2", "zero3", "hsdp", *(f"{each}, sequential" for each in ("zero2", "hsdp"))]
)
def test_formula_matches_the_measurement_on_four_ranks(on_ranks: RankPool, strategy: str) -> None:
    check_formula(on_ranks, strategy, 4, CASES[1:5])


def check_formula(on_ranks: RankPool, strategy: str, num_ranks: int, cases: list[Any]) -> None:
    by_rank = on_ranks(num_ranks, measured_and_formula, strategy, cases)
    for rank, found in enumerate(by_rank):
        for case in found:
            where = (rank, case["case"])
            for kind in MODEL_STATES:
                assert case["measured"][kind] == pytest.approx(case["formula"][kind], rel=TOLERANCE), (where, kind)
            peaks = [sum(case[name][kind] for kind in MODEL_STATES) for name in ("measured_peak", "formula_peak")]
            assert peaks[0] == pytest.approx(peaks[1], rel=TOLERANCE), where
            assert case["buffers"] == pytest.approx(case["formula_buffers"], rel=TOLERANCE, abs=64), where
            assert case["is_the_same_when_built"], where


def test_single_rank_holds_all_model_states() -> None:
    module = Model(tied=False)
    plan = make_plan("single", 1, "bf16-mixed", 2, {"name": "adamw"})
    num_parameters = sum(each.numel() for each in module.parameters())
    num_tensors = len(list(module.parameters()))
    tracker = tracked_step(make_engine(plan, module, Ranks()), module, 2)
    formula = predict(module, plan)
    assert formula.peak.total() == 16 * num_parameters + 4 * num_tensors
    assert tracker.peak(MODEL_STATES).total(MODEL_STATES) == pytest.approx(formula.peak.total(), rel=TOLERANCE)


def test_bytes_per_parameter_of_each_strategy() -> None:
    """The bytes per parameter equal the documented values, for a model with many small units."""
    module = Model(tied=False)
    module.net = GPT(GPTConfig(vocab_size=64, context=16, num_layers=24, num_heads=2, width=64, dropout=0.0))
    num_parameters = sum(each.numel() for each in module.parameters())

    def per_parameter(strategy: str, num_ranks: int, num_micro_batches: int = 1) -> float:
        plan = make_plan(strategy, num_ranks, "bf16-mixed", num_micro_batches, {"name": "adamw"})
        return predict(module, plan).peak.total() / num_parameters

    assert per_parameter("ddp", 4) == pytest.approx(16, rel=0.01)
    assert per_parameter("ddp", 4, 2) == pytest.approx(20, rel=0.01)  # gradients in addition to the buckets
    assert per_parameter("zero1", 4, 2) == pytest.approx(2 + 4 + 12 / 4, rel=0.05)
    assert per_parameter("zero2", 4, 2) == pytest.approx(2 + 16 / 4, rel=0.05)
    assert per_parameter("zero2", 4) < 2 + 16 / 4  # unsharded weights are freed while gradients are computed
    assert per_parameter("zero3", 4, 2) == pytest.approx(16 / 4, rel=0.08)
    assert per_parameter("hsdp", 4, 2) == pytest.approx(16 / 2, rel=0.08)


class Scales(Module):
    """Model with blocks without matrix products, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.ReLU(), nn.LayerNorm(32)) for _ in range(2))
        self.head = nn.Linear(32, 5).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        hidden = self.first(batch[0][:, :1] * torch.ones(1, 32))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).square().mean()


def peaks_of_scales(strategy: str) -> tuple[int, int]:
    ranks, module = ranks_here(), Scales()
    plan = make_plan(strategy, ranks.world.size, "bf16-mixed", 1, {"name": "adamw"})
    formula = predict(module, plan, rank=ranks.world.rank)
    tracker = tracked_step(make_engine(plan, module, ranks), module, 1)
    return tracker.peak(MODEL_STATES).total(MODEL_STATES), formula.peak.total()


@pytest.mark.more
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_blocks_of_norms_and_frozen_layers(on_ranks: RankPool, strategy: str) -> None:
    for measured, formula in on_ranks(2, peaks_of_scales, strategy):
        assert measured == pytest.approx(formula, rel=TOLERANCE)


def test_prediction_on_the_meta_device() -> None:
    with torch.device("meta"):
        network = GPT(GPTConfig(num_layers=48, num_heads=25, width=1600))
    plan = make_plan("zero3", 4, "bf16-mixed", 1, {"name": "adamw"})
    num_parameters = sum(each.numel() for each in network.parameters())
    assert predict(network, plan).between_steps.total() == pytest.approx(3 * num_parameters, rel=0.001)  # no gradients


def around_a_step(strategy: str) -> dict[str, dict[Kind, int]]:
    ranks, module = ranks_here(), Model(tied=False)
    plan = make_plan(strategy, ranks.world.size, "bf16-mixed", 1, {"name": "adamw"})
    engine = make_engine(plan, module, ranks)
    tracker = tracked_step(engine, module, 1)
    engine.settle()
    with MemoryTracker(engine.module, engine.optimizers, engine.device) as look:
        pass
    formula = predict_built(engine, plan, ranks.world.rank)
    return {
        "formula": formula.between_steps.num_bytes,
        "now": look.now().num_bytes,
        "peak": tracker.peak(MODEL_STATES).num_bytes,
        "whole_peak": tracker.peak().num_bytes,
    }


def test_between_two_steps_only_shards_exist(on_ranks: RankPool) -> None:
    first, last = on_ranks(2, around_a_step, "zero3")
    for kind in MODEL_STATES:
        assert first["now"][kind] == pytest.approx(first["formula"][kind], rel=TOLERANCE)
    assert first["now"][Kind.GATHERED] == 0
    assert first["peak"][Kind.GATHERED] > 0
    assert first["whole_peak"][Kind.ACTIVATION] > 0
    assert sum(first["peak"].values()) > sum(last["peak"].values())  # the last rank owns fewer of the 101 rows
