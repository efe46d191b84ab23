"""Search for the largest micro-batch that fits in memory, without changing the number of samples per optimizer step;
and the Tuner class, which provides both searches under the names that Lightning uses.
"""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from roomier.api.callback import Callback
from roomier.api.datamodule import DataModule
from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.callbacks.tracked_step import FIRST_STEP_OF_A_BUDGET, TracksStep, first_step_of
from roomier.core.device.memory import release_cached
from roomier.core.device.resolve import resolve_device
from roomier.core.errors import RoomierError, check_integer
from roomier.core.log import notice
from roomier.core.units import format_bytes, parse_bytes
from roomier.plan import Plan
from roomier.run.loaders import RunLoaders
from roomier.run.settled import Request
from roomier.train.settling.job import samples_of_step, with_micro_batch
from roomier.trainer.attributes import TrainerAttributes
from roomier.trainer.tuner.range_test import LearningRateCurve, Mode, lr_find
from roomier.trainer.tuner.trial import Subject, TrialOverError, run_trial

if TYPE_CHECKING:
    from roomier.planner.memory.tracker import MemoryTracker

_FIELD = "auto_scale_batch_size"
MODES = ("power", "binsearch")


def scale_batch_size(
    trainer: TrainerAttributes,
    model: nn.Module | Subject,
    train_dataloaders: Any = None,
    *,
    datamodule: DataModule | None = None,
    mode: str = "power",
    steps_per_trial: int = 3,
    init_val: int = 2,
    max_trials: int = 25,
    margin: float = 0.0,
    max_val: int = 8192,
    memory_budget: int | str | None = None,
) -> int | None:
    """Find the largest micro-batch that fits in memory, and use its size in the next fits of ``trainer``.

    The batch size of the loader and ``accumulate_grad_batches`` still determine the number of samples per optimizer
    step. Only sizes that divide this number are tried. If the size decreases, the number of accumulated micro-batches
    increases accordingly. Each trial trains a copy of the model for a few steps on the first samples of the loader. Set
    a ``margin`` if the samples have different lengths.

    The search changes only the size of the micro-batches and their number per step. A fit after the search is
    bit-identical to a fit whose loader has this batch size.

    Args:
        trainer: Trainer whose next fits use the size.
        model: same as in ``Trainer.fit``.
        train_dataloaders: same as in ``Trainer.fit``.
        datamodule: same as in ``Trainer.fit``.
        mode: ``"power"`` doubles the size as long as the micro-batch fits. ``"binsearch"`` also searches between the
            last size that fits and the first size that does not fit.
        steps_per_trial: number of optimizer steps per trial.
        init_val: size of the first trial.
        max_trials: maximum number of trials.
        margin: fraction by which the resulting size is reduced.
        max_val: maximum size in a trial.
        memory_budget: limit on the measured memory of a step, in bytes or as a string such as ``"8GiB"``. The default
            is the budget of the Trainer, or the memory of the device. Required on a CPU. After the search, the
            Trainer does not check its budget with a forecast.

    Returns:
        The size of the micro-batch; None in a fast development run.

    Raises:
        RoomierError: an argument is invalid, the strategy is ``"auto"``, the run has several ranks, the memory limit is
            unknown, batches cannot be split, or the smallest size does not fit.
    """
    _check(mode, steps_per_trial, init_val, max_trials, margin, max_val)
    if trainer.options.num_dev_batches:
        notice("fast_dev_run: the search for a batch size is skipped")
        return None
    limit_bytes = _limit_bytes(trainer, memory_budget)
    plan = dataclasses.replace(
        trainer.requested_plan, choice=dataclasses.replace(trainer.requested_plan.choice, memory_budget_bytes=None)
    )
    subject = model if isinstance(model, Subject) else Subject.of(model, train_dataloaders, datamodule)
    trials = _Trials(trainer, subject, plan, steps_per_trial, limit_bytes)
    of_step, num_samples = trials.sizes()
    sizes = [size for size in range(1, of_step + 1) if of_step % size == 0 and size <= min(max_val, num_samples)]
    found = largest_that_fits(sizes, trials.fits, first=init_val, refines=mode == "binsearch", max_trials=max_trials)
    if found is None:
        limit = "the memory of the device" if limit_bytes is None else format_bytes(limit_bytes)
        action = "Use strategy='auto', which searches for a plan that fits, or activation_checkpointing='full'"
        raise RoomierError(_FIELD, sizes[0], f"a micro-batch of {sizes[0]} samples does not fit into {limit}", action)
    if margin:
        found = max(size for size in sizes if size <= max(1, int(found * (1 - margin))))
    trainer.plan = trainer.requested_plan = plan
    trainer.micro_batch, trainer.num_micro_batches = found, None
    return found


