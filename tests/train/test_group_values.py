"""Whose learning rate, weight decay and betas a resumed run has: the Plan's, or those the module was saved with."""

import pytest
import torch
from torch import nn

import roomier


class Net(roomier.Module):
    def __init__(self, configure=lambda net: None):
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.configure = configure
        self.rates = []

    def training_step(self, batch, batch_idx):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return self.configure(self)


@pytest.fixture
def data():
    return [torch.ones(1, 2)] * 4


@pytest.fixture
def resumed(make_trainer, data, tmp_path, capsys):
    """Two fits, the second going on from the first for as many epochs: ``(module, trainer, what was told)``."""

    def fit(first, second, configure=(lambda net: None, lambda net: None)):
        for name, keywords, own in (("one", first, configure[0]), ("two", second, configure[1])):
            module = Net(own)
            trainer = make_trainer(**{"max_epochs": 1 if name == "one" else 2, **keywords})
            capsys.readouterr()
            trainer.fit(module, data, ckpt_path=tmp_path / "one" if name == "two" else None)
            trainer.save_checkpoint(tmp_path / name)
        return module, trainer, capsys.readouterr().err

    return fit


def values(trainer, name):
    return [group[name] for group in trainer.optimizers[0].param_groups]


def adamw(**options):
    return {"optimizer": {"name": "adamw", **options}, "learning_rate": 0.1}


def test_what_the_plan_names_otherwise_is_used(resumed):
    first, second = adamw(weight_decay=0.1, betas=[0.9, 0.99]), adamw(weight_decay=0.2, betas=[0.8, 0.99])
    module, trainer, told = resumed(first, {**second, "learning_rate": 0.05})
    assert module.rates == [0.05] * 4
    assert values(trainer, "weight_decay") == [0.2, 0.0], "biases do not decay"
    assert [tuple(each) for each in values(trainer, "betas")] == [(0.8, 0.99)] * 2
    assert "optimizer.lr: 0.1 -> 0.05" in told
    assert "optimizer.weight_decay: 0.1 -> 0.2" in told
    assert "is used" not in told


def test_an_option_that_is_named_no_longer_is_that_of_torch_again(resumed):
    _, trainer, _ = resumed(adamw(eps=1e-3), adamw())
    assert values(trainer, "eps") == [1e-8] * 2


def test_a_schedule_goes_on_under_the_new_rate(resumed):
    scheduled = {"optimizer": "sgd", "lr_schedule": "linear", "max_epochs": 2, "learning_rate": 1.0}
    module, trainer, _ = resumed({**scheduled, "max_steps": 4, "max_epochs": 2}, {**scheduled, "learning_rate": 0.5})
    assert module.rates == pytest.approx([0.25, 0.1875, 0.125, 0.0625])
    assert values(trainer, "initial_lr") == trainer.lr_scheduler_configs[0].scheduler.base_lrs == [0.5, 0.5]


def test_what_was_set_by_hand_stays_where_the_plan_says_the_same(resumed, monkeypatch):
    def halve(self):
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] /= 2

    monkeypatch.setattr(Net, "on_train_epoch_end", halve, raising=False)
    module, _, _ = resumed(adamw(weight_decay=0.1), adamw(weight_decay=0.2))
    assert module.rates == [0.05] * 4


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"name": "adamw"}, {"name": "adamw", "amsgrad": True}),
        ({"name": "rmsprop"}, {"name": "rmsprop", "momentum": 0.9}),
        ({"name": "rmsprop"}, {"name": "rmsprop", "centered": True}),
    ],
    ids=str,
)
def test_an_option_that_needs_states_the_checkpoint_lacks_is_refused(resumed, first, second):
    with pytest.raises(roomier.CheckpointError, match="requires optimizer states that the checkpoint does not have"):
        resumed({"optimizer": first}, {"optimizer": second})


def test_sgd_takes_up_momentum(resumed):
    _, trainer, _ = resumed({"optimizer": "sgd"}, {"optimizer": {"name": "sgd", "momentum": 0.9}})
    assert values(trainer, "momentum") == [0.9, 0.9]


def test_another_kernel_is_taken(resumed):
    _, trainer, _ = resumed(adamw(), adamw(foreach=True))
    assert values(trainer, "foreach") == [True, True]
    assert not any(values(trainer, "fused"))


def test_a_module_s_own_values_are_those_of_the_checkpoint_and_a_difference_is_told(resumed):
    def configured(lr, betas):
        return lambda net: torch.optim.Adam(net.parameters(), lr=lr, betas=betas)

    module, _, told = resumed({}, {}, (configured(0.01, (0.9, 0.99)), configured(0.05, (0.8, 0.99))))
    assert module.rates == [0.01] * 4
    assert told.count("is used") == 2
    assert "lr: this run configured 0.05, the checkpoint's 0.01 is used" in told
    assert "betas: this run configured (0.8, 0.99), the checkpoint's (0.9, 0.99) is used" in told


@pytest.mark.parametrize("lr", [1.0, 0.5])
def test_what_a_scheduler_did_is_no_difference(resumed, lr):
    def configured(lr):
        def configure(net):
            optimizer = torch.optim.SGD(net.parameters(), lr=lr)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

        return configure

    module, _, told = resumed({}, {}, (configured(1.0), configured(lr)))
    assert module.rates == [0.5] * 4
    assert ("lr: this run configured 0.5, the checkpoint's 1.0 is used" in told) == (lr != 1.0)


def test_an_optimizer_that_was_the_module_s_cannot_become_the_plan_s(resumed):
    def of_two_groups(net):
        return torch.optim.SGD([{"params": [net.net.weight]}, {"params": [net.net.bias]}])

    with pytest.raises(roomier.CheckpointError, match="configured its optimizer itself"):
        resumed({}, {"optimizer": "sgd"}, (of_two_groups, lambda net: None))


@pytest.mark.parametrize(("before", "now"), [("adamw8bit", "adamw4bit"), ("adamw", "lion"), ("adamw4bit", "adamw")])
def test_another_optimizer_by_name_is_refused_under_the_names_of_both(resumed, before, now):
    """Also where states would fit: those in 8 bits would go on under a Plan that says 4."""
    with pytest.raises(
        roomier.CheckpointError, match=rf"optimizer='{now}': .* states of '{before}'.*weights="
    ) as caught:
        resumed({"optimizer": before, "learning_rate": 0.1}, {"optimizer": now, "learning_rate": 0.1})
    assert caught.value.field == "optimizer"
