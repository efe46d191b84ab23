"""Learning rate, weight decay and betas after a resume: the values of the Plan, or the saved values."""

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
    """Return ``(module, trainer, notices)`` after two fits. The second fit resumes the first fit, for the same number
    of epochs."""

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


def test_changed_values_of_the_plan_are_used(resumed):
    first, second = adamw(weight_decay=0.1, betas=[0.9, 0.99]), adamw(weight_decay=0.2, betas=[0.8, 0.99])
    module, trainer, output = resumed(first, {**second, "learning_rate": 0.05})
    assert module.rates == [0.05] * 4
    assert values(trainer, "weight_decay") == [0.2, 0.0], "biases do not decay"
    assert [tuple(each) for each in values(trainer, "betas")] == [(0.8, 0.99)] * 2
    assert "optimizer.lr: 0.1 -> 0.05" in output
    assert "optimizer.weight_decay: 0.1 -> 0.2" in output
    assert "is used" not in output


def test_removed_option_returns_to_the_default_of_torch(resumed):
    _, trainer, _ = resumed(adamw(eps=1e-3), adamw())
    assert values(trainer, "eps") == [1e-8] * 2


def test_schedule_continues_with_the_new_rate(resumed):
    scheduled = {"optimizer": "sgd", "lr_schedule": "linear", "max_epochs": 2, "learning_rate": 1.0}
    module, trainer, _ = resumed({**scheduled, "max_steps": 4, "max_epochs": 2}, {**scheduled, "learning_rate": 0.5})
    assert module.rates == pytest.approx([0.25, 0.1875, 0.125, 0.0625])
    assert values(trainer, "initial_lr") == trainer.lr_scheduler_configs[0].scheduler.base_lrs == [0.5, 0.5]


def test_manual_changes_stay_if_the_plan_is_unchanged(resumed, monkeypatch):
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
def test_option_that_requires_missing_states_is_rejected(resumed, first, second):
    with pytest.raises(roomier.CheckpointError, match="requires optimizer states that the checkpoint does not have"):
        resumed({"optimizer": first}, {"optimizer": second})


def test_sgd_can_add_momentum(resumed):
    _, trainer, _ = resumed({"optimizer": "sgd"}, {"optimizer": {"name": "sgd", "momentum": 0.9}})
    assert values(trainer, "momentum") == [0.9, 0.9]


def test_kernel_can_change(resumed):
    _, trainer, _ = resumed(adamw(), adamw(foreach=True))
    assert values(trainer, "foreach") == [True, True]
    assert not any(values(trainer, "fused"))


def test_values_of_a_module_are_restored_with_a_notice(resumed):
    def configured(lr, betas):
        return lambda net: torch.optim.Adam(net.parameters(), lr=lr, betas=betas)

    module, _, output = resumed({}, {}, (configured(0.01, (0.9, 0.99)), configured(0.05, (0.8, 0.99))))
    assert module.rates == [0.01] * 4
    assert output.count("is used") == 2
    assert "lr: this run configured 0.05, but the saved value 0.01 is used" in output
    assert "betas: this run configured (0.8, 0.99), but the saved value (0.9, 0.99) is used" in output


@pytest.mark.parametrize("lr", [1.0, 0.5])
def test_changes_by_a_scheduler_are_not_reported(resumed, lr):
    def configured(lr):
        def configure(net):
            optimizer = torch.optim.SGD(net.parameters(), lr=lr)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

        return configure

    module, _, output = resumed({}, {}, (configured(1.0), configured(lr)))
    assert module.rates == [0.5] * 4
    assert ("lr: this run configured 0.5, but the saved value 1.0 is used" in output) == (lr != 1.0)


def test_optimizer_of_the_module_cannot_become_an_optimizer_of_the_plan(resumed):
    def of_two_groups(net):
        return torch.optim.SGD([{"params": [net.net.weight]}, {"params": [net.net.bias]}])

    with pytest.raises(roomier.CheckpointError, match="configured its optimizer itself"):
        resumed({}, {"optimizer": "sgd"}, (of_two_groups, lambda net: None))


@pytest.mark.parametrize(("before", "now"), [("adamw8bit", "adamw4bit"), ("adamw", "lion"), ("adamw4bit", "adamw")])
def test_different_named_optimizer_is_rejected(resumed, before, now):
    """States in 8 bits must not resume with a Plan that requests 4 bits, even if their shapes match."""
    with pytest.raises(
        roomier.CheckpointError, match=rf"optimizer='{now}': .* states of '{before}'.*weights="
    ) as caught:
        resumed({"optimizer": before, "learning_rate": 0.1}, {"optimizer": now, "learning_rate": 0.1})
    assert caught.value.field == "optimizer"
