"""Learning rate range test (Smith, Cyclical Learning Rates for Training Neural Networks, arXiv:1506.01186)."""

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
from roomier.run.run import Run, run_of
from roomier.run.schedulers import Schedulers
from roomier.techniques.optim.configured import read_configured
from roomier.train.tuner.curve import LearningRateCurve, smoothed
from roomier.train.tuner.learning_rate import attribute_of, set_attribute
from roomier.train.tuner.trial import Subject, run_trial
from roomier.train.tuner.tunable import Tunable

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
    """Train a copy of ``model`` with a learning rate that increases at each step, and record the losses.

    The search does not change the model, the data or the random states, so a fit after the search is bit-identical to a
    fit without a search. The search uses the ranks and the strategy of the Trainer. Schedulers do not step. If the
    optimizer has several parameter groups, the ratios of their learning rates are preserved.

    Args:
        trainer: Trainer whose settings the test uses.
        model, train_dataloaders, datamodule: same as in ``Trainer.fit``, or one Subject that contains all three.
        min_lr: learning rate of the first step.
        max_lr: learning rate of the last step.
        num_training: number of optimizer steps.
        mode: spacing of the rates between ``min_lr`` and ``max_lr``.
        early_stop_threshold: stop the test if the smoothed loss is greater than its minimum times this factor; None
            disables this condition. A loss that is not finite always stops the test.
        update_attr: True to use the suggested rate in subsequent fits. If the Trainer creates the optimizer
            (``Trainer(optimizer=...)``), the optimizer uses the rate. Otherwise, the rate is assigned to the ``lr`` or
            ``learning_rate`` attribute of ``model`` or its ``hparams``.
        attr_name: name of the attribute if it is neither ``lr`` nor ``learning_rate``.

    Returns:
        The curve, which has the methods ``suggestion()``, ``plot()`` and ``save_png(path)``. None in a fast development
        run.

    Raises:
        RoomierError: an argument is invalid, the number of optimizers is not 1, the attribute does not affect the rate,
            or ``update_attr`` is True and no rate can be suggested.
    """
    _check(min_lr, max_lr, num_training, mode, early_stop_threshold)
    if trainer.options.num_dev_batches:
        notice("fast_dev_run: the search for a learning rate is skipped")
        return None
    is_named = trainer.requested_plan.optimizer.name is not None
    subject = model if isinstance(model, Subject) else Subject.of(model, train_dataloaders, datamodule)
    name = attribute_of(subject.model, attr_name) if not is_named and (update_attr or attr_name) else ""
    rates = _rates(min_lr, max_lr, num_training, mode)
    test = _RangeTest(rates, early_stop_threshold)
    plan = trainer.requested_plan
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
        problem = "did not decrease the loss between the first ten steps and the end, so no rate can be suggested"
        action = "Lower min_lr, raise num_training, or set the learning rate manually"
        raise RoomierError("auto_lr_find", received, problem, action)
    return found


def _check(min_lr: float, max_lr: float, num_training: int, mode: str, early_stop_threshold: float | None) -> None:
    if mode not in ("exponential", "linear"):
        raise RoomierError("mode", mode, "is not a known mode", "Use 'exponential' or 'linear'")
    if not 0 < min_lr < math.inf:
        raise RoomierError("min_lr", min_lr, "must be positive and finite", "Use a value such as 1e-8")
    if not min_lr < max_lr < math.inf:
        raise RoomierError("max_lr", max_lr, f"must be greater than min_lr={min_lr}", "Use a value such as 1.0")
    if not isinstance(num_training, int) or num_training < 2:
        raise RoomierError("num_training", num_training, "must be an integer of at least 2", "Use a value such as 100")
    if early_stop_threshold is not None and not early_stop_threshold > 1:
        action = "Use a value such as 4.0, or None to run all steps"
        raise RoomierError("early_stop_threshold", early_stop_threshold, "must be greater than 1", action)


def _rates(min_lr: float, max_lr: float, num_training: int, mode: str) -> list[float]:
    shares = [index / (num_training - 1) for index in range(num_training)]
    if mode == "linear":
        return [min_lr + (max_lr - min_lr) * share for share in shares]
    return [min_lr * (max_lr / min_lr) ** share for share in shares]


class _RangeTest(Callback):
    """Callback that sets the learning rate before each step, and records the loss after each step."""

    def __init__(self, rates: list[float], early_stop_threshold: float | None) -> None:
        self._rates = rates
        self._threshold = early_stop_threshold
        self._groups: list[tuple[dict[str, Any], float]] = []
        self.losses: list[float] = []

    def take_groups(self, run: Run, name: str, probe: float) -> None:
        """Take control of the learning rates of the optimizer's parameter groups. With automatic optimization, also
        disable the schedulers.

        Args:
            run: the run of the trial.
            name: the attribute of the model whose value is ``probe``; empty if no attribute was changed.
            probe: learning rate that was assigned to this attribute of the copy.

        Raises:
            RoomierError: the number of optimizers is not 1, or the attribute does not affect the rate.
        """
        kind = type(run.module).__name__
        if len(run.engine.optimizers) != 1:
            received = f"{len(run.engine.optimizers)} optimizers"
            problem = f"a range test requires exactly one optimizer, but {kind} has a different number"
            raise RoomierError("lr_find", received, problem, "Set the learning rates manually")
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
            problem = "training_step returned no loss"
            raise RoomierError("lr_find", type(pl_module).__name__, problem, "Return the loss in training_step")
        if math.isfinite(loss):
            self.losses.append(loss)
        if not math.isfinite(loss) or self._diverges():
            run.now.last_loss = None  # a loss that is not finite ends the test without an error
            trainer.should_stop = True

    def _diverges(self) -> bool:
        losses = smoothed(tuple(self.losses))
        return self._threshold is not None and losses[-1] > self._threshold * min(losses)


def _highest_rate(group: dict[str, Any]) -> float:
    """Return the learning rate of ``group`` without the effect of a schedule, which is the first existing value of
    ``max_lr``, ``initial_lr`` and ``lr``."""
    return float(group.get("max_lr", group.get("initial_lr", group["lr"])))


def _check_is_used(module: Module, name: str, probe: float, highest: list[float]) -> None:
    """Check that the learning rates of the optimizer depend on the attribute.

    Raises:
        RoomierError: the learning rates do not depend on the attribute.
    """
    network = getattr(module, "network", module)
    set_attribute(network, name, 2 * probe)
    optimizers = read_configured(module.configure_optimizers()).optimizers
    set_attribute(network, name, probe)
    again = [_highest_rate(group) for optimizer in optimizers for group in optimizer.param_groups]
    if again == highest:
        problem = f"has no effect on the learning rates in configure_optimizers of {type(network).__name__}"
        raise RoomierError("attr_name", name, problem, f"Use self.{name} in configure_optimizers")
