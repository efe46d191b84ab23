"""Overridden methods of automatic optimization take effect."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import roomier


class Regression(roomier.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 4, generator=generator) for _ in range(4)]


def same_weights(module, other):
    return all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))


def test_backward_receives_the_weighted_loss(make_trainer, data):
    losses = []

    class Doubles(Regression):
        def backward(self, loss, *args, **kwargs):
            losses.append(float(loss.detach()))
            (2 * loss).backward()

    module = Doubles()
    by_hand = copy.deepcopy(module)
    (2 * (by_hand.training_step(data[0], 0) + by_hand.training_step(data[1], 1)) / 2).backward()
    expected = [p.detach() - 0.1 * p.grad for p in by_hand.parameters()]
    make_trainer(max_steps=1, accumulate_grad_batches=2).fit(module, data[:2])
    torch.testing.assert_close([p.detach() for p in module.parameters()], expected)
    assert len(losses) == 2


def test_zero_grad_follows_the_first_forward_with_the_batch_index(make_trainer, data):
    calls = []

    class Watches(Regression):
        def training_step(self, batch, batch_idx):
            calls.append(("forward", batch_idx, self.net.weight.grad is None))
            return super().training_step(batch, batch_idx)

        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            calls.append(("zero", epoch, batch_idx))
            optimizer.zero_grad(set_to_none=True)

    module, plain = Watches(), Regression()
    plain.load_state_dict(module.state_dict())
    make_trainer(max_epochs=1, accumulate_grad_batches=2).fit(module, data)
    assert calls == [
        ("forward", 0, True),
        ("zero", 0, 0),
        ("forward", 1, False),
        ("forward", 2, False),  # the gradients of the previous step still exist
        ("zero", 0, 2),
        ("forward", 3, False),
    ]
    make_trainer(max_epochs=1, accumulate_grad_batches=2).fit(plain, data)
    assert same_weights(module, plain)


def test_configure_gradient_clipping(make_trainer, data):
    received = []

    class Clips(Regression):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            received.append((gradient_clip_val, gradient_clip_algorithm))
            self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")

        def on_before_optimizer_step(self, optimizer):
            assert self.net.weight.grad.abs().max() > 0.01  # before clipping

    module = Clips()
    before = module.net.weight.detach().clone()
    make_trainer(max_steps=1, gradient_clip_val=0.5).fit(module, data)
    assert received == [(0.5, "norm")]
    assert (module.net.weight - before).detach().abs().max() <= 0.1 * 0.01 * 1.001


def test_optimizer_step_may_skip_the_update(make_trainer, data):
    losses = []

    class EverySecond(Regression):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            losses.append(float(optimizer_closure()))
            if batch_idx % 2:
                optimizer.step()

    module, plain = EverySecond(), Regression()
    plain.load_state_dict(module.state_dict())
    trainer = make_trainer(max_epochs=1)
    trainer.fit(module, data)
    optimizer = plain.configure_optimizers()
    expected = []
    for index, batch in enumerate(data):
        optimizer.zero_grad()
        loss = plain.training_step(batch, index)
        loss.backward()
        expected.append(float(loss.detach()))
        if index % 2:
            optimizer.step()
    assert same_weights(module, plain)
    assert losses == expected
    assert trainer.global_step == 4


def test_optimizer_step_with_its_closure_is_the_default(make_trainer, data):
    class Same(Regression):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            assert optimizer.param_groups[0]["lr"] == 0.1
            optimizer.step(closure=optimizer_closure)

    module, plain = Same(), Regression()
    plain.load_state_dict(module.state_dict())
    make_trainer(max_epochs=2).fit(module, data)
    make_trainer(max_epochs=2).fit(plain, data)
    assert same_weights(module, plain)


def test_optimizer_step_may_warm_up_the_learning_rate(make_trainer, data):
    """The example from Lightning's documentation."""
    rates = []

    class WarmsUp(Regression):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * (self.trainer.global_step + 1) / 4
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            rates.append(optimizer.param_groups[0]["lr"])

    make_trainer(max_epochs=1).fit(WarmsUp(), data)
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1])


def test_lr_scheduler_step(make_trainer, data):
    received = []

    class Schedules(Regression):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def lr_scheduler_step(self, scheduler, metric):
            received.append((type(scheduler).__name__, metric))
            scheduler.step()
            scheduler.step()

    trainer = make_trainer(max_steps=2)
    trainer.fit(Schedules(), data)
    assert received == [("ExponentialLR", None)] * 2
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**4)


@dataclass
class Points:
    """A batch of a custom type."""

    x: torch.Tensor
    scale: float = 1.0


