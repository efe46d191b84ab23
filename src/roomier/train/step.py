"""One optimizer step in the loop: ``training_step``, the update, and the hooks that the module overrides."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from roomier.api.adapt import seen_by_user
from roomier.api.datamodule import DataModule
from roomier.api.engine import StepHooks
from roomier.api.hooks import step_of
from roomier.api.module import Module
from roomier.api.overrides import overrides
from roomier.core.device.events import Events
from roomier.core.errors import TrainingError
from roomier.run.progress import WindowBatches
from roomier.run.run import Run, call
from roomier.train.earlier_passes import seeded
from roomier.train.manual import ManualOptimizer
from roomier.train.settling.checks import needs_closure

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
# These hooks run after on_train_batch_end. They may read gradients, which Lightning frees only in the next window.
_HOOKS_AFTER_A_STEP = ("on_save_point", "on_train_epoch_start", "on_train_epoch_end", "on_train_end", "on_fit_end")
SKIP_EPOCH = -1  # on_train_batch_start returns this value to skip the rest of the epoch, as in Lightning


class TrainingStep:
    """Function that runs ``training_step``. :meth:`start` must be called before each call, and :meth:`end` after it.

    Args:
        run: run to which the steps belong.

    Attributes:
        batch_idx: index of the current micro-batch in the epoch, starting with 0.
        counts_batches: True if the step number of log rows counts batches; see ``Run.log_step``.
        log_interval: number of steps or batches between two log rows.
        first_step: value of ``Run.log_step`` before this window.
        first_batch: index in the epoch of the first micro-batch of this window.
        skips_epoch: True if a hook skips the rest of the epoch, including this micro-batch and its step.
        frees_gradients: True if the loop frees the gradients after ``on_train_batch_end``.
        validated_s: time on the monotonic clock when training began, or when the last validation after a step ended.
    """

    def __init__(self, run: Run) -> None:
        self._results, self._now, self._progress = run.results, run.now, run.progress
        self._starts = run.hooks.on_train_batch_start
        self._ends = run.hooks.on_train_batch_end
        self._training_step = step_of(run.module, "training_step")
        self.counts_batches = not run.module.automatic_optimization
        # The loss is a share of the mean over all ranks of the last stage. A sum is divided only among those that read
        # the same samples.
        is_mean, mesh = run.module.loss_reduction == "mean", run.ranks.mesh
        self._num_shares = (mesh.world.size if is_mean else mesh.num_peers) // mesh.stage
        self.log_interval = run.options.log_every_n_steps
        self.batch_idx, self.first_step, self.first_batch = -1, 0, 0
        self._output: Any = None
        self._loss: Tensor | None = None
        self.skips_epoch = False
        self.frees_gradients = False
        self.validated_s = time.monotonic()

    def __call__(self, batch: Any, index: int) -> Any:
        if self.skips_epoch or batch is None:  # as in Lightning, a batch that is None has no loss
            return None
        self._output = output = self._training_step(batch, self.batch_idx)
        return output

    def start_window(self, batches: Sequence[Any]) -> None:
        """Prepare for the window of the micro-batches ``batches``, before its first micro-batch."""
        progress = self._progress
        self.first_batch = progress.batch_idx
        self.first_step = progress.num_batches if self.counts_batches else progress.global_step
        self._now.window = WindowBatches(progress.epoch, self.first_batch, batches)

    def start(self, batch: Any, index: int) -> None:
        """Call the hooks that run before the forward pass of the micro-batch at ``index`` in the window.

        Args:
            batch: the micro-batch on the device.
        """
        if self.skips_epoch:
            return
        self.batch_idx = self._now.batch_idx = self.first_batch + index
        self._results.batch = batch
        self._results.is_in_batch = True
        for hook in self._starts:
            if hook(batch, self.batch_idx) == SKIP_EPOCH:
                self.skips_epoch = True

    def take_loss(self, loss: Tensor, index: int) -> None:
        """Store the loss of the micro-batch's backward pass, for the hooks that run afterwards."""
        self._loss = loss

    def end(self, index: int = -1) -> None:
        """Call ``on_train_batch_end``. For the last micro-batch of a window, call this after the optimizer step."""
        results = self._results
        if self._ends and not self.skips_epoch:
            outputs = self._outputs()
            for hook in self._ends:
                hook(outputs, results.batch, self.batch_idx)
        results.is_in_batch = False
        self._output = self._loss = results.batch = None

    def _outputs(self) -> dict[str, Any]:
        """Return the outputs that hooks receive, as in Lightning: a dict with the loss of this rank's micro-batch."""
        output, loss = self._output, self._loss
        if output is None:
            return {}
        if loss is None:
            outputs = dict(output) if isinstance(output, Mapping) else {"loss": output}
            loss = outputs.get("loss")
            return {**outputs, "loss": loss.detach()} if self.counts_batches and isinstance(loss, Tensor) else outputs
        if self._num_shares != 1:  # the product of a scalar takes as long as all other work of this class in a step
            loss = loss * self._num_shares
        return {"loss": loss} if isinstance(output, Tensor) else {**output, "loss": loss}