def largest_that_fits(
    sizes: Sequence[int],
    fits: Callable[[int], bool],
    *,
    first: int = 1,
    refines: bool = True,
    max_trials: int = 25,
) -> int | None:
    """Return the largest of ``sizes`` that fits; None if no size fits. If a size fits, all smaller sizes must also fit.

    Args:
        sizes: sizes in ascending order.
        fits: function that returns True if a size fits.
        first: the first size to try.
        refines: True to search between the last size that fits and the first size that does not fit. If False,
            the sizes in between are not tried.
        max_trials: maximum number of calls of ``fits``.
    """
    best, too_large = -1, len(sizes)  # indices
    index = max((each for each, size in enumerate(sizes) if size <= first), default=0)
    for _ in range(max_trials):
        if fits(sizes[index]):
            best = index
            doubled = [each for each in range(index + 1, len(sizes)) if sizes[each] <= 2 * sizes[index]]
            upward = doubled[-1] if doubled else index + 1
        else:
            too_large = index
            upward = too_large
        if too_large - best <= 1:
            break
        if upward < too_large:
            index = upward
        elif best >= 0 and not refines:
            break
        else:
            index = (best + too_large) // 2 if best >= 0 else index // 2
    return None if best < 0 else sizes[best]


def _check(mode: str, steps_per_trial: int, init_val: int, max_trials: int, margin: float, max_val: int) -> None:
    if mode not in MODES:
        raise RoomierError("mode", mode, "is not a known mode", "Use 'power' or 'binsearch'")
    counts = {"steps_per_trial": steps_per_trial, "init_val": init_val, "max_trials": max_trials, "max_val": max_val}
    for name, value in counts.items():
        check_integer(name, value, 1, "Use 1 or more")
    if not 0.0 <= margin < 1.0:
        raise RoomierError("margin", margin, "must be at least 0 and less than 1", "Use a number such as 0.05")


def _limit_bytes(trainer: TrainerAttributes, memory_budget: int | str | None) -> int | None:
    """Return the memory limit of a step; None means the memory of the device.

    Raises:
        RoomierError: the limit is unknown, the strategy is ``"auto"``, or the run has several ranks.
    """
    plan = trainer.requested_plan
    if plan.parallel.strategy == "auto":
        problem = "cannot be combined with strategy='auto', which chooses the micro-batch by forecast"
        raise RoomierError(_FIELD, True, problem, "Remove one of the two")
    if trainer.world.size > 1:
        problem = "is not supported, because the other ranks would wait forever if one rank ran out of memory"
        action = "Use strategy='auto' or memory_budget, which choose the micro-batch for all ranks by forecast"
        raise RoomierError(_FIELD, f"{trainer.world.size} ranks", problem, action)
    if memory_budget is not None:
        return memory_budget if isinstance(memory_budget, int) else parse_bytes("memory_budget", memory_budget)
    limit_bytes = plan.choice.memory_budget_bytes
    device = resolve_device(plan.parallel.accelerator)
    if limit_bytes is None and device.type == "cpu":
        problem = "requires a memory limit, because a CPU process is killed without an error if memory is full"
        raise RoomierError(_FIELD, str(device), problem, "Set the available memory: memory_budget='8GiB'")
    return limit_bytes


