"""Length and settings of a run: the arguments of the Trainer that are not part of the Plan."""

from __future__ import annotations

import cProfile
import io
import math
import pstats
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any

import torch

from roomier.checkpoint.commit import at_home
from roomier.core.errors import RoomierError, check_integer
from roomier.core.units import parse_duration_s

DEFAULT_MAX_EPOCHS = 1000
DEFAULT_HANG_TIMEOUT = "00:00:10:00"
MAX_HANG_TIMEOUT_S = 1800.0  # timeout of the collectives in the process group


@dataclass(frozen=True)
class LoopOptions:
    """Settings of the loops. Each setting has the name of an argument of the Trainer. The settings are validated at
    construction.

    Attributes:
        max_epochs, min_epochs, max_steps, min_steps, max_time: limits on the length of a fit. -1 means unlimited.
        limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches: number or fraction of batches
            per epoch. None means all.
        overfit_batches: number or fraction of the batches that training and validation use, each from its own loaders.
        fast_dev_run: number of batches of a development run. True means 1.
        val_check_interval: number or fraction of training batches between two validations, or the time between them.
        check_val_every_n_epoch: number of epochs between two validations. With None, ``val_check_interval`` counts
            batches across epochs.
        num_sanity_val_steps: number of validation batches before training. -1 means all.
        log_every_n_steps: number of optimizer steps between two logged rows.
        reload_dataloaders_every_n_epochs: number of epochs after which the loaders are created again. 0 means never.
        inference_mode: if True, run evaluations in ``torch.inference_mode`` instead of ``torch.no_grad``.
        deterministic: if True, use deterministic algorithms. ``"warn"`` warns about operations that have no
            deterministic algorithm.
        benchmark: value of ``torch.backends.cudnn.benchmark``; None leaves the current value unchanged.
        detect_anomaly: if True, find the forward operation that causes NaN in the backward pass.
        enable_plan_table: if True, print the Plan at the start of a fit. None means True.
        profiler: name of a profiler, a ``torch.profiler.profile``, or an object with a method ``profile(name)``.
        hang_timeout: time without progress after which the ranks print a report and exit. None disables the check.
        default_root_dir: folder or address that contains the run folders.
        upload_errors: ``"raise"`` if a failed upload to remote storage ends the fit.

    Raises:
        RoomierError: a value is invalid, or two values contradict each other.
    """

    max_epochs: int | None = None
    min_epochs: int | None = None
    max_steps: int = -1
    min_steps: int | None = None
    max_time: str | timedelta | dict[str, int] | None = None
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    limit_test_batches: int | float | None = None
    limit_predict_batches: int | float | None = None
    overfit_batches: int | float = 0.0
    fast_dev_run: int | bool = False
    val_check_interval: int | float | str | timedelta | dict[str, int] | None = None
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int | float = 2
    log_every_n_steps: int = 50
    reload_dataloaders_every_n_epochs: int = 0
    inference_mode: bool = True
    deterministic: bool | str | None = None
    benchmark: bool | None = None
    detect_anomaly: bool = False
    enable_plan_table: bool | None = None
    profiler: Any = None
    hang_timeout: str | timedelta | dict[str, int] | None = DEFAULT_HANG_TIMEOUT
    default_root_dir: str | Path | None = None
    upload_errors: str = "warn"

    def __post_init__(self) -> None:
        for name, minimum in (("max_epochs", -1), ("min_epochs", 0), ("min_steps", 0), ("check_val_every_n_epoch", 0)):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), minimum, f"Use an integer of {minimum} or more, or None")
        check_integer("max_steps", self.max_steps, -1, "Use an integer of -1 or more")
        if self.num_sanity_val_steps != math.inf:
            check_integer("num_sanity_val_steps", self.num_sanity_val_steps, -1, "Use an integer of -1 or more")
        check_integer("log_every_n_steps", self.log_every_n_steps, 1, "Use an integer of 1 or more")
        reloads = self.reload_dataloaders_every_n_epochs
        check_integer("reload_dataloaders_every_n_epochs", reloads, 0, "Use an integer of 0 or more")
        self._check_flags()
        for least, most in (("min_epochs", "max_epochs"), ("min_steps", "max_steps")):
            _check_order(least, getattr(self, least), most, getattr(self, most))
        if self.check_val_every_n_epoch == 0:
            raise RoomierError(
                "check_val_every_n_epoch", 0, "must be at least 1", "Use 1 or more, or None to count batches"
            )
        for stage in ("train", "val", "test", "predict"):
            _check_limit(f"limit_{stage}_batches", getattr(self, f"limit_{stage}_batches"))
        _check_limit("overfit_batches", self.overfit_batches)
        if self.val_check_interval_s is None:
            _check_limit("val_check_interval", self.val_check_interval)
        if self.val_check_interval == 0:
            raise RoomierError(
                "val_check_interval", 0, "must be positive", "Use limit_val_batches=0 to disable validation"
            )
        if self.check_val_every_n_epoch is None and isinstance(self.val_check_interval, (bool, float, NoneType)):
            problem = "must be an integer or a time if check_val_every_n_epoch=None, because it counts across epochs"
            raise RoomierError("val_check_interval", self.val_check_interval, problem, "Set it to a number of batches")
        if not isinstance(self.fast_dev_run, (bool, int)) or self.fast_dev_run < 0:
            raise RoomierError(
                "fast_dev_run", self.fast_dev_run, "must be a bool or a number of batches", "Use True or a number"
            )
        if self.max_time is not None:
            parse_duration_s("max_time", self.max_time)
        if self.hang_timeout_s is not None and self.hang_timeout_s > MAX_HANG_TIMEOUT_S:
            problem = "must be at most 30 minutes, after which every collective operation fails"
            raise RoomierError("hang_timeout", self.hang_timeout, problem, "Use '00:00:30:00' or less, or None")
        if self.default_root_dir is not None:
            at_home(self.default_root_dir, "default_root_dir")
        if self.upload_errors not in ("warn", "raise"):
            raise RoomierError("upload_errors", self.upload_errors, "is unknown", "Use 'warn' or 'raise'")
        object.__setattr__(self, "_given", {name: getattr(self, name) for name in self.__dataclass_fields__})
        for name, value in self._implied().items():
            object.__setattr__(self, name, value)

    def changed(self, name: str, value: Any) -> LoopOptions:
        """Return options with a different value of the argument ``name``. Values that other arguments determine are
        determined again."""
        return LoopOptions(**{**self.__dict__["_given"], name: value})

    def _implied(self) -> dict[str, Any]:
        """Return the values of arguments that other arguments determine. The Trainer shows them, as in Lightning."""
        implied: dict[str, Any] = {}
        if self.num_sanity_val_steps == -1:
            implied["num_sanity_val_steps"] = math.inf
        if self.max_epochs is None and (self.max_steps != -1 or self.max_time is not None):
            implied["max_epochs"] = -1
        if number := self.num_dev_batches:
            stages = ("test", "predict") if self.overfit_batches else ("train", "val", "test", "predict")
            implied |= {f"limit_{stage}_batches": number for stage in stages}
            implied |= {"fast_dev_run": True if number == 1 else number, "max_epochs": 1, "max_steps": number}
            implied |= {"min_epochs": None, "min_steps": None, "num_sanity_val_steps": 0}
            implied |= {"val_check_interval": None, "check_val_every_n_epoch": 1}
        return implied

    def _check_flags(self) -> None:
        check_flag("enable_plan_table", self.enable_plan_table, optional=True)
        for name in ("detect_anomaly", "inference_mode"):
            check_flag(name, getattr(self, name))
        check_flag("benchmark", self.benchmark, optional=True)
        if self.deterministic != "warn" and not isinstance(self.deterministic, (bool, NoneType)):
            raise RoomierError(
                "deterministic", self.deterministic, "must be a bool or 'warn'", "Use True, False or 'warn'"
            )
        if self.profiler is not None:
            object.__setattr__(self, "profiler", profiler_of(self.profiler))

    @property
    def num_dev_batches(self) -> int:
        """Number of batches of a fast development run; 0 if the fast development run is disabled."""
        return int(self.fast_dev_run)

    @cached_property
    def max_time_s(self) -> float | None:  # cached, because each step reads it
        """Maximum time of a fit in seconds; None if the time is unlimited."""
        return None if self.max_time is None else parse_duration_s("max_time", self.max_time)

    @property
    def val_check_interval_s(self) -> float | None:
        """Time in seconds between two validations; None if ``val_check_interval`` counts batches."""
        interval = self.val_check_interval
        return (
            parse_duration_s("val_check_interval", interval) if isinstance(interval, (str, dict, timedelta)) else None
        )

    @cached_property
    def hang_timeout_s(self) -> float | None:
        """Time in seconds without progress after which a run is aborted; None if this timeout is disabled."""
        return None if self.hang_timeout is None else parse_duration_s("hang_timeout", self.hang_timeout)

    def epoch_limit(self) -> float:
        """Return the number of epochs after which training ends; infinite if the number of epochs is not limited."""
        if self.max_epochs is None:
            return DEFAULT_MAX_EPOCHS
        return math.inf if self.max_epochs == -1 else self.max_epochs

    @property
    def is_bounded(self) -> bool:
        """True if the user limited the number of epochs, the number of steps or the time."""
        return self.max_epochs is not None

    def step_limit(self) -> float:
        """Return the number of optimizer steps after which training ends; infinite if the number of steps is not
        limited."""
        return math.inf if self.max_steps == -1 else self.max_steps

    def limit_of(self, stage: str) -> int | float:
        """Return the limit on batches in ``stage``, as a number or a fraction."""
        if stage in ("train", "val") and self.overfit_batches:
            return self.overfit_batches
        limit: int | float | None = getattr(self, f"limit_{stage}_batches")
        return 1.0 if limit is None else limit

    def limit_batches(self, stage: str, num_batches: float) -> float:
        """Return the number of batches to use in one epoch of ``stage``. ``num_batches`` is the number of available
        batches, or infinity if this number is unknown.

        Raises:
            RoomierError: the limit is a fraction, and the number of batches is unknown or too small for the fraction.
        """
        field = f"limit_{stage}_batches"
        limit = getattr(self, field)
        if stage in ("train", "val") and self.overfit_batches:
            field, limit = "overfit_batches", self.overfit_batches
        if limit is None:
            return num_batches
        if isinstance(limit, int):
            return min(limit, num_batches)
        return self._fraction(field, limit, num_batches)

    def val_interval(self, num_train_batches: float) -> float:
        """Return the number of training batches between two validations. Infinity means that validation runs at the end
        of the epoch, and 0 that the interval is a time.

        Raises:
            RoomierError: the interval is longer than an epoch or shorter than one batch, or it is a fraction and the
                number of batches is unknown.
        """
        interval = self.val_check_interval
        if isinstance(interval, (str, dict, timedelta)):
            return 0
        if interval is None or (interval == 1.0 and isinstance(interval, float)):
            return num_train_batches
        if isinstance(interval, int):
            if interval > num_train_batches and self.check_val_every_n_epoch is not None:
                problem = f"must be at most the number of training batches per epoch ({num_train_batches:.0f})"
                action = "Use a smaller number, or check_val_every_n_epoch=None to count across epochs"
                raise RoomierError("val_check_interval", interval, problem, action)
            return interval
        return self._fraction("val_check_interval", interval, num_train_batches)

    @staticmethod
    def _fraction(field: str, fraction: float, num_batches: float) -> float:
        if fraction == 1.0 or fraction == 0.0:
            return num_batches * fraction if math.isfinite(num_batches) else (num_batches if fraction else 0)
        if not math.isfinite(num_batches):
            raise RoomierError(
                field, fraction, "is a fraction, but the loader has no length", "Set it to a number of batches"
            )
        count = int(num_batches * fraction)
        if count == 0:
            batches = "1 batch" if num_batches == 1 else f"{num_batches:.0f} batches"
            problem = f"is less than one batch, because the loader has only {batches}"
            raise RoomierError(field, fraction, problem, f"Use at least {1 / num_batches:.3g}, or a number of batches")
        return count


