"""When learning-rate schedulers step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch.optim.lr_scheduler import OneCycleLR

from roomier.api.module import Module
from roomier.api.overrides import overrides
from roomier.core.errors import CheckpointError, TrainingError, did_you_mean
from roomier.core.log import notice
from roomier.optim.configured import LRSchedulerConfig
from roomier.optim.schedule import go_on
from roomier.optim.scheduler_form import check_scheduler
from roomier.run.logged.results import Results

LENGTHS = ("T_max", "total_steps", "total_iters", "lr_lambdas")  # where torch keeps how long one goes on


class Schedulers:
    """The schedulers of a run, stepped as their configuration says."""

    def __init__(self, module: Module, configs: Sequence[LRSchedulerConfig]) -> None:
        self.configs = list(configs)
        self._module = module
        self._calls_module = overrides(module, "lr_scheduler_step", Module)
        self.are_there = bool(self.configs) and module.automatic_optimization  # else training_step steps them
        self.watch_each_step = self.are_there and any(
            config.interval == "step" and config.reduce_on_plateau for config in self.configs
        )

    def step(self, interval: Literal["step", "epoch"], count: int, results: Results, *, watching: bool = False) -> None:
        """Step those whose turn it is.

        Args:
            count: for ``"epoch"`` epochs done; for ``"step"`` micro-batches of the epoch done, as in Lightning.
            results: hold what a scheduler may watch.
            watching: those that watch a metric, which has to be there; else the others.
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
                    self._miss(config, metrics)
                    continue
                metric = metrics[config.monitor]
            if self._calls_module:
                self._module.lr_scheduler_step(config.scheduler, metric)
            elif metric is None:
                _step(config.scheduler)
            else:
                config.scheduler.step(metric)

    @staticmethod
    def _miss(config: LRSchedulerConfig, metrics: Mapping[str, Any]) -> None:
        problem = f"{type(config.scheduler).__name__} watches it, but nothing of that name was logged"
        action = did_you_mean(str(config.monitor), metrics) if metrics else "Log it with self.log before it is needed"
        if config.strict:
            raise TrainingError("monitor", config.monitor, problem, action)
        notice(f"monitor={config.monitor!r}: {problem}; the scheduler does not step")

    def state(self) -> list[dict[str, Any]]:
        return [
            {"type": type(config.scheduler).__name__, "state": _plain(config.scheduler.state_dict())}
            for config in self.configs
        ]

    def check(self, states: Sequence[Mapping[str, Any]], optimizers: Sequence[Mapping[str, Any]]) -> None:
        """Check that ``states`` are states of these schedulers.

        Args:
            optimizers: the stored states of the optimizers, whose tensors need not be read yet.

        Raises:
            CheckpointError: they are of other schedulers.
            FormError: a value is malformed.
        """
        now, then = [type(config.scheduler).__name__ for config in self.configs], [each["type"] for each in states]
        if now != then:
            raise CheckpointError(
                "lr_scheduler",
                now,
                f"the checkpoint holds the states of {then}",
                "Configure the schedulers as in the run that was saved, or load the weights alone",
            )
        groups = [group for each in optimizers for group in each["param_groups"]]
        for index, (config, saved) in enumerate(zip(self.configs, states, strict=True)):
            check_scheduler(config.scheduler, saved["state"], groups, f"schedulers[{index}].state")

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from ``states``, as they were saved: with the lengths they had."""
        for config, saved in zip(self.configs, states, strict=True):
            _tell_other_length(config.scheduler, saved["state"])
            config.scheduler.load_state_dict(saved["state"])

    def load_planned(self, states: Sequence[Mapping[str, Any]], num_steps: float, *, is_cut_anew: bool) -> None:
        """Go on from ``states`` with the schedule the Plan names, to the end of this run.

        Args:
            num_steps: optimizer steps of the whole run, those done in its earlier parts included.
            is_cut_anew: the batches of an epoch make another number of steps than before.
        """
        for config, saved in zip(self.configs, states, strict=True):
            # Steps that a None for a loss left out are not to make the schedule of the same run a shorter one.
            made_for, was_made_for = (
                each["lr_lambdas"][0]["num_steps"] for each in (config.scheduler.state_dict(), saved["state"])
            )
            is_other = is_cut_anew or made_for != was_made_for
            go_on(config.scheduler, saved["state"], num_steps if is_other else None)


def _step(scheduler: Any) -> None:
    try:
        scheduler.step()
    except ValueError as error:
        if not isinstance(scheduler, OneCycleLR):
            raise
        raise TrainingError(
            "lr_scheduler",
            "OneCycleLR",
            f"was made for total_steps={scheduler.total_steps} and is at its end, but training goes on",
            "Make it with total_steps=self.trainer.estimated_stepping_batches and interval='step'. A resumed run has "
            "the length in its checkpoint: to train for longer, start a new fit from the weights",
        ) from error


def _tell_other_length(scheduler: Any, saved: Mapping[str, Any]) -> None:
    # torch puts these back with the rest: a cosine that was at its end stays at zero for all of a longer run.
    now = scheduler.state_dict()
    for name in LENGTHS:
        if name in saved and repr(saved[name]) != repr(now.get(name)):
            notice(
                f"{type(scheduler).__name__} goes on as the checkpoint has it, {name}={saved[name]}, and not as it was "
                f"made now, {name}={now.get(name)}; for another schedule start a new fit from the weights"
            )


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    # Bound methods in a scheduler's __dict__ are made anew when it is built; a checkpoint holds data only.
    return {key: value for key, value in state.items() if not callable(value)}
