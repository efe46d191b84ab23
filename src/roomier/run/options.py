"""How long a run is and what it does along the way: the Trainer keywords that are not part of the Plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any

import torch

from roomier.core.errors import RoomierError
from roomier.core.paths import check_path
from roomier.core.units import parse_duration_s

DEFAULT_MAX_EPOCHS = 1000
DEFAULT_HANG_TIMEOUT = "00:00:10:00"
MAX_HANG_TIMEOUT_S = 1800.0  # then operations of the process group end by themselves


@dataclass(frozen=True)
class LoopOptions:
    """Checked when made; the names are the Trainer's and mean what Lightning documents."""

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
    val_check_interval: int | float | None = None
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int = 2
    log_every_n_steps: int = 50
    inference_mode: bool = True
    deterministic: bool | str | None = None
    benchmark: bool | None = None
    detect_anomaly: bool = False
    profiler: Any = None
    hang_timeout: str | timedelta | dict[str, int] | None = DEFAULT_HANG_TIMEOUT
    default_root_dir: str | Path | None = None

    def __post_init__(self) -> None:
        for name in ("max_epochs", "min_epochs", "min_steps", "check_val_every_n_epoch"):
            _check_count(name, getattr(self, name), minimum=-1 if name == "max_epochs" else 0, optional=True)
        _check_count("max_steps", self.max_steps, minimum=-1)
        _check_count("num_sanity_val_steps", self.num_sanity_val_steps, minimum=-1)
        _check_count("log_every_n_steps", self.log_every_n_steps, minimum=1)
        self._check_flags()
        for least, most in (("min_epochs", "max_epochs"), ("min_steps", "max_steps")):
            _check_order(least, getattr(self, least), most, getattr(self, most))
        if self.check_val_every_n_epoch == 0:
            raise RoomierError(
                "check_val_every_n_epoch", 0, "is not positive", "Use 1 or more, or None to count batches"
            )
        for stage in ("train", "val", "test", "predict"):
            _check_limit(f"limit_{stage}_batches", getattr(self, f"limit_{stage}_batches"))
        _check_limit("overfit_batches", self.overfit_batches)
        _check_limit("val_check_interval", self.val_check_interval)
        if self.val_check_interval == 0:
            raise RoomierError(
                "val_check_interval", 0, "is not positive", "Use limit_val_batches=0 to turn validation off"
            )
        if self.check_val_every_n_epoch is None and not _is_count(self.val_check_interval):
            raise RoomierError(
                "val_check_interval",
                self.val_check_interval,
                "counts batches across epochs when check_val_every_n_epoch=None",
                "Give it as an integer",
            )
        if not isinstance(self.fast_dev_run, (bool, int)) or self.fast_dev_run < 0:
            raise RoomierError(
                "fast_dev_run", self.fast_dev_run, "is neither a flag nor a count", "Use True or a number"
            )
        if self.max_time is not None:
            parse_duration_s("max_time", self.max_time)
        if self.hang_timeout_s is not None and self.hang_timeout_s > MAX_HANG_TIMEOUT_S:
            problem = "is longer than 30 minutes, after which every collective operation fails"
            raise RoomierError("hang_timeout", self.hang_timeout, problem, "Use '00:00:30:00' or less, or None")
        if self.default_root_dir is not None:
            check_path("default_root_dir", self.default_root_dir)

    def _check_flags(self) -> None:
        for name in ("detect_anomaly", "inference_mode"):
            check_flag(name, getattr(self, name))
        check_flag("benchmark", self.benchmark, optional=True)
        if self.deterministic != "warn" and not isinstance(self.deterministic, (bool, NoneType)):
            raise RoomierError("deterministic", self.deterministic, "is unknown", "Use True, False or 'warn'")
        is_profiler = self.profiler is None or isinstance(self.profiler, torch.profiler.profile)
        if not is_profiler and self.profiler != "torch":
            raise RoomierError(
                "profiler", self.profiler, "is not a profiler", "Use 'torch' or a torch.profiler.profile object"
            )

    @property
    def num_dev_batches(self) -> int:
        """Batches of a fast development run; 0 where it is none."""
        return int(self.fast_dev_run)

    @cached_property
    def max_time_s(self) -> float | None:  # asked at each step
        return None if self.max_time is None else parse_duration_s("max_time", self.max_time)

    @cached_property
    def hang_timeout_s(self) -> float | None:
        return None if self.hang_timeout is None else parse_duration_s("hang_timeout", self.hang_timeout)

    def epoch_limit(self) -> float:
        """The number of epochs after which training ends; infinite where steps or time decide."""
        if self.num_dev_batches:
            return 1
        if self.max_epochs is not None:
            return math.inf if self.max_epochs == -1 else self.max_epochs
        return math.inf if self.is_bounded else DEFAULT_MAX_EPOCHS

    @property
    def is_bounded(self) -> bool:
        """Whether the user said how long to train."""
        return self.max_epochs is not None or self.max_steps != -1 or self.max_time is not None

    def step_limit(self) -> float:
        if self.num_dev_batches:
            return self.num_dev_batches
        return math.inf if self.max_steps == -1 else self.max_steps

    def limit_of(self, stage: str) -> int | float:
        """What bounds the batches of ``stage``, as a number or a fraction."""
        if self.num_dev_batches:
            return self.num_dev_batches
        if stage in ("train", "val") and self.overfit_batches:
            return self.overfit_batches
        limit: int | float | None = getattr(self, f"limit_{stage}_batches")
        return 1.0 if limit is None else limit

    def limit_batches(self, stage: str, num_batches: float) -> float:
        """How many of ``num_batches`` (infinite where unknown) one epoch of ``stage`` takes.

        Raises:
            RoomierError: a fraction of an unknown number was asked for, or of so few that none is left.
        """
        if self.num_dev_batches:
            return min(self.num_dev_batches, num_batches)
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
        """Validation is due after every so many training batches of an epoch; infinite: at its end."""
        interval = self.val_check_interval
        if interval is None or (interval == 1.0 and isinstance(interval, float)):
            return num_train_batches
        if isinstance(interval, int):
            if interval > num_train_batches and self.check_val_every_n_epoch is not None:
                raise RoomierError(
                    "val_check_interval",
                    interval,
                    f"an epoch has only {num_train_batches:.0f} training batches",
                    "Use fewer, or check_val_every_n_epoch=None to count across epochs",
                )
            return interval
        return self._fraction("val_check_interval", interval, num_train_batches)

    @staticmethod
    def _fraction(field: str, fraction: float, num_batches: float) -> float:
        if fraction == 1.0 or fraction == 0.0:
            return num_batches * fraction if math.isfinite(num_batches) else (num_batches if fraction else 0)
        if not math.isfinite(num_batches):
            raise RoomierError(
                field, fraction, "is a fraction of a loader without a length", "Give a number of batches"
            )
        count = int(num_batches * fraction)
        if count == 0:
            raise RoomierError(
                field,
                fraction,
                f"leaves no batch of {num_batches:.0f}",
                f"Use at least {1 / num_batches:.3g}, or a number of batches",
            )
        return count


