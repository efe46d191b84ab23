"""Nested modules, and hooks that set evaluation and training mode."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import roomier


class Inner(roomier.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        out = self.layer(x)
        self.log("inner_mean", out.mean())
        return out


class Outer(roomier.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.frozen = nn.BatchNorm1d(2)
        self.frozen.eval()

    def training_step(self, batch, batch_idx):
        return self.inner(self.frozen(batch)).square().mean()

    def validation_step(self, batch, batch_idx):
        assert not self.training
        self.inner(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_nested_module_logs(make_trainer, rows):
    data = [torch.randn(4, 2) for _ in range(3)]
    trainer = make_trainer(max_epochs=1, log_every_n_steps=1, logger=rows, num_sanity_val_steps=0)
    trainer.fit(Outer(), data, data[:1])
    assert rows.steps("inner_mean") == [1, 2, 3, 3], "each step, and the validation"
    assert "inner_mean" in trainer.callback_metrics


class AsksAnother(Outer):
    def __init__(self, other):
        super().__init__()
        self.__dict__["other"] = other

    def on_train_epoch_end(self):
        self.other(self)


def test_module_is_rejected_by_a_second_trainer_during_a_run(make_trainer):
    """The second Trainer would remove the techniques and the logging of the first Trainer. A copy is accepted."""
    data = [torch.randn(4, 2) for _ in range(2)]
    module = AsksAnother(lambda module: make_trainer().validate(copy.deepcopy(module), data, verbose=False))
    trainer = make_trainer(max_epochs=1)
    trainer.fit(module, data)
    assert trainer.global_step == 2
    module.__dict__["other"] = lambda module: make_trainer().validate(module, data, verbose=False)
    with pytest.raises(roomier.RoomierError, match=r"another Trainer is running this module.*copy\.deepcopy\(model\)"):
        trainer.fit(module, data)
    make_trainer().validate(module, data, verbose=False)


class Blocks(Outer):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2)))

    def teardown(self, stage):
        raise OSError("teardown")


def test_fit_that_fails_to_start_restores_the_model(make_trainer, tmp_path):
    module, trainer = Blocks(), make_trainer(activation_checkpointing="full", max_epochs=1)
    module.teardown = lambda stage: None
    with pytest.raises(roomier.RoomierError, match="ckpt_path="):
        trainer.fit(module, [torch.randn(4, 2)], ckpt_path=tmp_path / "none")
    assert all("forward" not in vars(block) for block in module.inner)


def test_trainer_is_not_running_after_a_failed_teardown(make_trainer):
    trainer = make_trainer(max_epochs=1)
    with pytest.raises(OSError, match="teardown"):
        trainer.fit(Blocks(), [torch.randn(4, 2)])
    assert trainer.state.status.stopped
    trainer.fit(Outer(), [torch.randn(4, 2)])
    assert trainer.state.finished


def test_validation_restores_the_mode_of_each_submodule(make_trainer):
    module = Outer()
    data = [torch.randn(4, 2) for _ in range(3)]
    make_trainer(max_epochs=1).fit(module, data, data[:1])
    assert module.training
    assert not module.frozen.training, "it was frozen before"


def test_mode_hooks_replace_the_default(make_trainer):
    calls = []

    class Modes(Outer):
        def on_validation_model_eval(self):
            calls.append("eval")
            super().on_validation_model_eval()

        def on_validation_model_train(self):
            calls.append("train")
            self.train()

    module = Modes()
    data = [torch.randn(4, 2) for _ in range(2)]
    make_trainer(max_epochs=1, num_sanity_val_steps=0).fit(module, data, data[:1])
    assert calls == ["eval", "train"]
    assert module.frozen.training, "train() in the hook takes effect"


def test_optimizer_states_of_an_earlier_fit_are_freed(make_trainer):
    """The memory is freed without garbage collection, which would be too late on a full device."""
    module, data = Outer(), [torch.randn(4, 2) for _ in range(2)]
    trainer = make_trainer(max_epochs=1)
    gc.collect()
    gc.disable()
    try:
        trainer.fit(module, data)
        trainer.fit(module, data)
        earlier = weakref.ref(trainer.fitted)
        trainer.fit(module, data)
        assert earlier() is None
    finally:
        gc.enable()
