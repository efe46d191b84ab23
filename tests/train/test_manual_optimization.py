"""Modules with manual optimization."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roomier


class Gan(roomier.Module):
    """Module with two optimizers that alternate. Each optimizer uses only the gradients of its parameters."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.generator = nn.Linear(3, 2)
        self.critic = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))

    def generator_loss(self, batch):
        return F.softplus(-self.critic(self.generator(batch["noise"]))).mean()

    def critic_loss(self, batch):
        fake = self.critic(self.generator(batch["noise"]).detach())
        return (F.softplus(fake) + F.softplus(-self.critic(batch["real"]))).mean()

    def training_step(self, batch, batch_idx):
        generator_optimizer, critic_optimizer = self.optimizers()
        self.toggle_optimizer(generator_optimizer)
        assert all(p.requires_grad for p in self.generator.parameters())
        assert not any(p.requires_grad for p in self.critic.parameters())
        loss = self.generator_loss(batch)
        self.log("generator_loss", loss)
        generator_optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(generator_optimizer, 0.05)
        generator_optimizer.step()
        self.untoggle_optimizer(generator_optimizer)

        with critic_optimizer.toggle_model():
            assert not any(p.requires_grad for p in self.generator.parameters())
            loss = self.critic_loss(batch)
            self.log("critic_loss", loss)
            critic_optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(critic_optimizer, 0.01, "value")
            critic_optimizer.step()
        assert all(p.requires_grad for p in self.parameters())

    def configure_optimizers(self):
        return (
            torch.optim.Adam(self.generator.parameters(), lr=0.01),
            torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9),
        )


def gan_batches(count):
    generator = torch.Generator().manual_seed(0)
    return [
        {"noise": torch.randn(5, 3, generator=generator), "real": torch.randn(5, 2, generator=generator) + 2}
        for _ in range(count)
    ]


def test_parity_of_a_gan_with_a_bare_loop(make_trainer, rows):
    torch.manual_seed(0)
    module = Gan()
    bare = copy.deepcopy(module)
    batches = gan_batches(50)
    generator_optimizer, critic_optimizer = bare.configure_optimizers()
    losses = []
    for batch in batches:
        loss = bare.generator_loss(batch)
        generator_optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(bare.generator.parameters(), 0.05)
        generator_optimizer.step()
        critic_loss = bare.critic_loss(batch)
        critic_optimizer.zero_grad()
        critic_loss.backward()
        nn.utils.clip_grad_value_(bare.critic.parameters(), 0.01)
        critic_optimizer.step()
        losses.append((float(loss.detach()), float(critic_loss.detach())))

    trainer = make_trainer(max_epochs=1, logger=rows, log_every_n_steps=1)
    trainer.fit(module, batches)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), bare.parameters(), strict=True))
    assert list(zip(rows.column("generator_loss"), rows.column("critic_loss"), strict=True)) == losses
    assert trainer.global_step == 100  # each step of each optimizer counts, as in Lightning


class Alone(roomier.Module):
    """One optimizer. The test provides the code of the step."""

    automatic_optimization = False

    def __init__(self, step):
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.__dict__["step"] = step

    def loss(self, batch):
        return self.net(batch).float().pow(2).mean()

    def training_step(self, batch, batch_idx):
        return self.step(self, batch, batch_idx)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def one_step(module, batch, batch_idx):
    optimizer = module.optimizers()
    optimizer.zero_grad()
    loss = module.loss(batch)
    module.manual_backward(loss)
    optimizer.step()
    return loss


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 3, generator=generator) for _ in range(4)]


def test_steps_count_and_end_the_run(make_trainer, data):
    trainer = make_trainer(max_steps=3)
    module = Alone(one_step)
    trainer.fit(module, data)
    assert trainer.global_step == 3
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.1  # schedulers also require manual steps


