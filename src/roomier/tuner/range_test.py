"""The learning-rate range test: Smith, Cyclical Learning Rates for Training Neural Networks, arXiv:1506.01186."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from torch import nn

from roomier.api.callback import Callback
from roomier.api.datamodule import DataModule
from roomier.api.module import Module
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.optim.configured import read_configured
from roomier.run.run import Run, run_of
from roomier.run.schedulers import Schedulers
from roomier.tuner.curve import LearningRateCurve, smoothed
from roomier.tuner.learning_rate import attribute_of, set_attribute
from roomier.tuner.trial import Subject, run_trial
from roomier.tuner.tunable import Tunable

Mode = Literal["exponential", "linear"]


def lr_find(
    trainer: Tunable,
    model: nn.Module | Subject,
    train_dataloaders: Any = None,
    *,
    datamodule: DataModule | None = None,
    min_lr: float = 1e-8,
    max_lr: float = 1.0,
    num_training: int = 100,
    mode: Mode = "exponential",
    early_stop_threshold: float | None = 4.0,
    update_attr: bool = False,
    attr_name: str = "",
) -> LearningRateCurve | None:
    """Train a copy of ``model`` with a learning rate that rises from step to step, and note the loss.

    Nothing that a run depends on is changed: a fit after it is the fit without it, bit for bit. It runs on the ranks,
    and under the strategy, of the Trainer. Schedulers stand still; of several parameter groups each keeps its share.

    Args:
        model, train_dataloaders, datamodule: as for ``Trainer.fit``; or all of them, as a Subject.
        min_lr, max_lr: of the first and the last step.
        num_training: optimizer steps.
        mode: how the rate rises between them.
        early_stop_threshold: end where the smoothed loss is so many times its least; None: never. A loss that is not
            finite ends it always.
        update_attr: put the suggested rate where the optimizer gets it from: the optimizer that the Trainer names, or
            the attribute ``lr`` or ``learning_rate`` of ``model`` or its ``hparams``.
        attr_name: another attribute.

    Returns:
        The curve; its ``suggestion()``, ``plot()``, ``save_png(path)``. None in a fast development run.

    Raises:
        RoomierError: a value is wrong, there is not one optimizer, its rate cannot be set from outside, or, with
            ``update_attr``, no rate can be suggested.
    """
    _check(min_lr, max_lr, num_training, mode, early_stop_threshold)
    if trainer.options.num_dev_batches:
        notice("no learning rate is looked for in a fast development run")
        return None
    is_named = trainer.asked_plan.optimizer.name is not None
    subject = model if isinstance(model, Subject) else Subject.of(model, train_dataloaders, datamodule)
    name = attribute_of(subject.model, attr_name) if not is_named and (update_attr or attr_name) else ""
    rates = _rates(min_lr, max_lr, num_training, mode)
    test = _RangeTest(rates, early_stop_threshold)
    plan = trainer.asked_plan
    if is_named:
        held = dataclasses.replace(plan.optimizer, lr=max_lr, schedule=None, warmup_steps=0)
        plan = dataclasses.replace(plan, optimizer=held)
    probe = math.sqrt(min_lr * max_lr)

    def prepare(run: Run) -> None:
        test.take_groups(run, name, probe)

    def change_model(copied: nn.Module) -> None:
        if name:
            set_attribute(copied, name, probe)

    run_trial(
        trainer,
        subject,
        plan=plan,
        max_steps=num_training,
        callback=test,
        change_model=change_model,
        prepare=prepare,
    )
    curve = LearningRateCurve(tuple(rates[: len(test.losses)]), tuple(test.losses), mode)
    if update_attr:
        suggested = _suggested(curve)
        if is_named:
            trainer.use_learning_rate(suggested)
        else:
            set_attribute(subject.model, name, suggested)
    return curve


def _suggested(curve: LearningRateCurve) -> float:
    found = curve.suggestion()
    if found is None:
        received = f"{len(curve.losses)} steps"
        problem = "the loss did not fall anywhere between the first ten steps and the end, so no rate is suggested"
        action = "Lower min_lr, raise num_training, or choose the learning rate yourself"
        raise RoomierError("auto_lr_find", received, problem, action)
    return found


def _check(min_lr: float, max_lr: float, num_training: int, mode: str, early_stop_threshold: float | None) -> None:
    if mode not in ("exponential", "linear"):
        raise RoomierError("mode", mode, "is unknown", "Use 'exponential' or 'linear'")
    if not 0 < min_lr < math.inf:
        raise RoomierError("min_lr", min_lr, "is not a positive number", "Use 1e-8, say")
    if not min_lr < max_lr < math.inf:
        raise RoomierError("max_lr", max_lr, f"is not above min_lr={min_lr}", "Use 1.0, say")
    if not isinstance(num_training, int) or num_training < 2:
        raise RoomierError("num_training", num_training, "is not a number of steps", "Use 100, say")
    if early_stop_threshold is not None and not early_stop_threshold > 1:
        action = "Use 4.0, say, or None to go through to the end"
        raise RoomierError("early_stop_threshold", early_stop_threshold, "would end the test at once", action)


def _rates(min_lr: float, max_lr: float, num_training: int, mode: str) -> list[float]:
    shares = [index / (num_training - 1) for index in range(num_training)]
    if mode == "linear":
        return [min_lr + (max_lr - min_lr) * share for share in shares]
    return [min_lr * (max_lr / min_lr) ** share for share in shares]


class _RangeTest(Callback):
    """Sets the rate before each step and notes the loss after it."""

    def __init__(self, rates: list[float], early_stop_threshold: float | None) -> None:
        self._rates = rates
        self._threshold = early_stop_threshold
        self._groups: list[tuple[dict[str, Any], float]] = []
        self.losses: list[float] = []

    def take_groups(self, run: Run, name: str, probe: float) -> None:
        """Take over the parameter groups of the one optimizer from its schedulers.

        Args:
            name: the attribute of the model that holds ``probe`` as its learning rate; empty for none.
        """
        kind = type(run.module).__name__
        if len(run.engine.optimizers) != 1:
            received = f"{len(run.engine.optimizers)} optimizers"
            raise RoomierError("lr_find", received, f"a range test moves one, and {kind} has others", "Choose yourself")
        groups = run.engine.optimizers[0].param_groups
        highest = [_highest_rate(group) for group in groups]
        if name:
            _check_is_used(run.module, name, probe, highest)
        unit = probe if name else max(highest) or 1.0
        self._groups = [(group, rate / unit if rate else 1.0) for group, rate in zip(groups, highest, strict=True)]
        if run.module.automatic_optimization:
            run.schedulers = Schedulers(run.module, ())

    def on_train_batch_start(self, trainer: Tunable, pl_module: Module, batch: Any, batch_idx: int) -> None:
        rate = self._rates[min(trainer.global_step, len(self._rates) - 1)]
        for group, share in self._groups:
            group["lr"] = rate * share

    def on_train_batch_end(self, trainer: Tunable, pl_module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        run = run_of(trainer, "lr_find")
        if run.progress.global_step <= len(self.losses):
            return
        loss = run.loss_of_all(run.ranks.gather(run.loss_number()))
        if loss is None:
            problem = "training_step gives no loss to look at"
            raise RoomierError("lr_find", type(pl_module).__name__, problem, "Return the loss at its end")
        if math.isfinite(loss):
            self.losses.append(loss)
        if not math.isfinite(loss) or self._diverges():
            run.now.last_loss = None  # a loss that is not finite ends this test, and nothing else
            trainer.should_stop = True

    def _diverges(self) -> bool:
        losses = smoothed(tuple(self.losses))
        return self._threshold is not None and losses[-1] > self._threshold * min(losses)


def _highest_rate(group: dict[str, Any]) -> float:
    """What a group's rate comes to, whatever its schedule makes of it in the first step."""
    return float(group.get("max_lr", group.get("initial_lr", group["lr"])))


def _check_is_used(module: Module, name: str, probe: float, highest: list[float]) -> None:
    """Refuse an attribute on which no rate of the optimizer depends."""
    network = getattr(module, "network", module)
    set_attribute(network, name, 2 * probe)
    optimizers = read_configured(module.configure_optimizers()).optimizers
    set_attribute(network, name, probe)
    again = [_highest_rate(group) for optimizer in optimizers for group in optimizer.param_groups]
    if again == highest:
        problem = f"configure_optimizers of {type(network).__name__} makes the same learning rates whatever it is"
        raise RoomierError("attr_name", name, problem, f"Use self.{name} there")
