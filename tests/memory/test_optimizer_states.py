"""What optimizers keep, by formula and after a step."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from roomier.core.errors import RoomierError
from roomier.memory.kinds import Kind
from roomier.memory.optimizer_states import state_bytes
from roomier.optim.by_name import OPTIMIZERS
from tests.memory.test_model_states import Model, make_engine, make_plan, ranks_here, tracked_step
from tests.ranks.pool import RankPool

SHAPES = [(13, 6), (7,), (4, 3, 5)]


class Halves(Optimizer):
    """Keeps one number for each row, and a half-size copy."""

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
    *((OPTIMIZERS[name], {}) for name in OPTIMIZERS if name != "onebit_adam"),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (Halves, {}),
]


@pytest.mark.parametrize(("kind", "options"), CASES, ids=lambda each: getattr(each, "__name__", str(each)))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_states_after_a_step(kind: Any, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    parameter = nn.Parameter(torch.ones(shape))
    parameter.grad = torch.ones(shape)
    optimizer = kind([parameter], **options)
    optimizer.step()
    kept = sum(each.nbytes for each in optimizer.state[parameter].values() if isinstance(each, Tensor))
    group = {key: each for key, each in optimizer.param_groups[0].items() if key != "params"}
    assert state_bytes(kind, group, shape, torch.float32) == kept


def test_an_empty_part_has_counters_only() -> None:
    assert state_bytes(torch.optim.AdamW, {}, (0, 5), torch.float32) == 4
    assert state_bytes(torch.optim.Adadelta, {}, (0, 5), torch.float32) == 0


def test_an_optimizer_that_takes_no_step_on_a_copy_is_named() -> None:
    assert inspect.isclass(torch.optim.LBFGS)
    with pytest.raises(RoomierError, match="LBFGS"):
        state_bytes(torch.optim.LBFGS, {}, (3, 3), torch.float32)


def kept_by_onebit_adam(strategy: str) -> dict[str, int]:
    from roomier.memory.predict import predict

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


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_onebit_adam_after_its_freeze(on_ranks: RankPool, strategy: str) -> None:
    for found in on_ranks(2, kept_by_onebit_adam, strategy):
        for kind in (Kind.PARAMETER, Kind.GRADIENT, Kind.OPTIMIZER_STATE):
            assert found[f"measured {kind}"] == pytest.approx(found[f"formula {kind}"], rel=0.03), kind
