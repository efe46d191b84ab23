"""Learning rate range test (Smith, Cyclical Learning Rates for Training Neural Networks, arXiv:1506.01186), and its
result: the measured losses, the suggested rate, and a plot."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import MutableMapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import linear_regression
from typing import Any, Literal

from torch import nn

from roomier.api.callback import Callback
from roomier.api.datamodule import DataModule
from roomier.api.module import Module, network_of
from roomier.api.trainer_view import TrainerView
from roomier.core.errors import RoomierError, check_integer
from roomier.core.log import notice
from roomier.run.run import Run, run_of
from roomier.run.schedulers import Schedulers
from roomier.techniques.optim.configured import read_configured
from roomier.trainer.attributes import TrainerAttributes
from roomier.trainer.tuner.trial import Subject, run_trial

_SMOOTHING = 0.98
_REACH = 1 / 8  # Extent of the fitted line on each side, as a fraction of the steps that are not ignored.


@dataclass(frozen=True)
class LearningRateCurve:
    """Curve of the loss as a function of the learning rate.

    Attributes:
        learning_rates: learning rate of each optimizer step, in ascending order.
        raw_losses: loss of each step before its update.
        losses: smoothed losses (exponential average with factor 0.98, bias-corrected).
        mode: spacing of the rates: ``"exponential"`` or ``"linear"``.

    Example:
        >>> curve = Tuner(trainer).lr_find(model, loader)
        >>> curve.suggestion()
        >>> curve.save_png("lr_find.png")
    """

    learning_rates: tuple[float, ...]
    raw_losses: tuple[float, ...]
    mode: str = "exponential"

    @property
    def losses(self) -> tuple[float, ...]:
        """Smoothed losses."""
        return smoothed(self.raw_losses)

    @property
    def results(self) -> dict[str, list[float]]:
        """Dict ``{"lr": [...], "loss": [...]}`` with smoothed losses, as in Lightning's learning rate finder."""
        return {"lr": list(self.learning_rates), "loss": list(self.losses)}

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the rate at which the loss decreases most steeply; None if the loss never decreases or the number of
        steps is too small.

        The slope at a step is the slope of a line fitted to the surrounding losses (on each side, an eighth of the
        steps that are not ignored). The line is fitted to the losses as a function of the logarithm of the rate, or of
        the rate itself if the rate increases linearly. A line through fewer losses would be too sensitive to the noise
        of individual batches. Smith (arXiv:1506.01186, section 3.3) reads two rates from the curve: the rate at which
        the loss begins to decrease, and the rate at which the loss stops decreasing. The rate of the steepest descent
        is between these two rates.

        Args:
            skip_begin: number of steps to ignore at the beginning.
            skip_end: number of steps to ignore at the end.
        """
        index = self._steepest(skip_begin, skip_end)
        return None if index is None else self.learning_rates[index]

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Return a matplotlib figure with the curve.

        Args:
            suggest: True to mark the suggested rate.
            show: True to open a window.
            ax: axes to draw on; None creates a figure.

        Raises:
            RoomierError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            action = "Run: pip install matplotlib. The values of the curve are in .results"
            raise RoomierError("plot", "matplotlib", f"is not installed ({error})", action) from error
        if ax is None and show:
            from matplotlib import pyplot

            _, ax = pyplot.subplots()
        elif ax is None:
            # This Figure has no window, and matplotlib has no global reference to it.
            ax = Figure(figsize=(6.4, 4.0), layout="constrained").subplots()
        losses = self.losses
        ax.plot(self.learning_rates, self.raw_losses, color="0.8", linewidth=0.8)
        ax.plot(self.learning_rates, losses, color="C0")
        low, high = min(losses, default=0.0), max(losses, default=1.0)
        ax.set_ylim(low - 0.1 * (high - low or 1.0), high + 0.1 * (high - low or 1.0))
        if self.mode == "exponential":
            ax.set_xscale("log")
        index = self._steepest() if suggest else None
        if index is not None:
            ax.plot(self.learning_rates[index], losses[index], "o", color="C3")
            ax.set_title(f"learning rate of the steepest descent: {self.learning_rates[index]:.3g}")
        ax.set_xlabel("learning rate")
        ax.set_ylabel("loss")
        figure = ax.get_figure()
        if show:
            figure.show()
        return figure

    def save_png(self, path: str | Path, *, suggest: bool = True) -> None:
        """Save the figure of :meth:`plot` as a PNG file at ``path``.

        Raises:
            RoomierError: matplotlib is not installed.
        """
        self.plot(suggest=suggest).savefig(path, format="png", dpi=120)

    def _steepest(self, skip_begin: int = 10, skip_end: int = 1) -> int | None:
        losses, rates = self.raw_losses, self.learning_rates
        xs = [math.log(rate) for rate in rates] if self.mode == "exponential" else list(rates)
        first, end = max(skip_begin, 0), len(losses) - max(skip_end, 0)
        reach = max(2, round(_REACH * (end - first)))
        slopes = {
            index: linear_regression(
                xs[index - reach : index + reach + 1], losses[index - reach : index + reach + 1]
            ).slope
            for index in range(first + reach, end - reach)
        }
        if not slopes:
            return None
        steepest = min(slopes, key=slopes.__getitem__)
        return steepest if slopes[steepest] < 0 else None


def smoothed(losses: tuple[float, ...]) -> tuple[float, ...]:
    """Return the bias-corrected exponential averages of ``losses``, one average for each loss."""
    average, found = 0.0, []
    for number, loss in enumerate(losses, start=1):
        average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
        found.append(average / (1 - _SMOOTHING**number))
    return tuple(found)


Mode = Literal["exponential", "linear"]


def lr_find(
    trainer: TrainerAttributes,
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
        model: same as in ``Trainer.fit``.
        train_dataloaders: same as in ``Trainer.fit``.
        datamodule: same as in ``Trainer.fit``.
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

    run_trial(
        trainer,
        subject,
        plan=plan,
        max_steps=num_training,
        callback=test,
        change_model=partial(set_attribute, name=name, learning_rate=probe) if name else None,
        prepare=partial(test.take_groups, name=name, probe=probe),
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
    check_integer("num_training", num_training, 2, "Use a value such as 100")
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

    def on_train_batch_start(self, trainer: TrainerView, pl_module: Module, batch: Any, batch_idx: int) -> None:
        rate = self._rates[min(trainer.global_step, len(self._rates) - 1)]
        for group, share in self._groups:
            group["lr"] = rate * share

    def on_train_batch_end(
        self, trainer: TrainerView, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
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
    network = network_of(module)
    set_attribute(network, name, 2 * probe)
    optimizers = read_configured(module.configure_optimizers()).optimizers
    set_attribute(network, name, probe)
    again = [_highest_rate(group) for optimizer in optimizers for group in optimizer.param_groups]
    if again == highest:
        problem = f"has no effect on the learning rates in configure_optimizers of {type(network).__name__}"
        raise RoomierError("attr_name", name, problem, f"Use self.{name} in configure_optimizers")


NAMES = ("lr", "learning_rate")


def attribute_of(model: nn.Module, name: str = "") -> str:
    """Return the name of the attribute of ``model``, or of its ``hparams``, that contains its learning rate.

    Args:
        model: model that contains the attribute.
        name: name of the attribute. If ``name`` is empty, the attribute ``lr`` is used if it exists, otherwise
            ``learning_rate``.

    Raises:
        RoomierError: the attribute does not exist.
    """
    for each in [name] if name else NAMES:
        if hasattr(model, each) or each in _hparams(model):
            return each
    kind = type(model).__name__
    if name:
        problem = f"must be an attribute of {kind} or of its hparams"
        raise RoomierError("attr_name", name, problem, "Use the name of an existing attribute")
    action = (
        "Use self.lr or self.hparams.lr in configure_optimizers, name another attribute (auto_lr_find='my_lr'), or let "
        "the Trainer create the optimizer: Trainer(optimizer='adamw', auto_lr_find=True)"
    )
    raise RoomierError("auto_lr_find", kind, "requires an attribute lr or learning_rate", action)


def set_attribute(model: nn.Module, name: str, learning_rate: float) -> None:
    """Set the attribute ``name`` of ``model`` and the entry ``name`` of its ``hparams`` to ``learning_rate``. An
    attribute or entry that does not exist is not created."""
    hparams = _hparams(model)
    if name in hparams:
        hparams[name] = learning_rate
    if hasattr(model, name):
        setattr(model, name, learning_rate)


def _hparams(model: nn.Module) -> MutableMapping[str, Any]:
    found = getattr(model, "hparams", None)
    return found if isinstance(found, MutableMapping) else {}
