"""The backend and the mode of ``torch.compile``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roomier
from roomier.core.errors import RoomierError
from roomier.plan import Plan, plan_from_flags

pytestmark = pytest.mark.more


class Blocks(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])

    def training_step(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()


def fit(compile: Any) -> Blocks:
    module = Blocks()
    trainer = roomier.Trainer(
        max_steps=2,
        accelerator="cpu",
        compile=compile,
        optimizer={"name": "sgd", "lr": 0.1},
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, [torch.ones(2, 4)] * 2)
    return module


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_the_backend_compiles_each_block() -> None:
    # The backend "eager" runs the captured graph with the kernels of an uncompiled block.
    plain, compiled = fit(False), fit({"backend": "eager"})
    for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(one, other)
    assert torch.compiler.list_backends(())  # the compiler is loaded


def test_settings_are_part_of_the_plan() -> None:
    plan = plan_from_flags(compile={"backend": "inductor", "mode": "max-autotune"})
    assert (plan.compile.enabled, plan.compile.backend, plan.compile.mode) == (True, "inductor", "max-autotune")
    assert "inductor, max-autotune" in plan.table()
    assert Plan.from_yaml(plan.to_yaml()) == plan
    trainer = roomier.Trainer(torch_compile=True, logger=False)
    assert trainer.plan.compile.enabled
    assert roomier.Trainer(torch_compile_backend="aot_eager", logger=False).plan.compile.backend == "aot_eager"


@pytest.mark.parametrize(
    ("compile", "field", "action"),
    [
        ({"backand": "eager"}, "compile", "Did you mean 'backend'?"),
        ({"backend": "eager", "mode": "max-autotune"}, "compile.mode", "Remove the mode or the backend"),
        ({"backend": "inductr"}, "compile.backend", "Did you mean 'inductor'?"),
        ({"mode": "fastest"}, "compile.mode", "max-autotune"),
    ],
)
def test_unknown_settings_are_rejected(compile: Any, field: str, action: str) -> None:
    with pytest.raises(RoomierError) as caught:
        fit(compile)
    assert caught.value.field == field
    assert action in str(caught.value)
