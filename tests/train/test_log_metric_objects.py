"""torchmetrics objects in ``self.log``."""

import pytest
import torch
from torch import nn

import roomier

torchmetrics = pytest.importorskip("torchmetrics")


class Measures(roomier.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.error = torchmetrics.MeanSquaredError()
        self.val_error = torchmetrics.MeanSquaredError()
        self.both = torchmetrics.MetricCollection(
            {"mse": torchmetrics.MeanSquaredError(), "mae": torchmetrics.MeanAbsoluteError()}
        )

    def training_step(self, batch, batch_idx):
        self.error(batch[:, 0], torch.zeros(len(batch)))
        self.log("error", self.error, on_step=True, on_epoch=True)
        return self.net(batch).mean()

    def validation_step(self, batch, batch_idx):
        self.val_error.update(batch[:, 0], torch.zeros(len(batch)))
        self.log("val_error", self.val_error)
        self.both.update(batch[:, 0], torch.zeros(len(batch)))
        self.log_dict(self.both)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_metric_computes_the_epoch(make_trainer, rows):
    """The value is not the mean of the batch values, because the batch sizes are 1 and 3."""
    module = Measures()
    train = [torch.full((1, 1), 2.0), torch.full((3, 1), 4.0)]
    val = [torch.full((1, 1), 1.0), torch.full((3, 1), 3.0)]
    trainer = make_trainer(max_epochs=2, logger=rows, log_every_n_steps=1)
    trainer.fit(module, train, val)
    assert rows.column("error_step") == [4.0, 16.0] * 2
    assert rows.column("error_epoch") == [13.0] * 2
    assert rows.column("val_error") == [7.0] * 2
    assert rows.column("mse") == [7.0] * 2
    assert rows.column("mae") == [2.5] * 2
    assert float(trainer.callback_metrics["val_error"]) == 7.0


def test_epoch_end_hook_may_read_the_metric(make_trainer):
    """Reading computes the value, and the epoch ends with the same value."""
    seen = []

    class Reads(Measures):
        def on_validation_epoch_end(self):
            seen.append(float(self.trainer.callback_metrics["val_error"]))

    [metrics] = make_trainer().validate(Reads(), [torch.full((2, 1), 3.0)])
    assert seen == [9.0]
    assert metrics["val_error"] == 9.0


def test_logged_metric_has_no_graph_and_can_be_saved_after_the_run(make_trainer, tmp_path):
    """The value of a differentiable metric in a step depends on the parameters."""

    class OfPredictions(Measures):
        def training_step(self, batch, batch_idx):
            predicted = self.net(batch)
            self.error(predicted, torch.zeros_like(predicted))
            self.log("error", self.error, on_step=True, on_epoch=True)
            return predicted.mean()

    trainer = make_trainer(max_steps=3)
    trainer.fit(OfPredictions(), [torch.ones(2, 1)] * 2)
    assert not trainer.callback_metrics["error_step"].requires_grad
    trainer.save_checkpoint(tmp_path / "end")
    assert (tmp_path / "end").is_dir()
