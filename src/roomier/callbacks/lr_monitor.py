"""LearningRateMonitor: callback that logs the learning rates of a run."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.callbacks.monitored import RequiresLogger
from roomier.core.errors import RoomierError
from roomier.core.keywords import explain_unknown_keywords
from roomier.run.run import run_of

_INTERVALS = (None, "step", "epoch")


class LearningRateMonitor(RequiresLogger):
    """Callback that logs the learning rate that each optimizer uses in the logged step or epoch.

    The metric names are the same as in Lightning:

    - ``lr-AdamW`` is the rate of an AdamW optimizer, and ``lr-AdamW-1`` is the rate of the second AdamW optimizer.
    - ``lr-AdamW/pg1`` and ``lr-AdamW/pg2`` are the rates of the first and the second parameter group. If a group has
      the key ``name``, the metric of the group is ``lr-AdamW/<name>``.
    - The ``name`` of a scheduler replaces ``lr-AdamW``.
    - The names of the momentum and the weight decay have the suffixes ``-momentum`` and ``-weight_decay``.

    Args:
        logging_interval: ``"step"`` (at log steps) or ``"epoch"``. The default is the interval of the scheduler. As in
            Lightning, the default for an optimizer without a scheduler is both.
        log_momentum: if True, also log the momentum (the first value of ``betas``), which is 0 if the optimizer has no
            momentum.
        log_weight_decay: if True, also log the weight decay.

    Attributes:
        lrs: all recorded learning rates of each metric. The rate of an epoch is recorded at its start.
        last_momentum_values, last_weight_decay_values: last recorded value of each metric; None if there is none.

    Raises:
        RoomierError: ``logging_interval`` is unknown. The error is also raised when training starts if the Trainer has
            no logger, or if two parameter groups of an optimizer have the same name.

    Example:
        >>> trainer = roomier.Trainer(callbacks=[LearningRateMonitor("step")])
    """

    reads_parameters = False

    @explain_unknown_keywords("callbacks.LearningRateMonitor")
    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        if logging_interval not in _INTERVALS:
            raise RoomierError("logging_interval", logging_interval, "is unknown", "Use 'step', 'epoch', or None")
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, float | None] = {}
        self.last_weight_decay_values: dict[str, float | None] = {}
        self._step_rates: dict[str, float] = {}
        self._read_at_step = 0
        self._logged: tuple[int, dict[str, float]] = (-1, {})  # the last step with a row, and the values of this row
        self._epoch_rates: dict[str, float] = {}

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._logged = (-1, {})
        names = [f"{name}{suffix}" for _, name, _, suffixes in _named_optimizers(trainer) for suffix in suffixes]
        self.last_momentum_values = {f"{name}-momentum": None for name in names}
        self.last_weight_decay_values = {f"{name}-weight_decay": None for name in names}
        # A run that resumes within an epoch does not call on_train_epoch_start, so the current rate is read here.
        self._epoch_rates = self._rates(trainer, "epoch")

    def on_train_epoch_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._epoch_rates = self._rates(trainer, "epoch")
        self._record(trainer, self._epoch_rates)

    def on_train_batch_start(self, trainer: TrainerView, pl_module: Module, batch: Any, batch_idx: int) -> None:
        # Schedulers step before on_train_batch_end, so the learning rate of the current step is read in this hook.
        step = run_of(trainer, "lrs").log_step
        if (step + 1) % trainer.log_every_n_steps == 0:
            self._step_rates, self._read_at_step = self._rates(trainer, "step"), step

    def on_train_batch_end(self, trainer: TrainerView, pl_module: Module, *_: Any, **__: Any) -> None:
        step = run_of(trainer, "lrs").log_step
        if self._step_rates and step > self._read_at_step:
            self._logged, self._step_rates = (step, self._step_rates), {}
            self._record(trainer, self._logged[1])
            trainer.log_metrics(self._logged[1])

    def on_train_epoch_end(self, trainer: TrainerView, pl_module: Module) -> None:
        step, of_step = self._logged
        in_row = of_step if step == run_of(trainer, "lrs").log_step else {}
        rates = {name: rate for name, rate in self._epoch_rates.items() if name not in in_row}
        if rates:
            trainer.log_metrics(rates)

    def _record(self, trainer: TrainerView, rates: dict[str, float]) -> None:
        for name, rate in rates.items():
            if name.endswith("-momentum"):
                self.last_momentum_values[name] = rate
            elif name.endswith("-weight_decay"):
                self.last_weight_decay_values[name] = rate
            else:
                self.lrs.setdefault(name, []).append(rate)
        trainer.callback_metrics.update({name: torch.tensor(rate) for name, rate in rates.items()})

    def _rates(self, trainer: TrainerView, interval: str) -> dict[str, float]:
        """Return the current values of all optimizers that are logged at ``interval``."""
        rates: dict[str, float] = {}
        for optimizer, name, own_interval, suffixes in _named_optimizers(trainer):
            if (self.logging_interval or own_interval or interval) != interval:
                continue
            if name in self.lrs and name + suffixes[0] != name:  # groups were added: the first one keeps its rates
                self.lrs[name + suffixes[0]] = self.lrs.pop(name)
            for group, suffix in zip(optimizer.param_groups, suffixes, strict=True):
                full_name = name + suffix
                rates[full_name] = float(group["lr"])
                if self.log_momentum:
                    momentum = group["betas"][0] if "betas" in group else group.get("momentum", 0.0)
                    rates[f"{full_name}-momentum"] = float(momentum)
                if self.log_weight_decay:
                    rates[f"{full_name}-weight_decay"] = float(group.get("weight_decay", 0.0))
        return rates


def _named_optimizers(trainer: TrainerView) -> list[tuple[Optimizer, str, str | None, list[str]]]:
    """Return each optimizer with its name, the interval of its scheduler, and the suffixes of its parameter groups.
    Optimizers with a scheduler come first."""
    seen: Counter[str] = Counter()
    named: list[tuple[Optimizer, str, str | None, list[str]]] = []

    def add(optimizer: Optimizer, name: str | None, interval: str | None) -> None:
        if name is None:
            name = f"lr-{type(optimizer).__name__}"
            seen[name] += 1
            if seen[name] > 1:
                name = f"{name}-{seen[name] - 1}"
        named.append((optimizer, name, interval, _group_suffixes(name, optimizer)))

    for config in trainer.lr_scheduler_configs:
        if all(config.scheduler.optimizer is not optimizer for optimizer, *_ in named):
            add(config.scheduler.optimizer, config.name, config.interval)
    for optimizer in trainer.optimizers:
        if all(optimizer is not known for known, *_ in named):
            add(optimizer, None, None)
    return named


def _group_suffixes(name: str, optimizer: Optimizer) -> list[str]:
    groups = optimizer.param_groups
    if len(groups) == 1:
        return [f"/{groups[0]['name']}" if groups[0].get("name") else ""]
    suffixes = [f"/{group.get('name') or f'pg{number}'}" for number, group in enumerate(groups, start=1)]
    doubles = [suffix for suffix, count in Counter(suffixes).items() if count > 1]
    if doubles:
        problem = f"is the name of two parameter groups of {name}"
        raise RoomierError("configure_optimizers", doubles[0][1:], problem, "Give each group a different 'name'")
    return suffixes
