"""``Trainer(optimizer=...)`` accepts an optimizer or a function for a model without ``configure_optimizers``."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roomier
from roomier.core.errors import RoomierError
from tests.covering import few
from tests.ranks.pool import RankPool


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def with_schedule(parameters: list[nn.Parameter]) -> Any:
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}]


def optimizer_of(name: str, model: nn.Module) -> Any:
    made = {
        "a name": {"name": "adamw", "lr": 0.1, "weight_decay": 0.0},
        "an optimizer": torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0, fused=True),
        "a function": partial(torch.optim.AdamW, lr=0.1, weight_decay=0.0, fused=True),
        "a schedule": with_schedule,
        "a class": torch.optim.AdamW,
        "another model": torch.optim.AdamW(nn.Linear(2, 2).parameters()),
    }
    return made[name]


def fit(name: str, strategy: str = "single", num_ranks: int = 1, precision: str = "32-true") -> dict[str, Tensor]:
    model = Loss()
    trainer = roomier.Trainer(
        max_steps=3,
        accelerator="cpu",
        devices=num_ranks,
        strategy=strategy,
        precision=precision,
        optimizer=optimizer_of(name, model),
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    data = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4 // num_ranks))  # type: ignore[arg-type]
    assert trainer.model is model
    assert trainer.lightning_module.network is model
    return {name: getattr(each, "full_tensor", lambda e=each: e)().detach() for name, each in model.named_parameters()}


@pytest.mark.parametrize("name", ["an optimizer", "a function"])
@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_the_weights_are_the_same_as_with_a_name(name: str, precision: str) -> None:
    expected = fit("a name", precision=precision)
    for key, value in fit(name, precision=precision).items():
        assert torch.equal(value, expected[key])


def test_a_function_can_return_a_schedule_and_a_class_is_a_function() -> None:
    for name in ("a schedule", "a class"):
        assert not torch.equal(fit(name)["layers.0.weight"], fit("a name")["layers.0.weight"])


@pytest.mark.parametrize("name", few(["an optimizer", "a function"]))
def test_the_parameters_can_be_sharded(on_ranks: RankPool, name: str) -> None:
    expected = on_ranks(2, fit, "a name", "zero2", 2)[0]
    for found in on_ranks(2, fit, name, "zero2", 2):
        for key, value in found.items():
            assert torch.equal(value, expected[key])


class Own(roomier.Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_invalid_optimizers_are_rejected() -> None:
    with pytest.raises(RoomierError, match="do not belong to the model"):
        fit("another model")
    with pytest.raises(RoomierError, match="Return it from configure_optimizers"):
        roomier.Trainer(optimizer=torch.optim.SGD, logger=False, max_steps=1).fit(Own(), [torch.ones(1)])
    with pytest.raises(RoomierError, match=r"has no effect without optimizer\.name"):
        roomier.Trainer(optimizer=torch.optim.SGD, learning_rate=0.1, logger=False)


def test_the_model_of_a_trainer_generates() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16))
    ids = torch.randint(0, 16, (2, 4))
    trainer = roomier.Trainer(max_steps=1, optimizer=torch.optim.SGD, logger=False, enable_checkpointing=False)
    trainer.fit(model.train(), [{"input_ids": ids, "labels": ids}])
    assert trainer.model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (2, 6)
