"""lightly: SimCLR and its heads in a LightningModule, and the linear classifier of its benchmarks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from roomier import Trainer
from tests.third_party.side_by_side import SEPARATE, both, largest_difference, quiet_trainer

pl = pytest.importorskip("pytorch_lightning")
pytest.importorskip("lightly", reason=SEPARATE.format(name="lightly"))

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def images(number: int = 24) -> torch.Tensor:
    return torch.randn(number, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def backbone() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


class SimCLR(pl.LightningModule):
    """The module from lightly's documentation, with two views that are created with noise."""

    def __init__(self) -> None:
        from lightly.loss import NTXentLoss
        from lightly.models.modules import SimCLRProjectionHead

        super().__init__()
        self.backbone = backbone()
        self.projection_head = SimCLRProjectionHead(8, 16, 8)
        self.criterion = NTXentLoss()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        views = [self.projection_head(self.backbone(batch[0] + 0.1 * torch.randn_like(batch[0]))) for _ in range(2)]
        loss = self.criterion(*views)
        self.log("train_loss_ssl", loss)
        return loss

    def configure_optimizers(self) -> Any:
        from lightly.utils.scheduler import CosineWarmupScheduler

        optimizer = torch.optim.SGD(self.parameters(), lr=0.06, momentum=0.9)
        scheduler = CosineWarmupScheduler(optimizer, 2, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def of_simclr() -> tuple[Any, dict[str, Any]]:
    return SimCLR(), {"train_dataloaders": DataLoader(TensorDataset(images()), batch_size=8, shuffle=True)}


def of_classifier() -> tuple[Any, dict[str, Any]]:
    from lightly.utils.benchmarking import LinearClassifier

    data = TensorDataset(images(), torch.arange(24) % 3)
    module = LinearClassifier(backbone(), batch_size_per_device=8, feature_dim=8, num_classes=3, topk=(1, 2))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    return module, {"train_dataloaders": loader, "val_dataloaders": DataLoader(data, batch_size=8)}


@pytest.mark.parametrize("make", [of_simclr, of_classifier])
def test_weights_and_metrics_equal_lightnings(make: Any, tmp_path: Path) -> None:
    (theirs, their_module), (ours, our_module) = both(make, tmp_path, pl, max_epochs=3)
    difference = largest_difference(their_module.state_dict(), our_module.state_dict())
    print(f"{make.__name__}: weights differ by {difference:.1e}")
    assert difference <= 1e-6
    assert theirs.callback_metrics.keys() == ours.callback_metrics.keys() != set()
    for name, value in theirs.callback_metrics.items():
        torch.testing.assert_close(ours.callback_metrics[name], value)


def test_the_metric_callback_receives_the_same_values(tmp_path: Path) -> None:
    from lightly.utils.benchmarking import MetricCallback

    found = []
    for kind in (pl.Trainer, Trainer):
        pl.seed_everything(0, verbose=False)
        module, data = of_classifier()
        callback = MetricCallback()
        quiet_trainer(kind, tmp_path, max_epochs=2, callbacks=[callback]).fit(module, **data)
        found.append((callback.train_metrics, callback.val_metrics))
    for theirs, ours in zip(*found, strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5)
