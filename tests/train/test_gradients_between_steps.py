"""Gradients are freed after the update, or later if a hook may read the gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roomier
from roomier.callbacks import Callback, EarlyStopping, LambdaCallback, WeightAveraging

Make = Callable[..., roomier.Trainer]
NUM_BATCHES = 3


class Regression(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)
        self.has_gradient: list[bool] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("loss", loss := self.net(batch).pow(2).mean())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def look(self, *args: Any, **kwargs: Any) -> None:
        self.has_gradient.append(self.net.weight.grad is not None)


class Batches:
    """Loader that records whether ``module`` has gradients each time a batch is read."""

    def __init__(self, module: Regression) -> None:
        self.module = module
        self.has_gradient: list[bool] = []

    def __len__(self) -> int:
        return NUM_BATCHES

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(NUM_BATCHES):
            self.has_gradient.append(self.module.net.weight.grad is not None)
            yield torch.full((2, 4), 1.0 + number)


class LooksAtBatchEnd(Regression):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.look()


class LooksBeforeZeroGrad(Regression):
    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.look()


class LooksAtEpochEnd(Regression):
    def on_train_epoch_end(self) -> None:
        self.look()


class ZeroesItself(Regression):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        self.look()
        optimizer.zero_grad()


class LooksAtSavePoint(Callback):
    def on_save_point(self, trainer: Any, pl_module: Any) -> None:
        pl_module.look()


@pytest.mark.parametrize(
    ("kind", "callbacks", "seen_by_hook", "is_kept"),
    [
        (Regression, [], [], False),
        (Regression, [EarlyStopping("loss"), WeightAveraging()], [], False),
        (LooksAtBatchEnd, [], [True] * NUM_BATCHES, False),
        (LooksAtEpochEnd, [], [True], True),
        (LooksBeforeZeroGrad, [], [False, True, True], True),
        (ZeroesItself, [], [False, True, True], True),
        (Regression, [LambdaCallback(on_train_end=lambda trainer, module: module.look())], [True], True),
        (Regression, [LooksAtSavePoint()], [True] * NUM_BATCHES, True),
    ],
    ids=["none", "own callbacks", "batch end", "epoch end", "before zero_grad", "zero_grad", "lambda", "save point"],
)
def test_gradients_are_freed_after_the_last_hook_that_may_read_them(
    make_trainer: Make, kind: type[Regression], callbacks: list[Callback], seen_by_hook: list[bool], is_kept: bool
) -> None:
    module = kind()
    batches = Batches(module)
    make_trainer(max_epochs=1, callbacks=callbacks).fit(module, batches)
    assert module.has_gradient == seen_by_hook
    assert batches.has_gradient == [False, *[is_kept] * (NUM_BATCHES - 1)]
    assert (module.net.weight.grad is not None) == is_kept


class RunsBackwardInValidation(Regression):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        with torch.enable_grad():
            self.net(batch).sum().backward()


def test_backward_between_steps_does_not_affect_the_next_step(make_trainer: Make) -> None:
    module = RunsBackwardInValidation()
    plain = Regression()
    plain.load_state_dict(copy.deepcopy(module.state_dict()))
    for each in (module, plain):
        trainer = make_trainer(max_epochs=1, val_check_interval=1, inference_mode=False, num_sanity_val_steps=0)
        trainer.fit(each, Batches(each), [torch.ones(2, 4)])
    assert torch.equal(module.net.weight, plain.net.weight)


def test_manual_optimization_keeps_gradients(make_trainer: Make) -> None:
    class ByHand(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
            self.look()
            self.manual_backward(self.net(batch).pow(2).mean())
            self.optimizers().step()

    module = ByHand()
    make_trainer(max_epochs=1).fit(module, Batches(module))
    assert module.has_gradient == [False, True, True]


def test_prepared_loop_keeps_gradients_until_it_frees_them() -> None:
    model = nn.Linear(2, 1)
    engine = roomier.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), plan={"parallel": {"devices": 1}})
    engine.forward_backward(lambda x: model(x).sum(), [torch.ones(1, 2)])
    engine.step()
    assert torch.equal(model.weight.grad, torch.ones(1, 2))
    engine.free_gradients()
    assert model.weight.grad is None