def check_flag(field: str, value: object, *, optional: bool = False) -> None:
    """Check that ``value`` is True or False. Other values are rejected, because ``"no"`` would be treated as True.

    Raises:
        RoomierError: the value is not a bool.
    """
    if not isinstance(value, bool) and not (optional and value is None):
        raise RoomierError(field, value, "must be a bool", f"Use True or False{', or None' if optional else ''}")


def _check_order(least: str, minimum: int | None, most: str, maximum: int | None) -> None:
    if minimum is not None and maximum is not None and maximum != -1 and minimum > maximum:
        raise RoomierError(least, minimum, f"must be at most {most}={maximum}", f"Lower it, or raise {most}")


def _check_limit(field: str, value: object) -> None:
    if value is None:
        return
    is_fraction = isinstance(value, float) and 0.0 <= value <= 1.0
    if not is_fraction and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        problem = "must be a number of batches or a fraction"
        raise RoomierError(field, value, problem, "Use an integer of 0 or more, or a float in [0.0, 1.0]")


_NAMES = ("simple", "advanced", "pytorch", "torch")
_LINES = 40  # maximum number of functions in each report of "advanced"


class SimpleProfiler:
    """Profiler that measures the duration of each action on the host: reading batches, steps, updates and hooks.

    ``with trainer.profiler.profile(name)`` measures an action of the user's code.

    Attributes:
        durations_s: durations of each action in seconds, in the order in which the actions ended.
    """

    def __init__(self) -> None:
        self.durations_s: dict[str, list[float]] = {}
        self._start_s = 0.0

    def start_run(self) -> None:
        """Discard earlier durations. The total time in the report starts at this call."""
        self.durations_s.clear()
        self._start_s = time.perf_counter()

    @contextmanager
    def profile(self, action_name: str) -> Iterator[None]:
        """Measure an action. The duration of an action includes nested actions."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.durations_s.setdefault(action_name, []).append(time.perf_counter() - start_s)

    def summary(self) -> str:
        """Return a table with one line per action. The action with the longest total time is first."""
        total_s = max(time.perf_counter() - self._start_s, 1e-9)
        rows = sorted(((sum(all_s), len(all_s), name) for name, all_s in self.durations_s.items()), reverse=True)
        lines = [f"{'action':60} {'calls':>8} {'mean':>11} {'total':>11} {'share':>7}"]
        lines += [
            f"{name:60} {calls:8d} {own_s / calls * 1e3:8.3f} ms {own_s:9.3f} s {own_s / total_s:7.1%}"
            for own_s, calls, name in rows
        ]
        return "\n".join([*lines, f"{'the call':60} {'':8} {'':11} {total_s:9.3f} s"])


class AdvancedProfiler:
    """Profiler that measures all Python functions of this process with cProfile. Each action has one report of the
    functions that it calls.

    Attributes:
        reports: the profile of each action.
    """

    def __init__(self) -> None:
        self.reports: dict[str, cProfile.Profile] = {}
        self._is_active = False

    def __reduce__(self) -> tuple[type[AdvancedProfiler], tuple[()]]:
        return AdvancedProfiler, ()  # a profile of cProfile cannot be copied

    def start_run(self) -> None:
        """Discard earlier profiles."""
        self.reports.clear()

    @contextmanager
    def profile(self, action_name: str) -> Iterator[None]:
        """Profile an action. A nested action is part of the outer action, because cProfile cannot run two profiles at
        the same time."""
        if self._is_active:
            yield
            return
        report = self.reports.setdefault(action_name, cProfile.Profile())
        self._is_active = True
        report.enable()
        try:
            yield
        finally:
            report.disable()
            self._is_active = False

    def summary(self) -> str:
        """Return a report for each action: the functions that it called, in descending order of cumulative time."""
        texts = []
        for name, report in self.reports.items():
            text = io.StringIO()
            pstats.Stats(report, stream=text).strip_dirs().sort_stats("cumulative").print_stats(_LINES)
            texts.append(f"{name}\n{text.getvalue().strip()}\n")
        return "\n".join(texts)


def profiler_of(value: Any) -> Any:
    """Return the profiler for the ``profiler`` argument of the Trainer.

    Raises:
        RoomierError: the value is neither a known name nor a profiler.
    """
    if value == "simple":
        return SimpleProfiler()
    if value == "advanced":
        return AdvancedProfiler()
    if isinstance(value, str) and value in _NAMES:
        return value
    is_class = isinstance(value, type)
    if isinstance(value, torch.profiler.profile) or (callable(getattr(value, "profile", None)) and not is_class):
        return value
    action = "Use 'simple', 'advanced', 'pytorch', a torch.profiler.profile object, or a Lightning profiler"
    raise RoomierError("profiler", value, "is not a known profiler", action)