def install_step_hooks(run: Run, step: TrainingStep) -> None:
    """Set the hooks that the engine calls inside ``forward_backward``."""
    module, hooks, engine = run.module, run.hooks, run.engine
    start, transfer = step.start, transfer_of(run)
    if run.events is not None:
        start, transfer = seeded(run, run.events, start, transfer)
    engine.hooks = StepHooks(
        batch_loss=step.take_loss,
        before_backward=hooks.on_before_backward,
        after_backward=hooks.on_after_backward,
        batch_start=start,
        batch_end=step.end,
        is_skipping=lambda: step.skips_epoch,
        zero_grad=_zero_grad(run),
        keeps_gradients=True,
        backward=module.backward if overrides(module, "backward", Module) else Tensor.backward,
        transfer=transfer,
    )
    if hooks.on_gradient:
        names = {parameter: name for name, parameter in seen_by_user(run.module).named_parameters()}

        def change(parameter: Tensor, gradient: Tensor) -> None:
            call(run.hooks.on_gradient, names[parameter], gradient)

        engine.hooks.change_gradient = change
        vars(hooks)["on_before_optimizer_step"] = (engine.change_gradients, *hooks.on_before_optimizer_step)
    step.frees_gradients = engine.hooks.frees_gradients = _frees_gradients(run)


def _zero_grad(run: Run) -> Callable[[Optimizer], None] | None:
    module = run.module
    is_overridden = overrides(module, "optimizer_zero_grad", Module)
    if not (is_overridden or run.hooks.on_before_zero_grad or takes_closure(run)):
        return None

    def zero_grad(optimizer: Optimizer) -> None:
        run.engine.complete_updates()
        call(run.hooks.on_before_zero_grad, optimizer)
        module.optimizer_zero_grad(run.progress.epoch, run.progress.batch_idx, optimizer)

    return zero_grad


def _frees_gradients(run: Run) -> bool:
    """Return True if no user code can read gradients after ``on_train_batch_end``."""
    if not run.module.automatic_optimization or run.engine.hooks.zero_grad is not None:
        return False
    if overrides(run.module, "on_validation_model_zero_grad", Module):
        return False
    return all(_is_of_library(hook) for name in _HOOKS_AFTER_A_STEP for hook in getattr(run.hooks, name))


def _is_of_library(hook: Callable[..., Any]) -> bool:
    function = hook.func if isinstance(hook, partial) else hook
    return str(getattr(function, "__module__", "")).startswith("roomier.")


def transfer_of(run: Run, dataloader_idx: int = 0) -> Callable[[Any], Any] | None:
    """Return one function that calls the three transfer hooks; None if neither module nor DataModule overrides one."""
    return transfer_to(run.engine.device, run.module, run.settled.request.datamodule, dataloader_idx)


def transfer_to(
    device: torch.device, module: Module, datamodule: DataModule | None, dataloader_idx: int = 0
) -> Callable[[Any], Any] | None:
    """Return the same function as :func:`transfer_of`, but without a run.

    Args:
        device: target device of ``transfer_batch_to_device``.
        module: module whose hooks are used unless ``datamodule`` overrides them.
        datamodule: the DataModule of the call, or None.
        dataloader_idx: index of the loader, passed to the hooks.
    """
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


