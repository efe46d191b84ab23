"""EarlyStopping in real runs with predefined validation losses."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from roomier.callbacks import EarlyStopping, EarlyStoppingReason
from roomier.core.errors import RoomierError
from roomier.trainer import Trainer

Make = Callable[..., Trainer]


@pytest.mark.parametrize(
    ("arguments", "scores", "stopped_epoch", "reason", "best", "wait_count"),
    [
        # 3 2 | 2 2.5 2: three checks without an improvement after epoch 1
        ({}, [3, 2, 2, 2.5, 2, 0], 4, "PATIENCE_EXHAUSTED", 2.0, 3),
        ({"patience": 1}, [3, 2, 2, 1], 2, "PATIENCE_EXHAUSTED", 2.0, 1),
        ({"patience": 0}, [3, 3], 1, "PATIENCE_EXHAUSTED", 3.0, 1),
        ({"mode": "max", "patience": 2}, [1, 2, 2, 1, 5], 3, "PATIENCE_EXHAUSTED", 2.0, 2),
        # a change of 0.5 is not more than min_delta=0.5, but 0.75 is
        ({"min_delta": 0.5, "patience": 2}, [3, 2.5, 2.25, 2.25, 1.75, 0], 4, "PATIENCE_EXHAUSTED", 2.25, 2),
        ({"min_delta": 0.5, "patience": 2, "mode": "max"}, [1, 1.5, 1.75, 2, 2], 4, "PATIENCE_EXHAUSTED", 1.75, 2),
        ({}, [3, math.nan], 1, "NON_FINITE_METRIC", 3.0, 0),
        ({}, [3, math.inf], 1, "NON_FINITE_METRIC", 3.0, 0),
        ({"check_finite": False, "patience": 2}, [3, math.nan, 2, math.nan, math.nan], 4, "PATIENCE_EXHAUSTED", 2.0, 2),
        ({"stopping_threshold": 1.0}, [3, 1, 0.5], 2, "STOPPING_THRESHOLD", 1.0, 0),
        ({"stopping_threshold": 1.0, "mode": "max"}, [0.5, 1.5], 1, "STOPPING_THRESHOLD", 0.5, 0),
        ({"divergence_threshold": 9.0}, [3, 9, 10], 2, "DIVERGENCE_THRESHOLD", 3.0, 1),
        ({"divergence_threshold": 1.0, "mode": "max"}, [3, 0.5], 1, "DIVERGENCE_THRESHOLD", 3.0, 0),
    ],
)
def test_stopped_epoch_and_reason(
    make_trainer: Make,
    scripted: Any,
    batches: Any,
    arguments: dict[str, Any],
    scores: list[float],
    stopped_epoch: int,
    reason: str,
    best: float,
    wait_count: int,
) -> None:
    stopping = EarlyStopping("val_loss", **arguments)
    trainer = make_trainer(stopping, max_epochs=20, enable_checkpointing=False, logger=False)
    trainer.fit(scripted([float(score) for score in scores]), batches[:2], batches[:1])
    assert trainer.current_epoch == stopped_epoch + 1, "number of completed epochs"
    assert (stopping.stopped_epoch, stopping.stopping_reason) == (stopped_epoch, EarlyStoppingReason[reason])
    assert (stopping.best_score.item(), stopping.wait_count) == (best, wait_count)
    assert stopping.stopping_reason_message is not None
    assert "val_loss" in stopping.stopping_reason_message


@pytest.mark.parametrize("threshold", ["stopping_threshold", "divergence_threshold"])
def test_value_equal_to_a_threshold_does_not_stop(
    make_trainer: Make, scripted: Any, batches: Any, threshold: str
) -> None:
    for mode in ("min", "max"):
        for number in (0.1, 0.35):  # rounding to float32 increases the first number and decreases the second number
            stopping = EarlyStopping("val_loss", mode=mode, **{threshold: number})
            trainer = make_trainer(stopping, max_epochs=2, enable_checkpointing=False, logger=False)
            trainer.fit(scripted([number]), batches[:1], batches[:1])
            assert stopping.stopping_reason is EarlyStoppingReason.NOT_STOPPED, (mode, number)


def test_change_equal_to_min_delta_is_not_an_improvement_in_float64(
    make_trainer: Make, scripted: Any, batches: Any
) -> None:
    stopping = EarlyStopping("val_loss", mode="max", min_delta=0.1, patience=2)
    trainer = make_trainer(stopping, max_epochs=5, enable_checkpointing=False, logger=False)
    trainer.fit(scripted([0.1, 0.2, 0.2, 0.9]), batches[:1], batches[:1])
    assert stopping.stopped_epoch == 2

    class Fine(scripted):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", torch.tensor(1 + 1e-12 / (1 + self.current_epoch), dtype=torch.float64))

    stopping = EarlyStopping("val_loss", patience=1)
    trainer = make_trainer(stopping, max_epochs=3, enable_checkpointing=False, logger=False)
    trainer.fit(Fine(), batches[:1], batches[:1])
    assert stopping.stopping_reason is EarlyStoppingReason.NOT_STOPPED


def test_reason_is_kept_until_min_epochs(make_trainer: Make, scripted: Any, batches: Any) -> None:
    stopping = EarlyStopping("val_loss", patience=1)
    trainer = make_trainer(stopping, max_epochs=5, min_epochs=3, enable_checkpointing=False, logger=False)
    trainer.fit(scripted([3.0, 4.0, 2.0]), batches[:1], batches[:1])
    assert trainer.current_epoch == 3
    assert (stopping.stopped_epoch, stopping.stopping_reason) == (1, EarlyStoppingReason.PATIENCE_EXHAUSTED)
    trainer = make_trainer(stopping, max_epochs=1, enable_checkpointing=False, logger=False)
    trainer.fit(scripted([1.0]), batches[:1], batches[:1])
    assert (stopping.stopping_reason, stopping.stopping_reason_message) == (EarlyStoppingReason.NOT_STOPPED, None)


def test_run_that_improves_is_not_stopped(make_trainer: Make, scripted: Any, batches: Any) -> None:
    stopping = EarlyStopping("val_loss", patience=1)
    trainer = make_trainer(stopping, max_epochs=4, enable_checkpointing=False, logger=False)
    trainer.fit(scripted([4.0, 3.0, 2.0, 1.0]), batches[:2], batches[:1])
    assert trainer.current_epoch == 4
    assert stopping.stopping_reason is EarlyStoppingReason.NOT_STOPPED
    assert (stopping.stopped_epoch, stopping.stopping_reason_message) == (0, None)


def test_each_of_several_validations_per_epoch_is_a_check(make_trainer: Make, scripted: Any, batches: Any) -> None:
    stopping = EarlyStopping("val_loss", patience=3)
    trainer = make_trainer(stopping, max_epochs=9, val_check_interval=0.5, logger=False, enable_checkpointing=False)
    trainer.fit(scripted([1.0]), batches, batches[:1])
    assert trainer.global_step == 20, "checks at steps 5, 10, 15 and 20; the first sets the best value"
    at_epoch_end = EarlyStopping("val_loss", patience=3, check_on_train_epoch_end=True)
    trainer = make_trainer(at_epoch_end, max_epochs=9, val_check_interval=0.5, logger=False, enable_checkpointing=False)
    trainer.fit(scripted([1.0]), batches, batches[:1])
    assert trainer.global_step == 40


def test_metrics_logged_at_the_end_of_the_epoch_are_checked(make_trainer: Make, scripted: Any, batches: Any) -> None:
    module = scripted()
    module.on_train_epoch_end = lambda: module.log("epoch_score", 1.0)
    stopping = EarlyStopping("epoch_score", patience=1, check_on_train_epoch_end=True)
    trainer = make_trainer(stopping, max_epochs=9, logger=False, enable_checkpointing=False)
    trainer.fit(module, batches)
    assert trainer.current_epoch == 2, "the first epoch sets the best value, and the second does not improve it"


def test_metric_that_is_not_logged_is_rejected(
    make_trainer: Make, scripted: Any, batches: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet = {"max_epochs": 1, "logger": False, "enable_checkpointing": False}
    with pytest.raises(RoomierError) as caught:
        make_trainer(EarlyStopping("val_los"), **quiet).fit(scripted(), batches, batches[:1])
    for words in ("EarlyStopping(monitor)='val_los'", "Did you mean 'val_loss'?"):
        assert words in str(caught.value)
    with pytest.raises(RoomierError) as caught:
        make_trainer(EarlyStopping("val_loss"), **quiet).fit(scripted(), batches)
    assert "the run has no validation data. Pass val_dataloaders to fit" in str(caught.value)
    assert "Did you mean" not in str(caught.value), "train_loss is not similar enough"
    lax = EarlyStopping("val_los", strict=False, verbose=True)
    make_trainer(lax, **quiet).fit(scripted(), batches, batches[:1])
    assert "'val_los' was not logged, so this check is skipped" in capsys.readouterr().err


def test_name_without_dataloader_suffix_suggests_the_first_dataloader(
    make_trainer: Make, scripted: Any, batches: Any
) -> None:
    module = scripted()
    module.validation_step = lambda batch, batch_idx, dataloader_idx: module.log("val_loss", 1.0)
    loaders = [DataLoader([each], batch_size=None) for each in batches[:2]]
    with pytest.raises(RoomierError, match=r"Did you mean 'val_loss/dataloader_idx_0'\?"):
        make_trainer(EarlyStopping("val_loss"), max_epochs=1).fit(module, batches, loaders)


def test_wait_count_continues_after_a_resume(
    make_trainer: Make, scripted: Any, batches: Any, kill_at: Any, killed_error: Any
) -> None:
    scores = [3.0, 2.0, 2.0, 2.0, 2.0, 1.0]
    with pytest.raises(killed_error):
        make_trainer(EarlyStopping("val_loss"), kill_at(35), max_epochs=9).fit(scripted(scores), batches, batches[:1])
    stopping = EarlyStopping("val_loss")
    trainer = make_trainer(stopping, max_epochs=9)
    trainer.fit(scripted(scores), batches, batches[:1], ckpt_path="last")
    assert trainer.current_epoch == 5
    assert (stopping.stopped_epoch, stopping.wait_count, stopping.best_score.item()) == (4, 3, 2.0)


def test_verbose_prints_improvements_and_the_stop(
    make_trainer: Make, scripted: Any, batches: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stopping = EarlyStopping("val_loss", patience=1, verbose=True)
    make_trainer(stopping, max_epochs=9, logger=False).fit(scripted([3.0, 2.0, 2.5]), batches[:2], batches[:1])
    err = capsys.readouterr().err
    assert "val_loss = 2 is the new best value; the previous best was 3" in err
    assert "val_loss = 2.5: 1 consecutive checks without an improvement over 2" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"monitor": ""}, "EarlyStopping(monitor)=''"),
        ({"monitor": "a", "mode": "up"}, "EarlyStopping(mode)='up'"),
        ({"monitor": "a", "patience": -1}, "EarlyStopping(patience)=-1"),
        ({"monitor": "a", "patience": 1.5}, "EarlyStopping(patience)=1.5"),
        ({"monitor": "a", "min_delta": -0.1}, "EarlyStopping(min_delta)=-0.1"),
        ({"monitor": "a", "min_delta": math.nan}, "EarlyStopping(min_delta)=nan"),
    ],
)
def test_invalid_arguments_are_rejected(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(RoomierError) as caught:
        EarlyStopping(**arguments)
    assert words in str(caught.value)


def test_state_equals_lightnings_state() -> None:
    stopping = EarlyStopping("val_loss", mode="max")
    assert stopping.state_dict() == {
        "wait_count": 0,
        "stopped_epoch": 0,
        "best_score": torch.tensor(-math.inf),
        "patience": 3,
    }
    assert stopping.state_key != EarlyStopping("val_loss").state_key
