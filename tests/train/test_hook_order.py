"""Hooks run in the order that Lightning documents, and hooks that are not overridden are never called."""

import pytest
import torch
from torch import nn

import roomier
from roomier.api.hooks import CALLBACK_HOOKS, SHARED_HOOKS, HookTable

CALLBACK_NAMES = ("setup", "teardown", "on_exception", *SHARED_HOOKS, *CALLBACK_HOOKS)
MODULE_NAMES = (
    "configure_callbacks",
    "prepare_data",
    "setup",
    "teardown",
    "configure_model",
    "configure_optimizers",
    "training_step",
    "validation_step",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "optimizer_zero_grad",
    "backward",
    "configure_gradient_clipping",
    "optimizer_step",
    "lr_scheduler_step",
    "on_validation_model_zero_grad",
    *SHARED_HOOKS,
)


class Quiet(roomier.Module):
    """Module that overrides no hook."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).mean()

    def validation_step(self, batch, batch_idx):
        self.log("v", self.net(batch).mean())

    def test_step(self, batch, batch_idx):
        self.log("t", self.net(batch).mean())

    def predict_step(self, batch, batch_idx):
        return self.net(batch)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def recording(base, names, mark, seen):
    """Return a subclass of ``base`` that records calls of ``names`` as ``mark.name`` and then calls ``base``."""

    def noting(name):
        inherited = getattr(base, name)

        def hook(self, *args, **kwargs):
            seen.append(f"{mark}.{name}")
            return inherited(self, *args, **kwargs)

        return hook

    return type(f"Recording{base.__name__}", (base,), {name: noting(name) for name in names})


@pytest.fixture
def seen():
    return []


@pytest.fixture
def recorder(seen):
    """A module and a callback that record every hook."""
    return recording(Quiet, MODULE_NAMES, "M", seen)(), recording(roomier.Callback, CALLBACK_NAMES, "C", seen)()


def both(*names):
    return [f"{mark}.{name}" for name in names for mark in ("C", "M")]


TRANSFER = ["M.on_before_batch_transfer", "M.transfer_batch_to_device", "M.on_after_batch_transfer"]
BACKWARD = [*both("on_before_backward"), "M.backward", *both("on_after_backward")]
ZERO_GRAD = [*both("on_before_zero_grad"), "M.optimizer_zero_grad"]
NUM_PARAMETERS = 2
BEFORE_UPDATE = [
    *both("on_gradient") * NUM_PARAMETERS,
    *both("on_before_optimizer_step"),
    "M.configure_gradient_clipping",
]


def evaluation(stage, step, num_batches=1):
    batch = [*TRANSFER, *both(f"on_{stage}_batch_start"), *step, *both(f"on_{stage}_batch_end")]
    return [
        *both(f"on_{stage}_start", f"on_{stage}_epoch_start"),
        *batch * num_batches,
        *both(f"on_{stage}_epoch_end", f"on_{stage}_end"),
    ]


def micro_batch(first, last, scheduler=()):
    """With ``optimizer_step``, a closure runs the last micro-batch of its window."""
    return [
        *TRANSFER,
        *both("on_train_batch_start"),
        *(["M.optimizer_step"] if last else []),
        "M.training_step",
        *(ZERO_GRAD if first else []),
        *BACKWARD,
        *(BEFORE_UPDATE if last else []),
        *scheduler,
        *both("on_train_batch_end"),
    ]


SETUP = ["M.configure_callbacks", "M.prepare_data", "C.setup", "M.setup", "M.configure_model"]
TEARDOWN = ["C.teardown", "M.teardown"]
VALIDATION = evaluation("validation", ["M.validation_step"])


def test_order_of_one_epoch(make_trainer, recorder, seen):
    """The fit has three micro-batches in windows of two, and one validation batch. Lightning has no
    ``on_save_point`` and no ``on_gradient``."""
    module, callback = recorder
    trainer = make_trainer(max_epochs=1, accumulate_grad_batches=2, callbacks=[callback], num_sanity_val_steps=1)
    trainer.fit(module, [torch.randn(2, 4)] * 3, [torch.randn(2, 4)])
    assert seen == [
        *SETUP,
        "M.configure_optimizers",
        *both("on_fit_start"),
        "C.on_sanity_check_start",
        *VALIDATION,
        "C.on_sanity_check_end",
        *both("on_train_start", "on_train_epoch_start"),
        *micro_batch(first=True, last=False),
        *micro_batch(first=False, last=True),
        "C.on_save_point",
        *micro_batch(first=True, last=True, scheduler=["M.lr_scheduler_step"]),
        "M.on_validation_model_zero_grad",
        *VALIDATION,
        *both("on_train_epoch_end"),
        "C.on_save_point",
        *both("on_train_end", "on_fit_end"),
        *TEARDOWN,
    ]


@pytest.mark.parametrize(("verb", "stage"), [("validate", "validation"), ("test", "test"), ("predict", "predict")])
def test_order_of_an_evaluation(make_trainer, recorder, seen, verb, stage):
    module, callback = recorder
    getattr(make_trainer(callbacks=[callback]), verb)(module, [torch.randn(2, 4)] * 2)
    step = ["M.validation_step"] if stage == "validation" else []
    assert seen == [*SETUP, *evaluation(stage, step, num_batches=2), *TEARDOWN]


def test_step_scheduler_precedes_the_end_of_the_batch(make_trainer, seen):
    class EachStep(Quiet):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    names = ("lr_scheduler_step", "on_train_batch_end", "on_train_epoch_end")
    module = recording(EachStep, names, "M", seen)()
    make_trainer(max_epochs=1, accumulate_grad_batches=2).fit(module, [torch.randn(2, 4)] * 4)
    step = ["M.on_train_batch_end", "M.lr_scheduler_step", "M.on_train_batch_end"]
    assert seen == [*step, *step, "M.on_train_epoch_end"]


def test_hook_that_is_not_overridden_is_not_in_the_table(make_trainer):
    module = Quiet()
    table = HookTable(make_trainer(), module, [roomier.Callback()])
    assert all(getattr(table, name) == () for name in (*SHARED_HOOKS, *CALLBACK_HOOKS))


def test_hook_of_an_instance_counts(make_trainer):
    module, calls = Quiet(), []
    module.on_train_start = lambda: calls.append("start")
    make_trainer(max_steps=1).fit(module, [torch.randn(2, 4)])
    assert calls == ["start"]


def test_step_calls_no_hook_that_is_not_overridden(make_trainer, monkeypatch):
    """The empty methods of the base class are not called."""

    def never(self, *args, **kwargs):
        raise AssertionError("an idle hook was called")

    for name in SHARED_HOOKS:
        monkeypatch.setattr(roomier.Module, name, never)
        monkeypatch.setattr(roomier.Callback, name, never)
    for name in CALLBACK_HOOKS:
        monkeypatch.setattr(roomier.Callback, name, never)
    for name in ("optimizer_step", "backward", "optimizer_zero_grad", "configure_gradient_clipping"):
        monkeypatch.setattr(roomier.Module, name, never)
    trainer = make_trainer(max_steps=3, gradient_clip_val=1.0, callbacks=[roomier.Callback()])
    trainer.fit(Quiet(), [torch.randn(2, 4)] * 3, [torch.randn(2, 4)])
    assert trainer.global_step == 3


def test_teardown_and_on_exception_after_a_failed_step(make_trainer, recorder, seen):
    module, callback = recorder

    def fails(batch, batch_idx):
        raise KeyError("broken")

    module.training_step = fails
    with pytest.raises(KeyError, match="broken"):
        make_trainer(max_steps=1, callbacks=[callback]).fit(module, [torch.randn(2, 4)])
    assert seen[-3:] == ["C.on_exception", *TEARDOWN]
    assert "C.on_train_end" not in seen


def test_teardown_and_on_exception_after_a_failed_setup(make_trainer, recorder, seen):
    module, callback = recorder

    def fails():
        raise KeyError("broken")

    module.configure_optimizers = fails
    with pytest.raises(KeyError, match="broken"):
        make_trainer(max_steps=1, callbacks=[callback]).fit(module, [torch.randn(2, 4)])
    assert seen == [*SETUP, "C.on_exception", *TEARDOWN]


def test_on_exception_receives_the_exception(make_trainer):
    class Keeps(roomier.Callback):
        def on_exception(self, trainer, pl_module, exception):
            self.exception = exception

    class Fails(Quiet):
        def validation_step(self, batch, batch_idx):
            raise OSError("gone")

    callback = Keeps()
    with pytest.raises(OSError, match="gone") as caught:
        make_trainer(callbacks=[callback]).validate(Fails(), [torch.randn(2, 4)])
    assert callback.exception is caught.value


def test_stage_flags(make_trainer):
    flags = {}

    class Looks(roomier.Callback):
        def note(self, trainer, name):
            flags[name] = [
                flag
                for flag in ("training", "validating", "testing", "predicting", "sanity_checking")
                if getattr(trainer, flag)
            ]

        def on_sanity_check_start(self, trainer, pl_module):
            self.note(trainer, "sanity")

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.note(trainer, "train")
            assert pl_module.training
            assert torch.is_grad_enabled()

        def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
            self.note(trainer, "sanity step" if trainer.sanity_checking else "validation")
            assert not pl_module.training
            assert not torch.is_grad_enabled()

        def on_test_start(self, trainer, pl_module):
            self.note(trainer, "test")

        def on_predict_start(self, trainer, pl_module):
            self.note(trainer, "predict")

    trainer, module, data = make_trainer(max_epochs=1, callbacks=[Looks()]), Quiet(), [torch.randn(2, 4)]
    trainer.fit(module, data, data)
    trainer.test(module, data)
    trainer.predict(module, data)
    assert flags == {
        "sanity": ["sanity_checking"],
        "sanity step": ["sanity_checking"],
        "train": ["training"],
        "validation": ["validating"],
        "test": ["testing"],
        "predict": ["predicting"],
    }
    assert not any(getattr(trainer, name) for name in ("training", "validating", "testing", "predicting"))