def forward_backward_of(run: Run) -> Callable[[TrainingStep, list[Any]], Tensor | None]:
    """Return the function that computes the gradients of one window.

    The function is the engine's ``forward_backward``, a call of ``training_step`` (manual optimization), or a step with
    a closure.
    """
    if not run.module.automatic_optimization:
        return _manual_step(run)
    if not takes_closure(run):
        return run.engine.forward_backward
    module, stepped = run.module, _StepWithClosure(run.engine.optimizers[0], run)

    def forward_backward(step: TrainingStep, window: list[Any]) -> Tensor | None:
        was_called = False

        def update(compute: Callable[[], Tensor | None]) -> None:
            def closure(*_: Any) -> Tensor | None:
                nonlocal was_called
                was_called = True
                return compute()

            module.optimizer_step(run.progress.epoch, step.batch_idx, stepped, closure)
            if not was_called:
                raise TrainingError(
                    "optimizer_step",
                    type(module).__name__,
                    "must call its optimizer_closure, which runs training_step",
                    "Call optimizer.step(closure=optimizer_closure). To skip only the update, call optimizer_closure()",
                )

        return run.engine.step_with_closure(step, window, update)

    return forward_backward


def with_events(
    events: Events, compute: Callable[[TrainingStep, list[Any]], Tensor | None]
) -> Callable[[TrainingStep, list[Any]], Tensor | None]:
    """Return the function ``compute`` that :func:`forward_backward_of` returned, with the generators of ``events``."""

    def forward_backward(step: TrainingStep, window: list[Any]) -> Tensor | None:
        with events.window(step.first_step):  # with manual optimization, the number of the batch
            return compute(step, window)

    return forward_backward


def takes_closure(run: Run) -> bool:
    """Return True if the update computes the gradients in a closure. See [Note: closures] in
    ``docs/design/train.md``."""
    if not (run.module.automatic_optimization and run.engine.optimizers):
        return False
    return overrides(run.module, "optimizer_step", Module) or needs_closure(run.engine.optimizers[0])


def _manual_step(run: Run) -> Callable[[TrainingStep, list[Any]], Tensor | None]:
    # training_step runs backward and the update.
    def forward(step: TrainingStep, window: list[Any]) -> None:
        batch = run.engine.move(window[0])
        run.engine.hooks.batch_start(batch, 0)
        output = run.engine.forward(lambda each: step(each, 0), batch)
        loss = output.get("loss") if isinstance(output, dict) else output
        if isinstance(loss, Tensor):
            run.now.last_loss = loss.detach()

    return forward


def update_of(run: Run) -> Callable[[Tensor | None], None]:
    """Return the function that runs after the gradients of a step are computed. The function calls hooks, clips
    gradients and runs the optimizer.

    The argument of this function is the loss of the step. Hooks that are not overridden and features that are not
    enabled are skipped.
    """
    engine = run.engine
    if not engine.optimizers or takes_closure(run):
        return lambda _: None
    before = before_update_of(run)
    if not (before or run.counts_empty_steps):
        return lambda _: engine.step()
    optimizer, has_scaler = engine.optimizers[0], engine.scaler.is_on

    def update(loss: Tensor | None) -> None:
        is_scaled = has_scaler and loss is not None  # without a loss, no gradients exist to unscale
        if is_scaled:
            engine.unscale()
        for each in before:
            each(optimizer)
        if run.now.leaves_out_step:
            engine.leave_out_update()
        elif is_scaled or not has_scaler:
            engine.step()

    return update


def before_update_of(run: Run) -> Sequence[Callable[[Optimizer], Any]]:
    """Return the functions that run between the backward pass and the update: hooks, then gradient clipping."""
    module, batch_plan = run.module, run.plan.batch
    limit, algorithm = batch_plan.gradient_clip_val, batch_plan.gradient_clip_algorithm
    before = run.hooks.on_before_optimizer_step
    if overrides(module, "configure_gradient_clipping", Module):
        configured = partial(
            module.configure_gradient_clipping, gradient_clip_val=limit, gradient_clip_algorithm=algorithm
        )
        return (*before, lambda _: run.engine.complete_updates(), configured)
    return before if limit is None else (*before, lambda _: run.engine.clip())


class _StepWithClosure(ManualOptimizer):
    """The optimizer that ``optimizer_step`` receives. Its method ``step`` accepts a closure."""

    def __init__(self, optimizer: Optimizer, run: Run) -> None:
        super().__init__(optimizer, run)
        self._before_update = before_update_of(run)

    def step(self, closure: Any = None, **options: Any) -> Any:
        return self._update(closure, self._before_update, options)
