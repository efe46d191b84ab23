"""A LightningModule has the same losses, metrics and weights with Lightning's Trainer and with roomier's Trainer."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

import roomier
from roomier import Trainer
from tests.covering import chosen
from tests.lightning import modules
from tests.lightning.both import Seen, quiet_lightning, run_under
from tests.lightning.modules import in_order, pl, shuffled

NUM_STEPS = 30


class Case(NamedTuple):
    module: Any
    train: Any = in_order
    val: Any = lambda: in_order(3, seed=1)
    keywords: Mapping[str, Any] = MappingProxyType({})


def many() -> list[Any]:
    return [in_order(2, seed=1), in_order(3, seed=2), shuffled(seed=3)]


def with_own_generator() -> DataLoader[Any]:
    data = modules.samples()
    return DataLoader(data, 3, shuffle=True, generator=torch.Generator().manual_seed(5))


def stream() -> DataLoader[Any]:
    return DataLoader(modules.Stream(), batch_size=None)


CASES = {
    "plain": Case(modules.Regression),
    "dropout": Case(modules.WithDropout),
    "dropout and shuffled data": Case(modules.WithDropout, shuffled),
    "shuffled by a separate generator": Case(modules.Regression, with_own_generator, keywords={"max_steps": 30}),
    "a generative adversarial network": Case(modules.Adversaries, shuffled, lambda: None),
    "two optimizers": Case(modules.TwoOptimizers),
    "several schedulers": Case(modules.SeveralSchedulers),
    "many validation loaders": Case(modules.ManyValLoaders, val=many),
    "torchmetrics": Case(modules.WithMetrics),
    "accumulation": Case(modules.WithDropout, keywords={"accumulate_grad_batches": 2}),
    "accumulation and schedulers": Case(modules.SeveralSchedulers, keywords={"accumulate_grad_batches": 5}),
    "clipping by norm": Case(modules.Regression, keywords={"gradient_clip_val": 0.1}),
    "clipping by value": Case(
        modules.Regression, keywords={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    ),
    "custom clipping": Case(modules.OwnClipping, keywords={"gradient_clip_val": 0.2}),
    "warm-up in optimizer_step": Case(modules.WarmsUp),
    "warm-up with accumulation and clipping": Case(
        modules.WarmsUp, keywords={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    ),
    "an update every second step": Case(modules.StepsEverySecond),
    "LBFGS": Case(modules.Newton),
    "LBFGS with clipping": Case(modules.Newton, keywords={"gradient_clip_val": 1.0}),
    "custom scheduler steps": Case(modules.OwnSchedulerStep),
    "outputs in a dict": Case(modules.WithDictOutputs),
    "a stream": Case(modules.WithDropout, stream, keywords={"max_epochs": 3}),
    "some steps return None": Case(modules.SometimesNone),
    "validation within epochs": Case(modules.WithDropout, shuffled, keywords={"val_check_interval": 3}),
}


def assert_equal(seen: Seen, expected: Seen) -> None:
    assert seen.losses == pytest.approx(expected.losses, rel=1e-6, abs=1e-6)
    assert seen.global_steps == expected.global_steps
    assert len(seen.metrics) == len(expected.metrics)
    for metrics, of_lightning in zip(seen.metrics, expected.metrics, strict=True):
        assert metrics == pytest.approx(of_lightning, rel=1e-6, abs=1e-6)
    torch.testing.assert_close(seen.weights, expected.weights, rtol=0, atol=1e-6)


SLOW = {  # each is similar to another case
    "dropout",
    "accumulation and schedulers",
    "custom clipping",
    "warm-up with accumulation and clipping",
    "LBFGS with clipping",
    "a stream",
    "validation within epochs",
}


IN_MAKE_TEST = {
    "dropout and shuffled data",
    "a generative adversarial network",
    "several schedulers",
    "torchmetrics",
    "accumulation",
    "clipping by value",
    "warm-up in optimizer_step",
    "LBFGS",
    "some steps return None",
}


@pytest.mark.parametrize(
    "name",
    [
        *chosen([name for name in CASES if name not in SLOW], IN_MAKE_TEST),
        *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name in SLOW),
    ],
)
def test_losses_metrics_and_weights_are_equal(tmp_path, name):
    case = CASES[name]
    runs = [
        run_under(kind, case.module, lambda: (case.train(), case.val()), tmp_path, **case.keywords)
        for kind in (pl.Trainer, Trainer)
    ]
    assert len(runs[0].losses) >= NUM_STEPS
    assert len(set(runs[0].losses)) > NUM_STEPS / 2  # the model learns, so equal values are not trivial
    assert_equal(runs[1], runs[0])


def test_package_with_its_other_name(tmp_path):
    with quiet_lightning():
        import pytorch_lightning as other

    class Regression(other.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            inputs, targets = batch
            loss = (self.net(inputs) - targets).square().mean()
            self.log("train_loss", loss, on_epoch=True)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", (self.net(batch[0]) - batch[1]).square().mean())

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.05)

    def loaders():
        return in_order(), in_order(2, seed=1)

    assert not issubclass(Regression, pl.LightningModule)
    expected = run_under(other.Trainer, Regression, loaders, tmp_path, other.Callback)
    seen = run_under(Trainer, Regression, loaders, tmp_path, other.Callback)
    assert len(seen.losses) == NUM_STEPS
    assert_equal(seen, expected)


def test_module_that_never_returns_a_loss_raises(tmp_path):
    class Never(modules.Regression):
        def training_step(self, batch, batch_idx):
            return None

    with pytest.raises(roomier.TrainingError, match="no loss for any of the first 10 batches"):
        run_under(Trainer, Never, lambda: (in_order(), None), tmp_path)


class SometimesNoneByClosure(modules.SometimesNone):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize("kind", [modules.SometimesNone, SometimesNoneByClosure])
def test_steps_without_a_loss_with_a_loss_scale(tmp_path, kind):
    """There are no gradients for the scaler to unscale."""
    seen = run_under(Trainer, kind, lambda: (in_order(), None), tmp_path, precision="16-mixed")
    assert seen.global_steps == list(range(1, NUM_STEPS + 1))
    assert all(bool(each.isfinite().all()) for each in seen.weights)
