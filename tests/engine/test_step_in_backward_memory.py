"""Bytes of gradients if optimizers step during backward: measured values, values by formula, and the limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from roomier.core.ranks import Ranks
from roomier.models.gpt import GPT, GPTConfig
from roomier.plan import Plan
from roomier.planner.memory.kinds import MODEL_STATES, Kind
from roomier.planner.memory.predict import predict, predict_built
from roomier.planner.memory.tracker import MemoryTracker
from tests.covering import few
from tests.memory.test_model_states import TOLERANCE, Model, make_engine, ranks_here, tracked_step
from tests.ranks.pool import RankPool

NUM_BLOCKS = 4
CLIP = {"gradient_clip_val": 0.5}


def make_model(vocab_size: int = 101, tied: bool = False) -> Model:
    module = Model(tied)
    config = GPTConfig(vocab_size, context=16, num_layers=NUM_BLOCKS, num_heads=2, width=32, tied_head=tied)
    module.net = GPT(config)
    return module


def make_plan(way: str, batch: dict[str, Any], strategy: str = "single", precision: str = "32-true") -> Plan:
    return Plan.from_dict(
        {
            "parallel": {"strategy": strategy, "devices": 1 if strategy == "single" else 2, "accelerator": "cpu"},
            "precision": {"mode": precision},
            "batch": batch,
            "optimizer": {"name": "adamw", "step_in_backward": way},
        }
    )


def tracked(plan: Plan, module: Model, ranks: Ranks) -> MemoryTracker:
    return tracked_step(make_engine(plan, module, ranks), module, 1)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab_size", [101, 3000])
@pytest.mark.parametrize(("way", "batch"), [("exact", {}), ("exact", CLIP), ("stale_norm", CLIP)])
def test_gradients_of_one_block_or_of_the_largest_parameter_exist(
    way: str, batch: dict[str, Any], vocab_size: int, tied: bool
) -> None:
    module = make_model(vocab_size, tied)
    of_block = sum(each.nbytes for each in module.net.blocks[0].parameters())
    bound = max(of_block, *(each.nbytes for each in module.parameters()))
    tracker = tracked(make_plan(way, batch), module, Ranks())
    assert tracker.peak([Kind.GRADIENT]).num_bytes[Kind.GRADIENT] == bound
    assert tracker.now().num_bytes[Kind.GRADIENT] == 0


def test_all_gradients_exist_with_steps_after_backward() -> None:
    module = make_model()
    tracker = tracked(make_plan("none", {}), module, Ranks())
    num_bytes = sum(each.nbytes for each in module.parameters())
    assert tracker.peak([Kind.GRADIENT]).num_bytes[Kind.GRADIENT] == num_bytes


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("batch", [{}, CLIP])
def test_the_formula_of_one_rank(batch: dict[str, Any], precision: str) -> None:
    module, plan = make_model(), make_plan("exact", batch, precision=precision)
    formula = predict(module, plan)
    tracker = tracked(plan, module, Ranks())
    check_case(case_of(tracker, formula), ("single", precision, batch))


def on_rank(strategy: str, precision: str, batch: dict[str, Any]) -> dict[str, Any]:
    ranks, module = ranks_here(), make_model()
    plan = make_plan("exact", batch, strategy, precision)
    assert dist.get_world_size() == plan.parallel.num_ranks
    before = predict(module, plan, rank=ranks.world.rank)
    engine = make_engine(plan, module, ranks)
    tracker = tracked_step(engine, module, 1)
    engine.settle()
    assert before == predict_built(engine, plan, ranks.world.rank)
    return case_of(tracker, before)


@pytest.mark.more
@pytest.mark.parametrize(
    ("strategy", "precision", "batch"),
    few(
        [
            ("zero3", "bf16-mixed", CLIP),
            ("zero2", "32-true", CLIP),
            ("zero2", "bf16-mixed", {}),
            ("zero3", "32-true", {}),
        ]
    ),
)
def test_the_formula_of_shards(on_ranks: RankPool, strategy: str, precision: str, batch: dict[str, Any]) -> None:
    for case in on_ranks(2, on_rank, strategy, precision, batch):
        check_case(case, (strategy, precision, batch))


def case_of(tracker: MemoryTracker, formula: Any) -> dict[str, Any]:
    kinds = (Kind.GRADIENT, Kind.COMMUNICATION)
    return {
        "states": (tracker.peak(MODEL_STATES).total(MODEL_STATES), formula.peak.total()),
        "between": (tracker.now().total(MODEL_STATES), formula.between_steps.total()),
        **{
            kind: (tracker.peak([kind]).num_bytes[kind], max(each.num_bytes[kind] for each in formula.moments))
            for kind in kinds
        },
    }


def check_case(case: dict[str, tuple[int, int]], call: tuple[Any, ...]) -> None:
    for name, (measured, predicted) in case.items():
        assert measured == pytest.approx(predicted, rel=TOLERANCE, abs=64), (name, call)
