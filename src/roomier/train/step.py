"""One optimizer step as the loop sees it: the user's training_step, and the update with what was overridden."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from roomier.api.datamodule import DataModule
from roomier.api.lightning import overrides
from roomier.api.module import Module
from roomier.api.step_arguments import num_step_arguments
from roomier.engine.engine import StepHooks
from roomier.train.manual import ManualOptimizer
from roomier.train.run import Run, call

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
SKIP_EPOCH = -1  # what on_train_batch_start returns to leave out the rest of the epoch, as in Lightning


class TrainingStep:
    """``training_step`` of one micro-batch; its batch hooks are called by the engine around it.

    Attributes:
        skips_epoch: a hook asked to leave out the rest of this epoch, this micro-batch and its step included.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._results = run.results
        self._starts = run.hooks.on_train_batch_start
        self._ends = run.hooks.on_train_batch_end
        self._training_step = run.module.training_step
        self._num_arguments = num_step_arguments(run.module, "training_step", 2)
        self._batch_idx = -1
        self._batch: Any = None
        self._output: Any = None
        self.skips_epoch = False

    def __call__(self, batch: Any) -> Any:
        if self.skips_epoch:
            return None
        self._output = output = (
            self._training_step(batch, self._batch_idx) if self._num_arguments > 1 else self._training_step(batch)
        )
        return output

    def start_window(self, batch_idx: int) -> None:
        self._batch_idx = batch_idx - 1

    def start(self, batch: Any) -> None:
        """Before the forward of each micro-batch, which is on the device."""
        if self.skips_epoch:
            return
        self._batch_idx += 1
        self._batch = self._results.batch = batch
        self._results.is_in_batch = True
        for hook in self._starts:
            if hook(batch, self._batch_idx) == SKIP_EPOCH:
                self.skips_epoch = True

    def end(self) -> None:
        """After everything of one micro-batch; for the last of a step, after the optimizer."""
        if not self.skips_epoch:
            for hook in self._ends:
                hook(self._output, self._batch, self._batch_idx)
        self._results.is_in_batch = False
        self._batch = self._output = self._results.batch = None


def install_step_hooks(run: Run, step: TrainingStep) -> None:
    """Give the engine what must happen inside ``forward_backward``."""
    module, hooks, engine = run.module, run.hooks, run.engine
    engine.hooks = StepHooks(
        before_backward=hooks.on_before_backward,
        after_backward=hooks.on_after_backward,
        batch_start=step.start,
        batch_end=step.end,
        is_skipping=lambda: step.skips_epoch,
        zero_grad=_zero_grad(run),
        backward=module.backward if overrides(module, "backward", Module) else None,
        transfer=transfer_of(run),
    )


def _zero_grad(run: Run) -> Callable[[Optimizer], None] | None:
    module = run.module
    is_overridden = overrides(module, "optimizer_zero_grad", Module)
    if not (is_overridden or run.hooks.on_before_zero_grad):
        return None

    def zero_grad(optimizer: Optimizer) -> None:
        call(run.hooks.on_before_zero_grad, optimizer)
        module.optimizer_zero_grad(run.progress.epoch, run.progress.batch_idx, optimizer)

    return zero_grad


def transfer_of(run: Run, dataloader_idx: int = 0) -> Callable[[Any], Any] | None:
    """The three transfer hooks of the module and the DataModule as one function; None where none is overridden."""
    return transfer_to(run.engine.device, run.module, run.trainer.datamodule, dataloader_idx)


def transfer_to(
    device: torch.device, module: Module, datamodule: DataModule | None, dataloader_idx: int = 0
) -> Callable[[Any], Any] | None:
    """As :func:`transfer_of`, where there is no run yet."""
    in_data = [] if datamodule is None else [name for name in TRANSFER_HOOKS if overrides(datamodule, name, DataModule)]
    in_module = [name for name in TRANSFER_HOOKS if overrides(module, name, Module)]
    if not (in_data or in_module):
        return None
    prepare, move, finish = (getattr(datamodule if name in in_data else module, name) for name in TRANSFER_HOOKS)

    def transfer(batch: Any) -> Any:
        batch = prepare(batch, dataloader_idx)
        batch = move(batch, device, dataloader_idx)
        return finish(batch, dataloader_idx)

    return transfer


def update_of(run: Run) -> Callable[[], None]:
    """What follows the gradients: hooks, clipping, the optimizer; as short as what was overridden allows."""
    engine, module = run.engine, run.module
    if not engine.optimizers:
        return lambda: None
    optimizer = engine.optimizers[0]
    before = run.hooks.on_before_optimizer_step
    batch_plan = run.plan.batch
    clip: Callable[[], Any] | None = None
    if overrides(module, "configure_gradient_clipping", Module):
        clip = partial(
            module.configure_gradient_clipping,
            optimizer,
            batch_plan.gradient_clip_val,
            batch_plan.gradient_clip_algorithm,
        )
    elif batch_plan.gradient_clip_val is not None:
        clip = engine.clip
    step: Callable[[], Any] = engine.step
    if overrides(module, "optimizer_step", Module):
        proxy = _StepOnce(optimizer, run)

        def step() -> None:
            module.optimizer_step(run.progress.epoch, run.progress.batch_idx, proxy, lambda: run.last_loss)

    if not before and clip is None:
        return step

    def update() -> None:
        engine.unscale()
        for hook in before:
            hook(optimizer)
        if clip is not None:
            clip()
        step()

    return update


class _StepOnce(ManualOptimizer):
    """What an overridden ``optimizer_step`` receives. The gradients are there: the closure gives the loss."""

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        self._run.engine.step(self.optimizer)
