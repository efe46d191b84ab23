"""Accumulation that changes with the epoch: steps, number of steps, schedules and resumed runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import roomier
from roomier.callbacks import GradientAccumulationScheduler, LambdaCallback
from roomier.core.errors import RoomierError
from roomier.trainer import Trainer

Make = Callable[..., Trainer]
OFF = {"logger": False, "enable_checkpointing": False}


def steps_by_epoch(*seen: int) -> tuple[list[int], LambdaCallback]:
    steps: list[int] = []
    return steps, LambdaCallback(on_train_epoch_end=lambda trainer, _: steps.append(trainer.global_step))


def test_number_of_micro_batches_depends_on_the_epoch(make_trainer: Make, scripted: Any, batches: Any) -> None:
    steps, spy = steps_by_epoch()
    scheduler = GradientAccumulationScheduler({1: 4, 3: 2})
    trainer = make_trainer(scheduler, spy, max_epochs=5, **OFF)
    trainer.fit(scripted(), batches)
    assert steps == [10, 13, 16, 21, 26]  # steps per epoch of ten micro-batches: 10, 3, 3, 5, 5
    assert trainer.estimated_stepping_batches == 26


def test_step_equals_a_step_with_the_whole_batch(make_trainer: Make, scripted: Any, batches: Any) -> None:
    torch.manual_seed(0)
    one, other = scripted(), scripted()
    other.load_state_dict(one.state_dict())
    make_trainer(GradientAccumulationScheduler({0: 5}), max_epochs=1, **OFF).fit(one, batches)
    make_trainer(max_epochs=1, **OFF).fit(other, [torch.cat(batches[:5]), torch.cat(batches[5:])])
    torch.testing.assert_close(one.state_dict(), other.state_dict())


class Planned(roomier.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.rates: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(torch.nn.functional.dropout(batch, 0.3)).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def planned(make: Make, path: Path | None = None, max_steps: int = -1, save: Path | None = None) -> Planned:
    torch.manual_seed(2)
    model = Planned()
    stop = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: setattr(trainer, "should_stop", trainer.global_step == max_steps)
    )
    trainer = make(
        GradientAccumulationScheduler({0: 4, 2: 1}),
        stop,
        max_epochs=3,
        optimizer="adamw",
        learning_rate=0.1,
        lr_schedule="linear",
        **OFF,
    )
    generator = torch.Generator().manual_seed(0)
    trainer.fit(model, [torch.randn(2, 2, generator=generator) for _ in range(10)], ckpt_path=path)
    if save is not None:
        trainer.save_checkpoint(save)
    return model


def test_planned_schedule_ends_with_the_run_and_a_resume_is_exact(make_trainer: Make, tmp_path: Path) -> None:
    straight = planned(make_trainer)
    assert straight.rates[-1] == pytest.approx(0.0, abs=1e-9)
    assert straight.rates[-2] == pytest.approx(0.1 / 16)  # the run has 3 + 3 + 10 steps
    for step in (4, 8):
        planned(make_trainer, max_steps=step, save=tmp_path / str(step))
        resumed = planned(make_trainer, path=tmp_path / str(step))
        assert resumed.rates == straight.rates[-len(resumed.rates) :]
        torch.testing.assert_close(resumed.state_dict(), straight.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("scheduling", [{}, {0: 0}, {-1: 2}, {1: 2.5}, {"a": 2}, None, {0: True}])
def test_invalid_schedule_is_rejected(scheduling: Any) -> None:
    with pytest.raises(RoomierError, match=r"GradientAccumulationScheduler\(scheduling\)"):
        GradientAccumulationScheduler(scheduling)


def test_unsupported_combinations_are_rejected(make_trainer: Make, scripted: Any, batches: Any) -> None:
    scheduler = GradientAccumulationScheduler({0: 2})
    with pytest.raises(RoomierError, match="cannot be combined with a GradientAccumulationScheduler"):
        make_trainer(scheduler, accumulate_grad_batches=2, **OFF).fit(scripted(), batches)
    by_hand = scripted()
    by_hand.automatic_optimization = False
    with pytest.raises(RoomierError, match="manual optimization"):
        make_trainer(scheduler, **OFF).fit(by_hand, batches)
    with pytest.raises(RoomierError, match="step_in_backward"):
        make_trainer(scheduler, step_in_backward=True, **OFF).fit(scripted(), batches)


def fit_on_ranks(root: Path, strategy: str, devices: int) -> dict[str, Any]:
    torch.manual_seed(4)
    model = Planned()
    steps, spy = steps_by_epoch()
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=devices,
        max_epochs=2,
        optimizer="adamw",
        learning_rate=0.1,
        default_root_dir=root,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[GradientAccumulationScheduler({0: 3, 1: 2}), spy],
        **OFF,
    )
    model.training_step = lambda batch, batch_idx: model.layer(batch).square().mean()
    samples = torch.randn(24, 2, generator=torch.Generator().manual_seed(0))
    trainer.fit(model, torch.utils.data.DataLoader(samples, batch_size=4 // devices))
    trainer.save_checkpoint(root / f"{strategy}{devices}")
    return {"steps": steps}


def test_all_ranks_take_the_same_steps(on_ranks: Any, tmp_path: Path) -> None:
    one = fit_on_ranks(tmp_path, "single", 1)
    assert one == {"steps": [2, 5]}
    assert on_ranks(2, fit_on_ranks, tmp_path, "zero3", 2) == [one] * 2
    weights = [roomier.checkpoint.load(tmp_path / name)["module"] for name in ("single1", "zero32")]
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)
