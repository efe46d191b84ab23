"""``Trainer(step_in_backward=...)``: equality with the default, checkpoints, and rejected combinations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import roomier
from roomier import Callback, Module, PlanError, RoomierError, Trainer

MakeTrainer = Callable[..., Trainer]


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Tanh()) for _ in range(3)))
        self.norms: list[Tensor | None] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.layers(batch) - 3 * batch).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"},
        }


def loader() -> DataLoader[Tensor]:
    data = torch.randn(40, 4, generator=torch.Generator().manual_seed(3))
    return DataLoader([*data], batch_size=2)  # type: ignore[arg-type]


def fitted(make_trainer: MakeTrainer, way: bool | str, steps: int = 10, ckpt: Path | None = None, **flags: Any) -> Net:
    module = Net()
    torch.manual_seed(1)
    trainer = make_trainer(step_in_backward=way, max_steps=steps, **flags)
    trainer.fit(module, loader(), ckpt_path=ckpt)
    assert trainer.global_step == steps
    return module


def check_same(one: Module, other: Module) -> None:
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("clip", [{}, {"gradient_clip_val": 0.1}])
def test_run_equals_the_default_path(make_trainer: MakeTrainer, clip: dict[str, Any]) -> None:
    check_same(fitted(make_trainer, True, **clip), fitted(make_trainer, False, **clip))


@pytest.mark.parametrize("way", [True, "stale_norm"])
def test_resumed_run_equals_an_uninterrupted_run(make_trainer: MakeTrainer, tmp_path: Path, way: bool | str) -> None:
    whole = fitted(make_trainer, way, gradient_clip_val=0.1)
    module = Net()
    torch.manual_seed(1)
    trainer = make_trainer(step_in_backward=way, max_steps=5, gradient_clip_val=0.1)
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    check_same(fitted(make_trainer, way, ckpt=tmp_path / "half.ckpt", gradient_clip_val=0.1), whole)


def test_no_hooks_remain_on_the_model(make_trainer: MakeTrainer) -> None:
    module = fitted(make_trainer, True)
    module.training_step(torch.ones(1, 4), 0).backward()
    assert all(each.grad is not None for each in module.parameters())


def seen(self: Any, *_: Any, **__: Any) -> None:
    raise AssertionError("is not to be called")


@pytest.mark.parametrize(
    "name", ["on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step"]
)
def test_module_hooks_that_read_gradients_are_rejected(make_trainer: MakeTrainer, name: str) -> None:
    module = type("Own", (Net,), {name: seen})()
    with pytest.raises(RoomierError, match=rf"step_in_backward='exact': Own\.{name} cannot access gradients"):
        make_trainer(step_in_backward=True, max_steps=1).fit(module, loader())


def test_callback_hooks_that_read_gradients_are_rejected(make_trainer: MakeTrainer) -> None:
    callback = type("Own", (Callback,), {"on_before_optimizer_step": seen})()
    with pytest.raises(RoomierError, match=r"Own\.on_before_optimizer_step cannot access gradients"):
        make_trainer(step_in_backward=True, max_steps=1, callbacks=[callback]).fit(Net(), loader())


def test_overridden_backward_runs_once(make_trainer: MakeTrainer) -> None:
    class Own(Net):
        def backward(self, loss: Tensor) -> None:  # type: ignore[override]
            loss.backward()

    make_trainer(step_in_backward=True, max_steps=2).fit(Own(), loader())
    with pytest.raises(RoomierError, match="overrides backward, but clipping by norm runs backward twice"):
        make_trainer(step_in_backward=True, max_steps=1, gradient_clip_val=1.0).fit(Own(), loader())


def test_manual_optimization_is_rejected(make_trainer: MakeTrainer) -> None:
    module = Net()
    module.automatic_optimization = False
    with pytest.raises(PlanError, match=r"step_in_backward='exact': is not supported with manual"):
        make_trainer(step_in_backward=True, max_steps=1).fit(module, loader())


def test_loss_that_is_not_finite_ends_the_run(make_trainer: MakeTrainer) -> None:
    class Broken(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (torch.nan if batch_idx == 2 else 1.0)

    with pytest.raises(roomier.TrainingError, match=r"loss=nan.*is not finite"):
        make_trainer(step_in_backward=True, max_steps=10, gradient_clip_val=1.0, log_every_n_steps=1).fit(
            Broken(), loader()
        )


def test_batches_without_loss_are_skipped(make_trainer: MakeTrainer) -> None:
    class Picky(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return None if batch_idx % 3 == 1 else super().training_step(batch, batch_idx)

    modules = []
    for way in (True, False):
        module = Picky()
        torch.manual_seed(1)
        make_trainer(step_in_backward=way, max_epochs=1, gradient_clip_val=0.1).fit(module, loader())
        modules.append(module)
    check_same(*modules)
