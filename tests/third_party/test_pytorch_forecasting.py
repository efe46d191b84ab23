"""pytorch-forecasting's Temporal Fusion Transformer, an unmodified third-party LightningModule."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from roomier import Trainer
from roomier.callbacks import ModelCheckpoint

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import pandas as pd
    from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet

pytestmark = [pytest.mark.more, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def series() -> Any:
    rows = [
        {"series": str(number), "time": time, "value": math.sin(time / 4 + number) + 0.05 * math.cos(17.0 * time)}
        for number in range(6)
        for time in range(48)
    ]
    frame = pd.DataFrame(rows)
    training = TimeSeriesDataSet(
        frame[frame.time < 40],
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=12,
        max_prediction_length=4,
        time_varying_unknown_reals=["value"],
        static_categoricals=["series"],
    )
    return training, TimeSeriesDataSet.from_dataset(training, frame, min_prediction_idx=40)


def network(training: Any) -> TemporalFusionTransformer:
    torch.manual_seed(0)
    return TemporalFusionTransformer.from_dataset(
        training,
        learning_rate=0.03,
        hidden_size=8,
        attention_head_size=2,
        hidden_continuous_size=4,
        dropout=0.0,
        loss=QuantileLoss(),
        log_interval=-1,
        reduce_on_plateau_patience=3,
    )


def test_it_trains_validates_and_goes_on_from_a_checkpoint(series: Any, make_trainer: Callable[..., Trainer]) -> None:
    training, validation = series
    train_loader = training.to_dataloader(train=True, batch_size=32, num_workers=0)
    val_loader = validation.to_dataloader(train=False, batch_size=32, num_workers=0)
    module = network(training)
    trainer = make_trainer(max_epochs=3, enable_checkpointing=True, callbacks=[ModelCheckpoint(monitor="val_loss")])
    [before] = trainer.validate(module, val_loader)
    torch.manual_seed(1)
    trainer.fit(module, train_loader, val_loader)
    assert {"val_SMAPE", "val_MAE", "val_RMSE", "train_loss_epoch"} <= set(trainer.callback_metrics)
    [after] = trainer.validate(module, val_loader)
    assert after["val_loss"] < 0.8 * before["val_loss"]

    again = network(training)
    longer = make_trainer(max_epochs=4, enable_checkpointing=True)
    longer.fit(again, train_loader, val_loader, ckpt_path=trainer.checkpoint_callback.best_model_path)
    assert longer.current_epoch == 4
