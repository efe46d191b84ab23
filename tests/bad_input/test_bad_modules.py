"""Modules that cannot be trained are rejected: their types, return values and optimizers."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import roomier
from roomier.core.errors import PlanError, RoomierError, TrainingError

pytestmark = pytest.mark.more

STRANGER = nn.Linear(2, 2)  # a model without training


def step(returns):
    """Return a training_step that returns ``returns(loss)``."""
    return lambda self, batch, batch_idx: returns(self.loss(batch))


def nan_from_step(number):
    """Return a training_step whose loss is NaN from optimizer step ``number``."""
    return lambda self, batch, batch_idx: self.loss(batch) * (math.nan if self.global_step >= number else 1.0)


def optimizers(make):
    """Return a configure_optimizers that returns ``make(optimizer, module)``."""
    return lambda self: make(SGD(self.parameters(), lr=0.1), self)


def frozen(net):
    return net.requires_grad_(False)


def manual(**overrides):
    return {"automatic_optimization": False, **overrides}


class NanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.nan


MODELS = {
    "the model is a function": (
        lambda d: d.fit(lambda x: x),
        RoomierError,
        "model",
        "function",
        "Pass a roomier.Module",
    ),
    "the model is a class": (lambda d: d.fit(d.Net), RoomierError, "model", "Net", "Pass Net("),
    "a plain model that returns no loss": (
        lambda d: d.fit(nn.Linear(4, 2), [torch.randn(3, 4)], optimizer="adamw"),
        RoomierError,
        "model",
        "'Linear'",
        "Return the loss",
    ),
    "no training_step": (
        lambda d: d.fit(type("Empty", (roomier.Module,), {})(), optimizer="adamw"),
        RoomierError,
        "training_step",
        "'Empty'",
        "Define training_step(self, batch, batch_idx)",
    ),
    "weights on the meta device": (
        lambda d: d.fit(nn.Sequential(nn.ParameterList([torch.ones(2, device="meta")])), optimizer="adamw"),
        RoomierError,
        "model",
        "'0.0'",
        "Define reset_parameters() in ParameterList",
    ),
    "weights without a shape": (
        lambda d: d.fit(nn.LazyLinear(2), optimizer="adamw"),
        RoomierError,
        "model",
        "'weight'",
        "Run the model on one batch before fit",
    ),
    "an unknown loss_reduction": (
        lambda d: d.fit(d.net(loss_reduction="avg")),
        RoomierError,
        "loss_reduction",
        "'avg'",
        "Use 'mean' or 'sum'",
    ),
    "num_loss_terms that returns 0": (
        lambda d: d.fit(d.net(num_loss_terms=lambda self, batch: None), accumulate_grad_batches=2),
        TrainingError,
        "num_loss_terms",
        "[None, None]",
        "Return an integer",
    ),
    "a datamodule that is a loader": (
        lambda d: d.fit(datamodule=d.batches),
        RoomierError,
        "datamodule",
        "[",
        "Pass an instance of a roomier.DataModule subclass",
    ),
    "configure_callbacks returns a name": (
        lambda d: d.fit(d.net(configure_callbacks=lambda self: "early_stopping")),
        RoomierError,
        "configure_callbacks",
        "'early_stopping'",
        "Return",
    ),
    "an accelerator that does not exist": (
        lambda d: d.fit(accelerator="mps"),
        RoomierError,
        "accelerator",
        "'mps'",
        "Use one of: 'auto', ",
    ),
}


def ignored(num_samples):
    """Return a batch whose labels are all ignored."""
    return torch.ones(num_samples, 4), torch.full((num_samples,), -100)


class ComplexLoss(nn.Linear):
    """A plain model whose forward returns a complex loss."""

    def forward(self, x):
        return super().forward(x).mean() * 1j


LOSSES = {
    "a complex loss": (
        lambda d: d.fit(d.net(training_step=step(lambda loss: loss * 1j))),
        TrainingError,
        "loss",
        "j)",
        "Return a real loss, for example loss.abs()",
    ),
    "a complex loss in a dict": (
        lambda d: d.fit(d.net(training_step=step(lambda loss: {"loss": loss * 1j})), accumulate_grad_batches=2),
        TrainingError,
        "loss",
        "j)",
        "Return a real loss, for example loss.abs()",
    ),
    "a complex loss of a manual backward": (
        lambda d: d.fit(
            d.net(**manual(training_step=lambda self, batch, i: self.manual_backward(self.loss(batch) * 1j)))
        ),
        TrainingError,
        "loss",
        "j)",
        "Return a real loss, for example loss.abs()",
    ),
    "a complex loss of a plain model": (
        lambda d: d.fit(ComplexLoss(4, 2), [torch.ones(2, 4)], optimizer="adamw"),
        RoomierError,
        "model",
        "'ComplexLoss'",
        "Return a real loss, for example loss.abs()",
    ),
    "a batch with ignored labels only": (
        lambda d: d.fit(train=[*d.batches, ignored(2)], log_every_n_steps=1),
        TrainingError,
        "loss",
        "batch 4 of epoch 0 contains only ignored labels (-100), so the mean over its labels is 0/0",
        "Remove such samples",
    ),
    "a batch without samples": (
        lambda d: d.fit(train=[*d.batches, ignored(0)], max_epochs=1),
        TrainingError,
        "loss",
        "batch 4 of epoch 0 contains no samples, so the mean over its labels is 0/0",
        "Remove such samples",
    ),
    "a NaN loss": (
        lambda d: d.fit(d.net(training_step=nan_from_step(0)), log_every_n_steps=1),
        TrainingError,
        "loss",
        "nan",
        "No checkpoint has been saved yet. Lower the learning rate",
    ),
    "a NaN loss after a checkpoint": (
        lambda d: d.fit(d.net(training_step=nan_from_step(6)), log_every_n_steps=1),
        TrainingError,
        "loss",
        "nan",
        "The checkpoint of step 4 is unchanged",
    ),
    "a NaN loss that no log step sees": (
        lambda d: d.fit(d.net(training_step=nan_from_step(6))),
        TrainingError,
        "loss",
        "nan",
        "The checkpoint of step 4 is unchanged",
    ),
    "a NaN loss without checkpoints": (
        lambda d: d.fit(d.net(training_step=nan_from_step(0)), enable_checkpointing=False),
        TrainingError,
        "loss",
        "nan",
        "Lower the learning rate",
    ),
    "an infinite loss": (
        lambda d: d.fit(d.net(training_step=step(lambda loss: loss * math.inf)), log_every_n_steps=1),
        TrainingError,
        "loss",
        "inf",
        "Lower the learning rate",
    ),
    "a NaN gradient of a good loss": (
        lambda d: d.fit(d.net(training_step=step(NanGradient.apply)), max_steps=1),
        TrainingError,
        "body.weight",
        "nan",
        "Lower the learning rate",
    ),
    "a loss for each sample": (
        lambda d: d.fit(d.net(training_step=step(lambda loss: loss.repeat(4)))),
        TrainingError,
        "training_step",
        "(4,)",
        "Reduce the loss, for example with loss.mean()",
    ),
    "a detached loss": (
        lambda d: d.fit(d.net(training_step=step(lambda loss: loss.detach()))),
        TrainingError,
        "training_step",
        "tensor(",
        "Do not detach the loss",
    ),
    "a loss without gradients": (
        lambda d: d.fit(d.net(training_step=torch.no_grad()(step(lambda loss: loss)))),
        TrainingError,
        "training_step",
        "tensor(",
        "Do not detach the loss",
    ),
    "every parameter frozen": (
        lambda d: d.fit(frozen(d.Net())),
        TrainingError,
        "training_step",
        "tensor(",
        "unfreeze at least one parameter",
    ),
    "a loss that is a float": (
        lambda d: d.fit(d.net(training_step=step(lambda loss: loss.item()))),
        TrainingError,
        "training_step",
        "0.",
        "Return the loss as a 0-dim tensor",
    ),
    "a dict without the loss": (
        lambda d: d.fit(d.net(training_step=step(lambda loss: {"train_loss": loss}))),
        TrainingError,
        "training_step",
        "train_loss",
        "or {'loss': loss}",
    ),
    "a tuple": (
        lambda d: d.fit(d.net(training_step=step(lambda loss: (loss, loss)))),
        TrainingError,
        "training_step",
        "(tensor(",
        "Return the loss as a 0-dim tensor",
    ),
    "no return in training_step": (
        lambda d: d.fit(d.net(training_step=step(lambda loss: None))),
        TrainingError,
        "training_step",
        "None",
        "Return the loss",
    ),
    "no return in training_step, counted by steps": (
        lambda d: d.fit(d.net(training_step=step(lambda loss: None)), max_epochs=None, max_steps=3),
        TrainingError,
        "training_step",
        "None",
        "Return the loss",
    ),
    "a manual step that never steps": (
        lambda d: d.fit(d.net(**manual()), max_epochs=None, max_steps=3),
        TrainingError,
        "training_step",
        "'Net'",
        "call step() of self.optimizers()",
    ),
    "manual_backward in automatic optimization": (
        lambda d: d.fit(d.net(training_step=lambda self, batch, i: self.manual_backward(self.loss(batch)))),
        RoomierError,
        "manual_backward",
        "'Net'",
        "Set self.automatic_optimization = False",
    ),
    "no return in training_step and data without an end": (
        lambda d: d.fit(
            d.net(training_step=step(lambda loss: None)), (d.batches[0] for _ in itertools.count()), max_steps=3
        ),
        TrainingError,
        "training_step",
        "None",
        "Return the loss",
    ),
    "no training_step argument for the batch": (
        lambda d: d.fit(d.net(training_step=lambda self: None)),
        RoomierError,
        "training_step",
        "'()'",
        "Define it as training_step(self, batch, batch_idx)",
    ),
}

OPTIMIZERS = {
    "no optimizer": (
        lambda d: d.fit(d.net(configure_optimizers=lambda self: None)),
        PlanError,
        "optimizer",
        "None",
        "Return one from configure_optimizers, or pass Trainer(optimizer='adamw'",
    ),
    "two optimizers in automatic optimization": (
        lambda d: d.fit(d.net(configure_optimizers=optimizers(lambda o, net: [o, AdamW(net.parameters())]))),
        RoomierError,
        "configure_optimizers",
        "2 optimizers",
        "Set self.automatic_optimization = False",
    ),
    "an optimizer of the Trainer and one of the module": (
        lambda d: d.fit(optimizer="sgd", learning_rate=0.1),
        PlanError,
        "optimizer",
        "'sgd'",
        "Remove one of the two",
    ),
    "the name of an optimizer": (
        lambda d: d.fit(d.net(configure_optimizers=lambda self: "adamw")),
        RoomierError,
        "configure_optimizers",
        "'adamw'",
        "Return an optimizer, a list of optimizers",
    ),
    "a key that is misspelled": (
        lambda d: d.fit(d.net(configure_optimizers=optimizers(lambda o, net: {"optimiser": o}))),
        RoomierError,
        "configure_optimizers",
        "'optimiser'",
        "Did you mean 'optimizer'?",
    ),
    "an optimizer of another model": (
        lambda d: d.fit(d.net(configure_optimizers=lambda self: AdamW(STRANGER.parameters()))),
        RoomierError,
        "configure_optimizers",
        "AdamW",
        "Create the optimizer with self.parameters()",
    ),
    "an optimizer of the Trainer and a frozen module": (
        lambda d: d.fit(frozen(d.net(configure_optimizers=lambda self: None)), optimizer="adamw"),
        PlanError,
        "optimizer",
        "'adamw'",
        "Unfreeze at least one",
    ),
    "an option the optimizer does not have": (
        lambda d: d.fit(d.net(configure_optimizers=lambda self: None), optimizer={"name": "sgd", "momentun": 0.9}),
        PlanError,
        "optimizer",
        "'momentun'",
        "Did you mean 'momentum'?",
    ),
    "accumulation with manual optimization": (
        lambda d: d.fit(d.net(**manual()), accumulate_grad_batches=2),
        RoomierError,
        "accumulate_grad_batches",
        "2",
        "stepping every n batches",
    ),
    "clipping with manual optimization": (
        lambda d: d.fit(d.net(**manual()), gradient_clip_val=1.0),
        RoomierError,
        "gradient_clip_val",
        "1.0",
        "self.clip_gradients",
    ),
}


def scheduler(make, **config):
    """Return a configure_optimizers with the scheduler ``make(optimizer)``."""

    def configure(self):
        optimizer = SGD(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **config}}

    return configure


def step_lr(optimizer):
    return StepLR(optimizer, 1)


SCHEDULERS = {
    "a plateau without a monitor": (
        lambda d: d.fit(d.net(configure_optimizers=scheduler(ReduceLROnPlateau))),
        RoomierError,
        "configure_optimizers: monitor",
        "None",
        "'monitor': 'val_loss'",
    ),
    "a monitor that is not logged": (
        lambda d: d.fit(d.net(configure_optimizers=scheduler(ReduceLROnPlateau, monitor="trian_loss"))),
        TrainingError,
        "monitor",
        "'trian_loss'",
        "Did you mean 'train_loss'?",
    ),
    "a function": (
        lambda d: d.fit(d.net(configure_optimizers=scheduler(lambda optimizer: math.cos))),
        RoomierError,
        "configure_optimizers: lr_scheduler",
        "cos",
        "Pass a torch.optim.lr_scheduler object",
    ),
    "the optimizer itself": (
        lambda d: d.fit(d.net(configure_optimizers=scheduler(lambda optimizer: optimizer))),
        RoomierError,
        "configure_optimizers: lr_scheduler",
        "SGD",
        "Pass a torch.optim.lr_scheduler object",
    ),
    "a scheduler of another optimizer": (
        lambda d: d.fit(d.net(configure_optimizers=scheduler(lambda o: step_lr(SGD(STRANGER.parameters(), lr=1))))),
        RoomierError,
        "configure_optimizers: lr_scheduler",
        "StepLR",
        "Create the scheduler with the optimizer that configure_optimizers returns",
    ),
    "an unknown interval": (
        lambda d: d.fit(d.net(configure_optimizers=scheduler(step_lr, interval="batch"))),
        RoomierError,
        "configure_optimizers: interval",
        "'batch'",
        "Use 'epoch' or 'step'",
    ),
    "a frequency of 0": (
        lambda d: d.fit(d.net(configure_optimizers=scheduler(step_lr, frequency=0))),
        RoomierError,
        "configure_optimizers: frequency",
        "0",
        "Use 1 or more",
    ),
    "a key that is misspelled": (
        lambda d: d.fit(d.net(configure_optimizers=scheduler(step_lr, freqency=2))),
        RoomierError,
        "configure_optimizers: lr_scheduler",
        "'freqency'",
        "Did you mean 'frequency'?",
    ),
    "a schedule to the end of an endless run": (
        lambda d: d.fit(
            d.net(configure_optimizers=lambda self: None), optimizer="adamw", lr_schedule="cosine", max_epochs=-1
        ),
        PlanError,
        "lr_schedule",
        "'cosine'",
        "Set max_steps on the Trainer",
    ),
    "a warm-up longer than the run": (
        lambda d: d.fit(
            d.net(configure_optimizers=lambda self: None),
            optimizer="adamw",
            lr_schedule={"name": "linear", "warmup_steps": 100},
        ),
        PlanError,
        "lr_schedule.warmup_steps",
        "100",
        "Use fewer warm-up steps",
    ),
}

ROWS = [
    pytest.param(*row, id=f"{kind}: {name}")
    for kind, table in (("model", MODELS), ("loss", LOSSES), ("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS))
    for name, row in table.items()
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("act", "kind", "field", "received", "action"), ROWS)
def test_a_module_that_cannot_be_trained_is_rejected(act, kind, field, received, action, refuses):
    refuses(act, kind, field, received, action)


def test_the_labels_are_not_named_if_the_nan_has_another_cause(desk):
    with pytest.raises(TrainingError, match=r"after each epoch\)\. No checkpoint.*Lower the learning rate") as caught:
        desk.fit(desk.net(training_step=nan_from_step(0)), default_root_dir=desk.root.parent / "other")
    assert "labels" not in str(caught.value)


def test_accumulated_batches_without_labels_are_named(desk):
    with pytest.raises(TrainingError, match="a loss term to average over") as caught:
        desk.fit(train=[*desk.batches, ignored(2), ignored(3)], accumulate_grad_batches=2)
    assert caught.value.__notes__ == ["the step used batches 4 to 5 of epoch 0"]


def test_a_nan_keeps_the_checkpoint_before_it_and_the_run_resumes_from_it(desk):
    root = desk.root.parent / "other"
    keywords = {"default_root_dir": root, "max_epochs": 3}
    with pytest.raises(TrainingError, match="checkpoint of step 8 is unchanged"):
        desk.fit(desk.net(training_step=nan_from_step(9)), **keywords)
    resumed = desk.fit(desk.Net(), ckpt_path="last", **keywords)
    assert resumed.global_step == 12


def test_nan_weights_never_replace_a_valid_checkpoint(desk):
    """The loss is still finite in the step whose gradient makes the weights NaN."""
    root = desk.root.parent / "other"

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return NanGradient.apply(loss) if self.global_step == 7 else loss

    with pytest.raises(TrainingError, match=r"^body.weight=nan.* step 8 .*checkpoint of step 4 is unchanged"):
        desk.fit(desk.net(training_step=training_step), default_root_dir=root)
    assert [path.name for path in root.rglob("epoch=*")] == ["epoch=0-step=4"]
