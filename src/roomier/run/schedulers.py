"""Stepping of learning rate schedulers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch.optim.lr_scheduler import OneCycleLR

from roomier.api.module import Module
from roomier.api.overrides import overrides
from roomier.core.errors import CheckpointError, TrainingError, did_you_mean
from roomier.core.log import notice
from roomier.run.logged.results import Results
from roomier.techniques.optim.configured import LRSchedulerConfig
from roomier.techniques.optim.schedule import check_scheduler, continue_schedule

LENGTHS = ("T_max", "total_steps", "total_iters", "lr_lambdas")  # attributes in which torch stores the schedule length


class Schedulers:
    """The schedulers of a run, which step at the intervals in their configuration.

    Args:
        module: module whose ``lr_scheduler_step`` is called if it is overridden.
        configs: the schedulers and their intervals.

    Attributes:
        configs: the schedulers and their intervals.
        are_there: True if the loop steps schedulers. False if there are no schedulers, or with manual optimization.
        watch_each_step: True if a scheduler with interval "step" monitors a metric.
    """

    def __init__(self, module: Module, configs: Sequence[LRSchedulerConfig]) -> None:
        self.configs = list(configs)
        self._module = module
        self._calls_module = overrides(module, "lr_scheduler_step", Module)
        self.are_there = bool(self.configs) and module.automatic_optimization  # otherwise training_step steps them
        self.watch_each_step = self.are_there and any(
            config.interval == "step" and config.reduce_on_plateau for config in self.configs
        )

    def step(self, interval: Literal["step", "epoch"], count: int, results: Results, *, watching: bool = False) -> None:
        """Step the schedulers that are due.

        Args:
            interval: the interval of the schedulers to step.
            count: number of completed epochs for ``"epoch"``, and number of completed micro-batches of the epoch for
                ``"step"``, as in Lightning.
            results: the logged values, which contain the metrics that schedulers monitor.
            watching: True to step only schedulers that monitor a metric; False to step only the other schedulers.

        Raises:
            TrainingError: a monitored metric was not logged, or a scheduler has reached its end.
        """
        if not self.are_there:
            return
        for config in self.configs:
            if config.interval != interval or config.reduce_on_plateau != watching or count % config.frequency:
                continue
            metric = None
            if config.reduce_on_plateau:
                results.settle()
                metrics = results.callback_metrics
                if config.monitor not in metrics:
                    self._report_missing(config, metrics)
                    continue
                metric = metrics[config.monitor]
            if self._calls_module:
                self._module.lr_scheduler_step(config.scheduler, metric)
            elif metric is None:
                _step(config.scheduler)
            else:
                config.scheduler.step(metric)

    @staticmethod
    def _report_missing(config: LRSchedulerConfig, metrics: Mapping[str, Any]) -> None:
        problem = f"{type(config.scheduler).__name__} monitors this metric, but it was not logged"
        action = did_you_mean(str(config.monitor), metrics) if metrics else "Log it with self.log before it is used"
        if config.strict:
            raise TrainingError("monitor", config.monitor, problem, action)
        notice(f"monitor={config.monitor!r}: {problem}. The scheduler does not step")

    def state(self) -> list[dict[str, Any]]:
        """Return the types and states of the schedulers as plain data."""
        return [
            {"type": type(config.scheduler).__name__, "state": _plain(config.scheduler.state_dict())}
            for config in self.configs
        ]

    def check(self, states: Sequence[Mapping[str, Any]], optimizers: Sequence[Mapping[str, Any]]) -> None:
        """Check that ``states`` belong to these schedulers.

        Args:
            states: values of :meth:`state`.
            optimizers: stored states of the optimizers. The tensors in these states do not need to be loaded.

        Raises:
            CheckpointError: the states belong to different schedulers.
            FormError: a value is malformed.
        """
        now, then = [type(config.scheduler).__name__ for config in self.configs], [each["type"] for each in states]
        if now != then:
            action = "Configure the schedulers as in the saved run, or load only the weights"
            raise CheckpointError("lr_scheduler", now, f"the checkpoint contains the states of {then}", action)
        groups = [group for each in optimizers for group in each["param_groups"]]
        for index, (config, saved) in enumerate(zip(self.configs, states, strict=True)):
            check_scheduler(config.scheduler, saved["state"], groups, f"schedulers[{index}].state")

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore ``states`` and the lengths of the schedules."""
        for config, saved in zip(self.configs, states, strict=True):
            _report_other_length(config.scheduler, saved["state"])
            config.scheduler.load_state_dict(saved["state"])

    def load_planned(
        self, states: Sequence[Mapping[str, Any]], num_steps: float, *, has_other_step_count: bool
    ) -> None:
        """Restore ``states``. Until the end of this run, the schedule follows the Plan.

        Args:
            states: values of :meth:`state`.
            num_steps: number of optimizer steps in the full run, including completed steps.
            has_other_step_count: True if the number of optimizer steps per epoch differs from the number in the saved
                run.
        """
        for config, saved in zip(self.configs, states, strict=True):
            # Steps without a loss are skipped. Skipped steps must not shorten the schedule when the same run resumes.
            made_for, was_made_for = (
                each["lr_lambdas"][0]["num_steps"] for each in (config.scheduler.state_dict(), saved["state"])
            )
            is_other = has_other_step_count or made_for != was_made_for
            continue_schedule(config.scheduler, saved["state"], num_steps if is_other else None)


def _step(scheduler: Any) -> None:
    try:
        scheduler.step()
    except ValueError as error:
        if not isinstance(scheduler, OneCycleLR):
            raise
        raise TrainingError(
            "lr_scheduler",
            "OneCycleLR",
            f"has reached total_steps={scheduler.total_steps}, but training continues",
            "Create it with total_steps=self.trainer.estimated_stepping_batches and interval='step'. A resumed run "
            "uses the length in its checkpoint. To train longer, start a new fit from the weights",
        ) from error


def _report_other_length(scheduler: Any, saved: Mapping[str, Any]) -> None:
    # torch restores the schedule length together with the state. In a longer run, the schedule therefore ends early.
    now = _plain(scheduler.state_dict())
    for name in LENGTHS:
        if name in saved and repr(saved[name]) != repr(now.get(name)):
            notice(
                f"{type(scheduler).__name__} resumes with {name}={saved[name]} from the checkpoint, instead of "
                f"{name}={now.get(name)}. For a different schedule, start a new fit from the weights"
            )


def _plain(state: dict[str, Any] | None) -> dict[str, Any]:
    # Bound methods in the __dict__ of a scheduler are recreated together with the scheduler. A checkpoint contains only
    # data. A custom scheduler may have no state.
    return {key: value for key, value in (state or {}).items() if not callable(value)}
