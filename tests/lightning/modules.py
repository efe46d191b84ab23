"""Different kinds of LightningModules, as users write them. These modules do not use roomier."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
    import torchmetrics

BATCH_SIZE, NUM_BATCHES = 4, 10


def samples(num_batches: int = NUM_BATCHES, seed: int = 0) -> TensorDataset:
    """Return inputs of shape (4,) and targets of shape (1,), which are a function of the inputs plus noise."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_batches * BATCH_SIZE, 4, generator=generator)
    noise = torch.randn(num_batches * BATCH_SIZE, 1, generator=generator)
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True) + 0.1 * noise)


def in_order(num_batches: int = NUM_BATCHES, seed: int = 0) -> DataLoader[Any]:
    return DataLoader(samples(num_batches, seed), BATCH_SIZE)


def shuffled(seed: int = 0) -> DataLoader[Any]:
    return DataLoader(samples(seed=seed), BATCH_SIZE, shuffle=True)


class Stream(IterableDataset[Any]):
    """Stream of the same batches in sequence, without a length."""

    def __iter__(self) -> Iterator[Any]:
        yield from in_order()


class Regression(pl.LightningModule):
    """A minimal module: one optimizer and a validation."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return functional.mse_loss(self(inputs), targets)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class WithDropout(Regression):
    """Module that consumes random numbers in each step, including validation steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(2, nn.Dropout(0.3))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        noisy = inputs + 0.01 * torch.randn_like(inputs)
        self.log("val_loss", functional.mse_loss(self(noisy), targets))


class Adversaries(pl.LightningModule):
    """A GAN: two networks with two optimizers, which alternate with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def judged(self, inputs: Tensor, is_real: bool) -> Tensor:
        judgement = self.discriminator(inputs)
        return functional.binary_cross_entropy_with_logits(judgement, torch.full_like(judgement, float(is_real)))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        for_generator, for_discriminator = self.optimizers()
        noise = torch.randn(len(real), 2, device=self.device)

        self.toggle_optimizer(for_generator)
        deceit = self.judged(self.generator(noise), is_real=True)
        for_generator.zero_grad()
        self.manual_backward(deceit)
        for_generator.step()
        self.untoggle_optimizer(for_generator)

        self.toggle_optimizer(for_discriminator)
        real_loss = self.judged(real, is_real=True)
        loss = (real_loss + self.judged(self.generator(noise).detach(), is_real=False)) / 2
        for_discriminator.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(for_discriminator, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        for_discriminator.step()
        self.untoggle_optimizer(for_discriminator)
        self.log_dict({"g_loss": deceit, "d_loss": loss}, prog_bar=True)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=0.02, betas=(0.5, 0.999)),
            torch.optim.Adam(self.discriminator.parameters(), lr=0.02, betas=(0.5, 0.999)),
        ]


class TwoOptimizers(Regression):
    """One optimizer per layer, and for each optimizer a scheduler that the module steps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()
        loss = self.loss(batch)
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        first.step()
        if batch_idx % 2:
            second.step()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss}

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.net[0].parameters(), lr=0.1, momentum=0.9)
        second = torch.optim.Adam(self.net[2].parameters(), lr=0.05)
        return [first, second], [StepLR(first, 1, 0.5), ExponentialLR(second, 0.7)]


class SeveralSchedulers(Regression):
    """One scheduler steps in each step, one steps in each epoch, and one steps if the validation loss does not
    improve."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.5)
        return [optimizer], [
            {"scheduler": LambdaLR(optimizer, lambda step: 0.97**step), "interval": "step", "frequency": 3},
            {"scheduler": StepLR(optimizer, 1, 0.8), "interval": "epoch"},
            {"scheduler": plateau, "monitor": "val_loss"},
        ]


class ManyValLoaders(Regression):
    """Module that is validated on several loaders, and logs one common name and separate names."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss = self.loss(batch)
        self.log("val_loss", loss)
        self.log(f"own_{dataloader_idx}", 2 * loss, add_dataloader_idx=False, on_step=True, on_epoch=True)


class WithMetrics(Regression):
    """Module that logs torchmetrics objects per step and per epoch, and reduces others manually."""

    def __init__(self) -> None:
        super().__init__()
        self.train_error = torchmetrics.MeanAbsoluteError()
        self.val_scores = torchmetrics.MetricCollection([torchmetrics.MeanSquaredError(), torchmetrics.R2Score()])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        outputs = self(inputs)
        self.train_error(outputs, targets)
        self.log("train_error", self.train_error, on_step=True, on_epoch=True)
        loss = functional.mse_loss(outputs, targets)
        self.log("largest", loss.detach(), on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        self.val_scores.update(self(inputs), targets)

    def on_validation_epoch_end(self) -> None:
        self.log_dict({f"val/{name}": value for name, value in self.val_scores.compute().items()})
        self.val_scores.reset()


class WarmsUp(Regression):
    """``optimizer_step`` sets the learning rate of the first steps, as in Lightning's documentation."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 8:
            for group in optimizer.param_groups:
                group["lr"] = min(1.0, (self.trainer.global_step + 1) / 8) * 0.05

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05 / 8)


class StepsEverySecond(Regression):
    """Module that skips every second update, but calls the closure."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        else:
            optimizer_closure()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:  # the gradients of two batches are summed
            optimizer.zero_grad()


class Newton(Regression):
    """LBFGS calls ``training_step`` several times per step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4, history_size=5)


class OwnSchedulerStep(Regression):
    """A scheduler whose step receives the number of the epoch, and one that receives a metric."""

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if metric is None:
            scheduler.base_lrs = [0.9 * rate for rate in scheduler.base_lrs]
            scheduler.step()
        else:
            scheduler.step(float(metric) + self.current_epoch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        by_step = {"scheduler": LambdaLR(optimizer, lambda step: 1.0), "interval": "step"}
        return [optimizer], [by_step, {"scheduler": ReduceLROnPlateau(optimizer, patience=0), "monitor": "train_loss"}]


class WithDictOutputs(Regression):
    """Module that returns more values than the loss, and reads them in the hook after the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return {"loss": loss, "inputs": batch[0].detach(), "twice": 2 * loss.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("of_outputs", outputs["loss"] + outputs["twice"] + outputs["inputs"].mean())


class SometimesNone(Regression):
    """Module that skips batches by returning None."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 4 == 1 else super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"}]


class OwnClipping(Regression):
    """Module that clips with a custom method, and reads the gradients before clipping."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        squares = [parameter.grad.square().sum() for parameter in self.parameters() if parameter.grad is not None]
        self.log("norm", torch.stack(squares).sum().sqrt())

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if self.current_epoch:  # the first epoch is not clipped
            self.clip_gradients(
                optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm
            )