def test_transfer_hooks(make_trainer, data):
    places = []

    class Moves(Regression):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            assert isinstance(batch, torch.Tensor)
            return Points(batch, scale=2.0)

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            places.append((str(device), dataloader_idx))
            return Points(batch.x.to(device), batch.scale)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch.x * batch.scale

        def training_step(self, batch, batch_idx):
            assert torch.equal(batch, data[batch_idx] * 2)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            assert torch.equal(batch, data[batch_idx] * 2)

    make_trainer(max_epochs=1, limit_val_batches=1, num_sanity_val_steps=0).fit(
        Moves(), data, [torch.utils.data.DataLoader(torch.cat(data), 3)] * 2
    )
    assert places == [("cpu", 0)] * 4 + [("cpu", 0), ("cpu", 1)]


def test_on_train_batch_start_skips_the_rest_of_the_epoch(make_trainer, data):
    seen = []

    class Leaves(Regression):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 else None

        def training_step(self, batch, batch_idx):
            seen.append((self.current_epoch, batch_idx))
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append("end")

        def on_train_epoch_end(self):
            seen.append("epoch end")

    trainer = make_trainer(max_epochs=2)
    trainer.fit(Leaves(), data)
    assert seen == [(0, 0), "end", (0, 1), "end", "epoch end", (1, 0), "end", (1, 1), "end", "epoch end"]
    assert trainer.global_step == 4
    assert trainer.current_epoch == 2


def test_epoch_skipped_within_a_window_has_no_partial_step(make_trainer, data):
    """As in Lightning, gradients of micro-batches without a step are discarded."""

    class Leaves(Regression):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 3 else None

    module, plain = Leaves(), Regression()
    plain.load_state_dict(module.state_dict())
    trainer = make_trainer(max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(module, data)
    make_trainer(max_epochs=1, accumulate_grad_batches=2).fit(plain, data[:2])
    assert trainer.global_step == 1
    assert same_weights(module, plain)


def test_callback_may_skip_the_epoch(make_trainer, data):
    class Leaves(roomier.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            return -1 if batch_idx == 1 else None

    trainer = make_trainer(max_epochs=3, callbacks=[Leaves()])
    trainer.fit(Regression(), data)
    assert trainer.global_step == 3


def test_training_step_may_skip_a_batch(make_trainer, data):
    class Skips(Regression):
        def training_step(self, batch, batch_idx):
            return None if batch_idx in (0, 2) else super().training_step(batch, batch_idx)

    module, plain = Skips(), Regression()
    plain.load_state_dict(module.state_dict())
    trainer = make_trainer(max_epochs=1)
    trainer.fit(module, data)
    make_trainer(max_epochs=1).fit(plain, [data[1], data[3]])
    assert trainer.global_step == 2
    assert same_weights(module, plain)


@pytest.mark.parametrize("form", ["tensor", "dict", "one argument", "any arguments"])
def test_forms_of_training_step(make_trainer, data, form):
    class Tensor(Regression):
        pass

    class Dict(Regression):
        def training_step(self, batch, batch_idx):
            return {"loss": super().training_step(batch, batch_idx), "extra": 1}

    class OneArgument(Regression):
        def training_step(self, batch):
            return super().training_step(batch, 0)

    class AnyArguments(Regression):
        def training_step(self, *args):
            batch, batch_idx = args
            return super().training_step(batch, batch_idx)

    module = {"tensor": Tensor, "dict": Dict, "one argument": OneArgument, "any arguments": AnyArguments}[form]()
    plain = Regression()
    plain.load_state_dict(module.state_dict())
    make_trainer(max_epochs=1).fit(module, data)
    make_trainer(max_epochs=1).fit(plain, data)
    assert same_weights(module, plain)


def test_end_of_a_batch_receives_the_output_of_the_step(make_trainer, data):
    outputs_seen = []

    class Returns(Regression):
        def training_step(self, batch, batch_idx):
            return {"loss": super().training_step(batch, batch_idx), "index": batch_idx}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            assert batch is data[batch_idx]
            outputs_seen.append(outputs["index"])

    make_trainer(max_epochs=1, accumulate_grad_batches=2).fit(Returns(), data)
    assert outputs_seen == [0, 1, 2, 3]


def test_callbacks_of_the_module_replace_callbacks_of_the_same_type(make_trainer, data):
    class Counts(roomier.Callback):
        def __init__(self):
            self.num_batches = 0

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.num_batches += 1

    own, given = Counts(), Counts()

    class Brings(Regression):
        def configure_callbacks(self):
            return [own]

    make_trainer(max_epochs=1, callbacks=[given]).fit(Brings(), data)
    assert (own.num_batches, given.num_batches) == (4, 0)