@dataclasses.dataclass(frozen=True)
class _Trials:
    trainer: TrainerAttributes
    subject: Subject
    plan: Plan
    num_steps: int
    limit_bytes: int | None

    def sizes(self) -> tuple[int, int]:
        """Return the number of samples per optimizer step, and the number of samples in the dataset."""
        found: list[tuple[int, int]] = []

        def look(plan: Plan, data: RunLoaders, request: Request) -> Plan:
            found.append((samples_of_step(request, data), len(data.train_loader.dataset)))
            raise TrialOverError

        run_trial(self.trainer, self.subject, plan=self.plan, max_steps=1, callback=Callback(), cut=look)
        return found[0]

    def fits(self, size: int) -> bool:
        """Return True if steps with micro-batches of ``size`` samples stay within the limit."""

        def cut(plan: Plan, data: RunLoaders, request: Request) -> Plan:
            whole = samples_of_step(request, data) // size
            # Two micro-batches suffice, because the second one already accumulates gradients.
            return with_micro_batch(plan, data, size, min(whole, 2))

        peak = _PeakOfAStep()
        num_steps = max(self.num_steps, 2)
        if self.limit_bytes is not None:
            num_steps = max(num_steps, FIRST_STEP_OF_A_BUDGET + 1)
        is_full = False
        try:
            run_trial(
                self.trainer,
                self.subject,
                plan=self.plan,
                max_steps=num_steps,
                callback=peak if self.limit_bytes is not None else Callback(),
                cut=cut,
            )
        except torch.OutOfMemoryError:
            is_full = True
        gc.collect()
        release_cached(resolve_device(self.plan.parallel.accelerator))
        if self.limit_bytes is None or is_full:
            notice(f"micro-batches of {size} samples {'do not fit' if is_full else 'fit'}")
            return not is_full
        fits = peak.num_bytes <= self.limit_bytes
        measured = f"use {format_bytes(peak.num_bytes)} at the peak of a step"
        notice(f"micro-batches of {size} samples {measured}, which {'fits' if fits else 'does not fit'}")
        return fits


class _PeakOfAStep(TracksStep):
    """Callback that measures the peak memory of one step. The first step is not measured, because it creates the
    optimizer states."""

    def __init__(self) -> None:
        super().__init__(at_step=None)
        self.num_bytes = 0

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        of_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
        step = first_step_of(trainer)
        # The last step of an epoch may contain fewer samples.
        self.next_step = step + 1 if of_epoch > 1 and step % of_epoch == 0 else step

    def _finish(self, trainer: TrainerView, tracker: MemoryTracker) -> None:
        self.next_step = None
        self.num_bytes = tracker.allocator_peak_bytes or tracker.peak().total()
        trainer.should_stop = True


class Tuner:
    """Finds a learning rate or a batch size for the fits of ``trainer``.

    Args:
        trainer: the Trainer whose next fits use the results.

    Example:
        >>> tuner = Tuner(trainer)
        >>> tuner.lr_find(model, loader)
        >>> trainer.fit(model, loader)
    """

    def __init__(self, trainer: TrainerAttributes) -> None:
        self._trainer = trainer

    def lr_find(
        self,
        model: nn.Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: str = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training: int = 100,
        mode: Mode = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> LearningRateCurve | None:
        """Search for a learning rate. See :func:`roomier.tuner.lr_find`. ``val_dataloaders`` is ignored."""
        return lr_find(self._trainer, **_options(locals()))

    def scale_batch_size(
        self,
        model: nn.Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: str = "fit",
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.0,
        max_val: int = 8192,
        memory_budget: int | str | None = None,
    ) -> int | None:
        """Search for a batch size. See :func:`roomier.tuner.scale_batch_size`.

        The search does not change any attribute of the model, so ``batch_arg_name`` is ignored.
        """
        return scale_batch_size(self._trainer, **_options(locals()))


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a method of ``Tuner`` that its function also has."""
    method, dataloaders = given["method"], given["dataloaders"]
    if method != "fit" or dataloaders is not None:
        action = (
            "Pass train_dataloaders or a datamodule. For an evaluation, set the batch size in the evaluation loader"
        )
        raise RoomierError("method", method, "must be 'fit', because only training steps are tried", action)
    others = ("self", "val_dataloaders", "dataloaders", "method", "batch_arg_name")
    return {name: value for name, value in given.items() if name not in others}