def check_flag(field: str, value: object, *, optional: bool = False) -> None:
    """Refuse what is neither True nor False: ``"no"`` would count as True.

    Raises:
        RoomierError: says so.
    """
    if not isinstance(value, bool) and not (optional and value is None):
        raise RoomierError(field, value, "is not a flag", f"Use True or False{', or None' if optional else ''}")


def _check_order(least: str, minimum: int | None, most: str, maximum: int | None) -> None:
    if minimum is not None and maximum is not None and maximum != -1 and minimum > maximum:
        raise RoomierError(least, minimum, f"is more than {most}={maximum}", f"Lower it, or raise {most}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_count(field: str, value: object, *, minimum: int, optional: bool = False) -> None:
    if value is None and optional:
        return
    if not _is_count(value) or value < minimum:  # type: ignore[operator]
        none = ", or None" if optional else ""
        raise RoomierError(field, value, "is not a number it can be", f"Use an integer of {minimum} or more{none}")


def _check_limit(field: str, value: object) -> None:
    if value is None:
        return
    is_fraction = isinstance(value, float) and 0.0 <= value <= 1.0
    if not is_fraction and not (_is_count(value) and value >= 0):  # type: ignore[operator]
        raise RoomierError(
            field, value, "is neither a count nor a fraction", "Use an integer of 0 or more, or a float in [0.0, 1.0]"
        )
