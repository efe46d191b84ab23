"""Bytes of optimizer states, predicted and measured after a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.core.errors import RoomierError
from roomier.models.gpt import GPT, GPTConfig
from roomier.planner.memory.kinds import Kind
from roomier.techniques.optim.adamw import BlockwiseAdamW
from roomier.techniques.optim.lion import Lion
from roomier.techniques.optim.muon import Muon
from roomier.techniques.optim.onebit_adam import OneBitAdam
from roomier.techniques.optim.state_bytes import state_bytes
from tests.memory.test_model_states import Model, make_engine, make_plan, ranks_here, tracked_step
from tests.optim.named import CLASSES
from tests.ranks.pool import RankPool

SHAPES = [(13, 6), (7,), (4, 3, 5)]


class Halves(Optimizer):
    """Optimizer with one number per row and a state of half the size."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each] = {
                    "rows": torch.zeros(each.shape[0]),
                    "half": torch.zeros(each.shape, dtype=torch.bfloat16),
                    "step": 1,
                }


CASES: list[tuple[Any, dict[str, Any]]] = [
    *((kind, {}) for kind in dict.fromkeys(CLASSES.values()) if kind not in (OneBitAdam, Muon)),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    *((kind, {}) for kind in (torch.optim.Adadelta, torch.optim.Adamax) if kind not in CLASSES.values()),
    (Halves, {}),
]
LOW_CASES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    *((Lion, {"weight_rounding": rounding}) for rounding in ("split", "stochastic", "nearest")),
    *((BlockwiseAdamW, {"weight_rounding": rounding}) for rounding in ("split", "stochastic", "nearest")),
    (BlockwiseAdamW, {"weight_rounding": "split", "state_bits": 4}),
    (BlockwiseAdamW, {"weight_rounding": "split", "state_bits": 32}),
]


