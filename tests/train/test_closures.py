"""Closures: an overridden ``optimizer_step``, and optimizers that require a closure, such as LBFGS."""

import copy

import pytest
import torch
from torch import nn

import roomier


class Regression(roomier.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return (self.net(batch) - 1).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)


class Passes(Regression):
    """Module that overrides ``optimizer_step`` with the default behavior."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class Newton(Regression):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4)


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 4, generator=generator) for _ in range(5)]


def same_weights(module, other):
    return all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    "keywords",
    [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}],
    ids=["alone", "accumulated", "clipped"],
)
def test_step_with_a_closure_equals_a_step_without(make_trainer, data, keywords):
    module, plain = Passes(), Regression()
    plain.load_state_dict(module.state_dict())
    for each in (module, plain):
        make_trainer(max_epochs=2, **keywords).fit(each, data)
    assert same_weights(module, plain)


def test_closure_returns_the_loss_and_the_step_receives_the_last_index(make_trainer, data):
    calls = []

    class Looks(Regression):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            calls.append((epoch, batch_idx, float(optimizer_closure())))
            optimizer.step()

    module = Looks()
    expected = [float(module.training_step(batch, 0).detach()) / 2 for batch in data[:2]]
    trainer = make_trainer(max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(module, data[:2])
    assert calls == [(0, 1, pytest.approx(expected[1]))]  # the loss is the share of the micro-batch, as in Lightning
    assert trainer.global_step == 1


def test_closure_that_is_not_called_raises(make_trainer, data):
    class Forgets(Regression):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            pass

    with pytest.raises(roomier.TrainingError, match=r"optimizer_step=.*Forgets.*optimizer_closure"):
        make_trainer(max_epochs=1).fit(Forgets(), data)


def test_lbfgs_equals_a_bare_loop(make_trainer, data):
    module = Newton()
    bare = copy.deepcopy(module)
    optimizer = bare.configure_optimizers()
    for index, batch in enumerate(data):

        def closure(index=index, batch=batch):
            optimizer.zero_grad()
            loss = bare.training_step(batch, index)
            loss.backward()
            return loss

        optimizer.step(closure)
    trainer = make_trainer(max_epochs=1)
    trainer.fit(module, data)
    assert same_weights(module, bare)
    assert trainer.global_step == len(data)


def test_lbfgs_resumes_bit_for_bit(make_trainer, data, tmp_path):
    whole, part = Newton(), Newton()
    part.load_state_dict(whole.state_dict())
    again = copy.deepcopy(part)
    make_trainer(max_steps=8).fit(whole, data)
    first = make_trainer(max_steps=4)
    first.fit(part, data)
    first.save_checkpoint(tmp_path / "four")
    make_trainer(max_steps=8).fit(again, data, ckpt_path=tmp_path / "four")
    assert same_weights(whole, again)


@pytest.mark.parametrize(
    ("keywords", "field"),
    [({"accumulate_grad_batches": 2}, "accumulate_grad_batches"), ({"precision": "16-mixed"}, "precision")],
)
def test_lbfgs_is_rejected_with_partial_losses(make_trainer, data, keywords, field):
    with pytest.raises(roomier.RoomierError, match=rf"{field}=.*LBFGS, which evaluates the loss several times"):
        make_trainer(max_epochs=1, **keywords).fit(Newton(), data)


def test_hook_may_skip_a_step(make_trainer, data):
    class Stops(Passes):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 3 else None

    trainer = make_trainer(max_epochs=1)
    trainer.fit(Stops(), data)
    assert trainer.global_step == 3


def test_none_is_skipped_in_a_window(make_trainer, data):
    class LeavesOut(Passes):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    module, plain = LeavesOut(), Regression()
    plain.load_state_dict(module.state_dict())
    make_trainer(max_epochs=1, accumulate_grad_batches=2).fit(module, data[:2])
    make_trainer(max_epochs=1).fit(plain, data[:1])
    torch.testing.assert_close(module.net.weight, plain.net.weight)
