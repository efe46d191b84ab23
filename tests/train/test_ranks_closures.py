"""An overridden ``optimizer_step`` on several ranks equals the default, and a run on one rank."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import roomier

pytestmark = pytest.mark.more

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Regression(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.net(batch[0]) - 1).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("error", (self.net(batch[0]) - 1).pow(2).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Passes(Regression):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class Newton(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def error_after(kind: type, strategy: str, num_ranks: int, keywords: dict[str, Any]) -> float:
    """Return the remaining error after two epochs of 24 samples with eight per step."""
    data = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)))
    size = 8 // num_ranks // keywords.get("accumulate_grad_batches", 1)
    spread = {"strategy": strategy, "devices": num_ranks} if num_ranks > 1 else {}
    trainer, module = roomier.Trainer(**QUIET, **spread, max_epochs=2, **keywords), kind()
    trainer.fit(module, DataLoader(data, size))
    return trainer.validate(module, DataLoader(data, 8))[0]["error"]


CLIPPED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}


@pytest.mark.parametrize(
    ("strategy", "keywords"),
    [
        ("ddp", CLIPPED),
        ("zero3", {}),
        pytest.param("ddp", {}, marks=pytest.mark.slow),
        pytest.param("zero3", CLIPPED, marks=pytest.mark.slow),
    ],
)
def test_closure_on_two_ranks(on_ranks, strategy, keywords):
    expected = error_after(Regression, "single", 1, keywords)
    assert on_ranks(2, error_after, Passes, strategy, 2, keywords) == pytest.approx([expected] * 2, abs=1e-6)


def refused() -> str:
    with pytest.raises(roomier.RoomierError) as caught:
        error_after(Newton, "ddp", 2, {})
    return str(caught.value)


def test_lbfgs_is_rejected_on_two_ranks(on_ranks):
    for message in on_ranks(2, refused):
        assert message.startswith(
            "devices=2: is not supported with LBFGS, which evaluates the loss several times per step"
        )