def kept_and_formula(kind: Any, options: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, int]:
    parameter = nn.Parameter(torch.ones(shape, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    optimizer = kind([parameter], **options)
    optimizer.step()
    kept = sum(each.nbytes for each in optimizer.state[parameter].values() if isinstance(each, Tensor))
    return kept, state_bytes(optimizer, optimizer.param_groups[0], shape, dtype)


@pytest.mark.parametrize(("kind", "options"), CASES, ids=lambda each: getattr(each, "__name__", str(each)))
@pytest.mark.parametrize("shape", [*SHAPES, (50, 170)], ids=str)
def test_states_after_a_step(kind: Any, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    kept, formula = kept_and_formula(kind, options, shape, torch.float32)
    assert formula == kept


@pytest.mark.parametrize(("kind", "options"), LOW_CASES, ids=lambda each: getattr(each, "__name__", str(each)))
@pytest.mark.parametrize("shape", [(13, 6), (7,), (50, 170)], ids=str)
def test_states_of_bfloat16_weights(kind: Any, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    kept, formula = kept_and_formula(kind, options, shape, torch.bfloat16)
    assert formula == kept


def test_muon_has_one_state_per_matrix_and_two_otherwise() -> None:
    matrix, vector = (nn.Parameter(torch.ones(shape)) for shape in ((6, 4), (5,)))
    optimizer = Muon([{"params": [matrix], "is_hidden": True}, {"params": [vector]}])
    hidden, rest = optimizer.param_groups
    assert state_bytes(optimizer, hidden, (6, 4), torch.float32) == 6 * 4 * 4
    assert state_bytes(optimizer, rest, (5,), torch.float32) == 2 * 5 * 4 + 4


def test_empty_shard_has_only_counters() -> None:
    for kind in (torch.optim.AdamW, torch.optim.Adadelta):
        assert kept_and_formula(kind, {}, (0, 5), torch.float32) == (4, 4)
    assert kept_and_formula(torch.optim.SGD, {"momentum": 0.9}, (0, 5), torch.float32) == (0, 0)


def test_a_forecast_draws_no_random_numbers() -> None:
    state = torch.get_rng_state()
    optimizer = Lion([nn.Parameter(torch.ones(2, dtype=torch.bfloat16))], lr=0.125, weight_rounding="stochastic")
    assert state_bytes(optimizer, optimizer.param_groups[0], (7, 3), torch.bfloat16) == 7 * 3 * 4 + 4
    assert torch.equal(torch.get_rng_state(), state)


def test_optimizer_that_cannot_step_on_a_small_parameter_is_rejected() -> None:
    with pytest.raises(RoomierError, match="LBFGS"):
        state_bytes(torch.optim.LBFGS([nn.Parameter(torch.ones(3))]), {}, (3, 3), torch.float32)


def by_name_on_ranks(strategy: str, names: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return the bytes of the states of each named optimizer on this rank, measured and by both formulas."""
    from roomier.planner.memory.predict import predict, predict_built

    found = []
    for name, precision in names:
        ranks, module = ranks_here(), Model(tied=False)
        module.net = GPT(GPTConfig(vocab_size=101, context=16, num_layers=2, num_heads=2, width=96, dropout=0.0))
        plan = make_plan(strategy, dist.get_world_size(), precision, 1, {"name": name, "lr": 1e-3})
        before = predict(module, plan, rank=ranks.world.rank).between_steps.num_bytes
        engine = make_engine(plan, module, ranks)
        tracker = tracked_step(engine, module, 1)
        built = predict_built(engine, plan, ranks.world.rank).between_steps.num_bytes
        measured = tracker.now().num_bytes
        kinds = (Kind.PARAMETER, Kind.OPTIMIZER_STATE)
        found.append(
            {"case": (name, precision), **{kind: (measured[kind], before[kind], built[kind]) for kind in kinds}}
        )
    return found


BY_NAME = [
    ("lion", "32-true"),
    ("lion", "bf16-true"),
    ("muon", "bf16-mixed"),
    ("adamw", "bf16-true"),
    ("adamw8bit", "bf16-mixed"),
    ("adamw4bit", "bf16-true"),
]


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "names"),
    [
        ("zero2", 2, BY_NAME[2::3]),
        pytest.param("zero2", 2, [*BY_NAME[0::3], *BY_NAME[1::3]], marks=pytest.mark.more),
        pytest.param("single", 1, BY_NAME, marks=pytest.mark.more),
    ],
)
def test_named_optimizers_are_predicted(
    on_ranks: RankPool, strategy: str, num_ranks: int, names: list[tuple[str, str]]
) -> None:
    for rank, cases in enumerate(on_ranks(num_ranks, by_name_on_ranks, strategy, names)):
        for case in cases:
            for kind in (Kind.PARAMETER, Kind.OPTIMIZER_STATE):
                measured, before, built = case[kind]
                assert built == before, (rank, case["case"], kind)
                assert measured == pytest.approx(before, rel=0.01), (rank, case["case"], kind)


def kept_by_onebit_adam(strategy: str) -> dict[str, int]:
    from roomier.planner.memory.predict import predict

    ranks, module = ranks_here(), Model(tied=False)
    options = {"freeze_step": 2}
    plan = make_plan(
        strategy, dist.get_world_size(), "32-true", 1, {"name": "onebit_adam", "lr": 1e-3, "options": options}
    )
    formula = predict(module, plan, rank=ranks.world.rank).between_steps.num_bytes
    tracker = tracked_step(make_engine(plan, module, ranks), module, 1)
    measured = tracker.now().num_bytes
    return {
        f"{name} {kind}": each[kind] for name, each in (("formula", formula), ("measured", measured)) for kind in Kind
    }


@pytest.mark.more
def test_onebit_adam_after_its_freeze(on_ranks: RankPool) -> None:
    strategies = ["ddp", "zero1"]
    results = on_ranks.each(2, kept_by_onebit_adam, [(each,) for each in strategies])
    for strategy, by_rank in zip(strategies, results, strict=True):
        for found in by_rank:
            for kind in (Kind.PARAMETER, Kind.GRADIENT, Kind.OPTIMIZER_STATE):
                expected = pytest.approx(found[f"formula {kind}"], rel=0.03)
                assert found[f"measured {kind}"] == expected, (strategy, kind)