def test_manual_accumulation(make_trainer, data):
    def every_second(module, batch, batch_idx):
        module.manual_backward(module.loss(batch) / 2)
        if batch_idx % 2:
            optimizer = module.optimizers()
            optimizer.step()
            optimizer.zero_grad()
            module.lr_schedulers().step()

    module = Alone(every_second)
    bare = copy.deepcopy(module)
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
    for index in (0, 2):
        optimizer.zero_grad()
        ((bare.loss(data[index]) + bare.loss(data[index + 1])) / 2).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
    trainer = make_trainer(max_epochs=1)
    trainer.fit(module, data)
    torch.testing.assert_close(module.net.weight, bare.net.weight)
    assert trainer.global_step == 2
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.025)


def test_hooks_around_a_manual_step(make_trainer, data):
    seen = []

    class Watches(roomier.Callback):
        def on_before_backward(self, trainer, pl_module, loss):
            seen.append("before backward")

        def on_after_backward(self, trainer, pl_module):
            seen.append("after backward")

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            assert isinstance(optimizer, torch.optim.Optimizer)
            seen.append("before step")

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            assert outputs["loss"].shape == ()
            seen.append("batch end")

    make_trainer(max_steps=1, callbacks=[Watches()]).fit(Alone(one_step), data)
    assert seen == ["before backward", "after backward", "before step", "batch end"]


def test_closure_is_passed_to_the_optimizer(make_trainer, data):
    class Newton(Alone):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4)

    def step(module, batch, batch_idx):
        optimizer = module.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = module.loss(batch)
            module.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)

    module = Newton(step)
    bare = copy.deepcopy(module)
    optimizer = torch.optim.LBFGS(bare.parameters(), lr=0.5, max_iter=4)

    def bare_closure():
        optimizer.zero_grad()
        loss = bare.loss(data[0])
        loss.backward()
        return loss

    optimizer.step(bare_closure)
    trainer = make_trainer(max_steps=1)
    trainer.fit(module, data)
    assert torch.equal(module.net.weight, bare.net.weight)
    assert trainer.global_step == 1


def test_scaled_gradients_are_clipped_by_their_true_norm(make_trainer, data):
    """With 16-mixed, gradients are unscaled once before clipping, and are not unscaled again by the step."""

    def clipped(module, batch, batch_idx):
        optimizer = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(module.loss(batch) / 100)  # with the first loss scale, this loss does not overflow
        module.clip_gradients(optimizer, 1e-3)
        optimizer.step()

    module = Alone(clipped)
    before = module.net.weight.detach().clone(), module.net.bias.detach().clone()
    trainer = make_trainer(max_steps=1, precision="16-mixed")
    trainer.fit(module, data)
    moved = torch.cat([(module.net.weight - before[0]).flatten(), (module.net.bias - before[1]).flatten()])
    assert float(moved.detach().norm()) == pytest.approx(0.1 * 1e-3, rel=1e-2)


@pytest.mark.parametrize(
    ("keywords", "field"),
    [({"accumulate_grad_batches": 2}, "accumulate_grad_batches"), ({"gradient_clip_val": 1.0}, "gradient_clip_val")],
)
def test_options_of_automatic_optimization_are_rejected(make_trainer, data, keywords, field):
    with pytest.raises(roomier.RoomierError, match=f"{field}=.*manual optimization"):
        make_trainer(max_steps=1, **keywords).fit(Alone(one_step), data)


def test_several_optimizers_are_rejected_in_automatic_optimization(make_trainer, data):
    class Automatic(Gan):
        automatic_optimization = True

    with pytest.raises(roomier.RoomierError, match=r"2 optimizers.*automatic_optimization = False"):
        make_trainer(max_steps=1).fit(Automatic(), data)


def test_run_without_optimizer_steps_ends_by_epochs(make_trainer, data):
    trainer = make_trainer(max_epochs=2)
    trainer.fit(Alone(lambda m, batch, i: None), data)
    assert (trainer.global_step, trainer.current_epoch) == (0, 2)


def test_plain_optimizers_are_available(make_trainer, data):
    def step(module, batch, batch_idx):
        assert isinstance(module.optimizers(use_pl_optimizer=False), torch.optim.SGD)
        assert module.optimizers().param_groups is module.trainer.optimizers[0].param_groups
        return one_step(module, batch, batch_idx)

    make_trainer(max_steps=1).fit(Alone(step), data)
