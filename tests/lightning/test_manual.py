"""Manual optimization has the same steps, hooks, learning rates and weights with roomier's Trainer and with
Lightning's."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import roomier
from tests.lightning.both import make_trainer, quiet_lightning
from tests.lightning.modules import pl


class Noted(pl.LightningModule):
    """Module that records its hooks in ``order``, and values of its steps in ``seen``."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seen: list[Any] = []
        self.order: list[Any] = []

    def on_before_zero_grad(self, optimizer):
        self.order.append("zero grad")

    def on_before_backward(self, loss):
        self.order.append("before backward")

    def on_after_backward(self):
        self.order.append("after backward")

    def on_before_optimizer_step(self, optimizer):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        self.order.append((type(optimizer).__name__, [None if g is None else float(g.norm()) for g in gradients]))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.order.append(("batch end", sorted(outputs)))


class Gan(Noted):
    """Two optimizers, which are toggled in each of the three forms, with clipping. One of two schedulers steps only
    at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(3, 3), nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        of_generator, of_critic = self.optimizers()
        of_steps, of_epochs = self.lr_schedulers()
        self.toggle_optimizer(of_generator)
        assert not self.critic.weight.requires_grad
        generator_loss = (self.critic(self.generator(x)) - y).square().mean()
        of_generator.zero_grad()
        self.manual_backward(generator_loss)
        self.clip_gradients(of_generator, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
        of_generator.step()
        self.untoggle_optimizer(of_generator)

        def closure():
            of_critic.zero_grad()
            loss = (self.critic(self.generator(x).detach()) + y).square().mean()
            self.manual_backward(loss)
            return loss

        with self.toggled_optimizer(of_critic):
            assert not self.generator.weight.requires_grad
            critic_loss = of_critic.step(closure)
        with of_generator.toggle_model(sync_grad=batch_idx % 2 == 0):
            self.manual_backward(self.generator(x).square().mean())
        assert all(each.requires_grad for each in self.parameters())
        of_steps.step()
        if self.trainer.is_last_batch:
            of_epochs.step()
        self.log_dict({"generator": generator_loss, "critic": critic_loss}, prog_bar=True)
        rates = [each.param_groups[0]["lr"] for each in (of_generator, of_critic)]
        self.seen.append((float(generator_loss), float(critic_loss), rates, self.global_step, self.trainer.global_step))

    def configure_optimizers(self):
        of_generator = torch.optim.Adam(self.generator.parameters(), lr=0.01)
        of_critic = torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)
        of_epochs = {"scheduler": torch.optim.lr_scheduler.ExponentialLR(of_critic, 0.5), "name": "epochs"}
        return [of_generator, of_critic], [torch.optim.lr_scheduler.StepLR(of_generator, 1, 0.9), of_epochs]


class Newton(Noted):
    """LBFGS computes the loss three times per step. The step returns the loss and other values."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = (self.net(x) - y).square().mean()
            self.manual_backward(loss)
            return loss

        loss = optimizer.step(closure=closure)
        self.seen.append((float(loss), self.global_step))
        return {"loss": loss, "more": batch_idx}

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.net.parameters(), lr=0.1, max_iter=3)


class Accumulates(Noted):
    """Module that steps every second batch, and returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        loss = (self.net(x) - y).square().mean()
        self.manual_backward(loss / 2)
        if (batch_idx + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        self.seen.append((float(loss), self.global_step))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=0.1)


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(4)]


def run_under(kind: Any, make_module: Any, folder: Path, **keywords: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = make_module()
    with quiet_lightning():
        trainer = make_trainer(kind, folder, **{"max_epochs": 2, **keywords})
        trainer.fit(module, DataLoader(batches(), None))
    return module, trainer


@pytest.mark.parametrize("kind", [Gan, Newton, Accumulates])
def test_runs_of_both_are_equal(tmp_path, kind):
    here, trainer = run_under(roomier.Trainer, kind, tmp_path)
    there, expected = run_under(pl.Trainer, kind, tmp_path)
    assert here.order == there.order
    assert here.seen == there.seen
    assert trainer.global_step == expected.global_step
    assert {k: float(v) for k, v in trainer.callback_metrics.items()} == {
        k: float(v) for k, v in expected.callback_metrics.items()
    }
    for own, other in zip(here.parameters(), there.parameters(), strict=True):
        assert torch.equal(own, other)


def test_max_steps_counts_the_steps_of_all_optimizers(tmp_path):
    assert [run_under(kind, Gan, tmp_path, max_steps=6)[1].global_step for kind in (roomier.Trainer, pl.Trainer)] == [
        6,
        6,
    ]


class Asks(Noted):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        if batch_idx == 0:
            self.ask(optimizer)
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def ask(self, optimizer):
        assert isinstance(optimizer, torch.optim.Adam)
        plain = self.optimizers(use_pl_optimizer=False)
        assert optimizer.optimizer is plain
        assert type(plain) is torch.optim.Adam
        assert optimizer.state_dict() == plain.state_dict()
        assert optimizer.defaults["lr"] == 0.1
        optimizer.param_groups[0]["lr"] = 0.05
        assert plain.param_groups[0]["lr"] == 0.05
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.param_groups is plain.param_groups
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for each in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
            assert type(each) is torch.optim.Adam

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=0.1)


def test_attributes_of_the_optimizer(tmp_path):
    module, trainer = run_under(roomier.Trainer, Asks, tmp_path)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.05
    assert len(trainer.optimizers[0].state) == 2
    assert module.global_step == 8


def test_manual_backward_is_rejected_in_automatic_optimization(tmp_path):
    class Mixed(Asks):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = True

    with pytest.raises(roomier.RoomierError, match=r"manual_backward='Mixed'.*automatic_optimization = False"):
        run_under(roomier.Trainer, Mixed, tmp_path)
