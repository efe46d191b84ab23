"""HistogramMonitor: callback that logs histograms of the weights and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.callbacks.monitored import RequiresLogger
from roomier.core.errors import RoomierError, check_integer
from roomier.core.sharded import local_part
from roomier.loggers.group import takes
from roomier.loggers.histogram import edges_of
from roomier.run.run import run_of
from roomier.run.visuals import Look, histograms


class HistogramMonitor(RequiresLogger):
    """Callback that logs a histogram of each trained parameter (``weights/<name>``) and of its gradient
    (``gradients/<name>``) every ``every_n_steps`` steps.

    The counts cover the complete tensors, even if a strategy shards them across ranks or offloads them. Gradients are
    the gradients of the full batch before clipping, without the loss scale. Values that are not finite are not counted.
    Between these steps, the callback reads no tensors and does not wait for the device.

    Args:
        every_n_steps: number of optimizer steps between two histograms.
        weights: if True, log the weights after the update.
        gradients: if True, log the gradients. Must be False if each gradient is freed during the backward pass
            (``step_in_backward``).
        bins: number of bins of equal width between the smallest and the largest value, or the edges of the bins.
        include: pattern of parameter names, or several patterns, such as ``"*.attention.*"``.

    Raises:
        RoomierError: an argument is invalid. The error is also raised when a fit starts if the Trainer has no logger,
            no name matches ``include``, or the Plan frees gradients during the backward pass.

    Example:
        >>> trainer = roomier.Trainer(callbacks=[HistogramMonitor(every_n_steps=500)])
    """

    reads_parameters = False
    without_gradients = "Use HistogramMonitor(gradients=False)"

    def __init__(
        self,
        every_n_steps: int = 100,
        *,
        weights: bool = True,
        gradients: bool = True,
        bins: int | Sequence[float] = 64,
        include: str | Sequence[str] = "*",
    ) -> None:
        check_integer("HistogramMonitor(every_n_steps)", every_n_steps, 1, "Use a number of steps such as 100")
        if not (weights or gradients):
            raise RoomierError(
                "HistogramMonitor", None, "logs neither weights nor gradients", "Set one of them to True"
            )
        edges_of(0.0, 1.0, bins)
        self.every_n_steps, self.bins, self._weights = every_n_steps, bins, weights
        self.include = (include,) if isinstance(include, str) else tuple(include)
        self._seen_step = 0
        if not gradients:
            vars(self)["on_before_optimizer_step"] = None  # no hook reads gradients

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._seen_step = run_of(trainer, "HistogramMonitor").log_step
        if not self._tensors(trainer):
            action = "Pass patterns of the names in module.named_parameters()"
            raise RoomierError("HistogramMonitor(include)", self.include, "matches no trained parameter", action)

    def on_before_optimizer_step(self, trainer: TrainerView, pl_module: Module, optimizer: Optimizer) -> None:
        step = run_of(trainer, "HistogramMonitor").log_step + 1
        if step % self.every_n_steps:
            return
        engine = trainer.engine
        changed = engine.hooks.change_gradient

        def visit(look: Look) -> None:
            engine.hooks.change_gradient = look  # which reads the gradient and does not change it
            engine.change_gradients(optimizer)

        try:
            self._log(trainer, "gradients", visit, step)
        finally:
            engine.hooks.change_gradient = changed

    def on_train_batch_end(self, trainer: TrainerView, pl_module: Module, *_: Any, **__: Any) -> None:
        step = run_of(trainer, "HistogramMonitor").log_step
        if not self._weights or step % self.every_n_steps or step == self._seen_step:
            return
        self._seen_step = step
        trainer.engine.settle()

        def visit(look: Look) -> None:
            for tensor in self._tensors(trainer).values():
                look(tensor, local_part(tensor.detach()))

        self._log(trainer, "weights", visit, step)

    def _log(self, trainer: TrainerView, kind: str, visit: Any, step: int) -> None:
        if not takes(trainer.loggers, "log_histogram"):
            return
        run = run_of(trainer, "HistogramMonitor")
        for name, found in histograms(trainer.ranks, self._tensors(trainer), visit, self.bins).items():
            run.loggers.show("log_histogram", f"{kind}/{name}", found, step)

    def _tensors(self, trainer: TrainerView) -> dict[str, Tensor]:
        named = trainer.engine.module.named_parameters()
        return {
            name: each
            for name, each in named
            if each.requires_grad and any(fnmatchcase(name, pattern) for pattern in self.include)
        }
