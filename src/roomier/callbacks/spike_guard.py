"""SpikeGuard: callback that skips or undoes steps with an abnormal loss or abnormal gradients, or stops the run.

[Note: synchronization]
To skip a step, the callback must read its loss and gradient norm before the update, so the host waits for the device
once per step. For a rollback or a stop, the loss and the norm stay on the device until a log row is written or a
checkpoint is saved, because the host waits for the device at these points anyway.

[Note: state after a skipped step]
The following parts of the run are restored to their state before the batch: weights, optimizer states, schedulers, loss
scale, ``global_step``, buffers of the model (running statistics), and the epoch metrics of ``self.log``. The position
in the data, the random states, torchmetrics objects and the effects of user hooks are not restored.

[Note: rollback]
After a loss spike, PaLM (Chowdhery et al. 2022, section 5.1) restarted from an earlier checkpoint and skipped the
batches around the spike. A rollback does the same: the run resumes from its last checkpoint and repeats every step
except the bad ones. The log contains the rows of repeated steps twice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from roomier.api.callback import Callback, GoBackError
from roomier.api.module import Module
from roomier.api.overrides import overrides
from roomier.api.trainer_view import TrainerView
from roomier.core import torch_private
from roomier.core.errors import RoomierError, TrainingError, check_integer, did_you_mean
from roomier.core.forms import anything, count, fields, items, list_of, mapping_of, number
from roomier.core.log import notice
from roomier.plan.choices import averages_itself
from roomier.run.run import Run, run_of

ACTIONS = ("skip", "rollback", "stop")
FIGURES = ("loss", "grad_norm")
_MAX_SAMPLES_SHOWN = 16
Place = tuple[int, int]
"""An epoch, and the index of the first micro-batch of a step in this epoch."""


class SpikeGuard(Callback):
    """Callback that checks the loss and the gradient norm (before clipping) of each step.

    A step is bad if one of its values is NaN or infinite, or is more than ``factor`` times the median of this value in
    previous good steps. The values are computed over the global batch of all ranks, so all ranks make the same
    decision.

    A notice reports each bad step with the indices of its samples. If roomier does not determine the order of the data,
    the notice contains the indices of the micro-batches instead. With a loss scale (``16-mixed``), the loss scaler
    handles non-finite gradients if the loss is finite. See the notes in ``callbacks/spike_guard.py`` about
    synchronization and about the state after a skipped step.

    Args:
        action: ``"skip"`` skips the update of a bad step, but synchronizes with the device in each step. ``"rollback"``
            resumes from the last checkpoint of this run and skips the bad steps. ``"stop"`` stops the run with an
            error. ``"rollback"`` and ``"stop"`` do not synchronize in each step.
        factor: multiple of the median above which a value is a spike; None checks only for non-finite values.
        window: number of good steps over which the median is computed.
        warmup: number of good steps before spikes are detected.
        max_skips: maximum number of bad steps among the last ``window`` steps; if this number is exceeded, the run
            stops with an error.
        monitor: values to check: ``"loss"``, ``"grad_norm"``, or both.

    Attributes:
        num_bad_steps: number of bad steps so far.

    Raises:
        RoomierError: an argument is invalid. The error is also raised when training starts if the module or the Plan
            does not allow the check.
        TrainingError: the number of bad steps is too large, a step is bad with ``action="stop"``, or a step is bad with
            ``"rollback"`` and no checkpoint exists.

    Example:
        >>> trainer = roomier.Trainer(callbacks=[SpikeGuard("skip", factor=5.0)])
    """

    def __init__(
        self,
        action: str = "skip",
        factor: float | None = 10.0,
        window: int = 100,
        warmup: int = 20,
        max_skips: int = 10,
        monitor: str | Sequence[str] = FIGURES,
    ) -> None:
        if action not in ACTIONS:
            raise _wrong("action", action, "is not an action", did_you_mean(str(action), ACTIONS))
        if factor is not None and (not isinstance(factor, (int, float)) or not 1 < factor < math.inf):
            raise _wrong("factor", factor, "must be a finite number above 1", "Use a value such as 10.0, or None")
        for name, value, least in (("window", window, 1), ("warmup", warmup, 1), ("max_skips", max_skips, 0)):
            check_integer(f"SpikeGuard({name})", value, least, "Pass a number of steps")
        if warmup > window:
            raise _wrong("warmup", warmup, f"must be at most window={window}", "Use a smaller number of steps")
        names = (monitor,) if isinstance(monitor, str) else tuple(monitor)
        unknown = [name for name in names if name not in FIGURES]
        if unknown or not names:
            raise _wrong("monitor", monitor, "must be 'loss', 'grad_norm', or both", "Use one or both of these names")
        self.action, self.factor, self.window, self.warmup = action, factor, window, warmup
        self.max_skips, self.monitor = max_skips, names
        self._reset()

    def _reset(self) -> None:
        self._is_rolling_back = False
        self._undo: _Undo | None = None
        self.num_bad_steps = 0
        self._good: dict[str, deque[float]] = {name: deque(maxlen=self.window) for name in self.monitor}
        self._num_judged = 0
        self._bad_at: list[int] = []  # Values of _num_judged at recent bad steps.
        self._skipped: set[Place] = set()  # Steps that the run skips after a rollback.
        self._latest_loss: Tensor | None = None
        self._pending: list[tuple[Place, int, Tensor, Tensor | None]] = []

    # Checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "good": {name: list(values) for name, values in self._good.items()},
            "num_judged": self._num_judged,
            "bad_at": list(self._bad_at),
            "num_bad_steps": self.num_bad_steps,
            "left_out": [list(place) for place in sorted(self._skipped)],
        }

    def check_stored_state(self, state: Any, place: str) -> None:
        """See :class:`roomier.api.callback.ChecksState`."""
        form = {
            "good": mapping_of(list_of(number)),
            "num_judged": count,
            "bad_at": list_of(count),
            "num_bad_steps": count,
            "left_out": list_of(items(count, count)),
        }
        fields(form, others=anything)(state, place)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, values in state_dict["good"].items():
            if name in self._good:
                self._good[name] = deque(values, maxlen=self.window)
        stored = {(epoch, batch_idx) for epoch, batch_idx in state_dict["left_out"]}
        self._pending.clear()
        if self._is_rolling_back:  # retain the bad steps that were detected after the checkpoint
            self._is_rolling_back = False
            self._skipped |= stored
            return
        self._skipped = stored
        self._num_judged, self._bad_at = state_dict["num_judged"], list(state_dict["bad_at"])
        self.num_bad_steps = state_dict["num_bad_steps"]

    # Hooks of the run ---------------------------------------------------------------------------------------------

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        if stage == "fit":
            self._reset()

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        module, plan = run_of(trainer, "SpikeGuard").module, trainer.plan
        if not module.automatic_optimization:
            problem = "is not supported with manual optimization (automatic_optimization=False)"
            raise _wrong("module", type(pl_module).__name__, problem, "Check the loss in training_step instead")
        if overrides(module, "optimizer_step", Module) or isinstance(trainer.optimizers[0], LBFGS):
            problem = (
                "must not compute gradients within the update (in optimizer_step, or in the closure of an optimizer)"
            )
            raise _wrong("module", type(pl_module).__name__, problem, "Remove SpikeGuard, or change the optimization")
        if plan.parallel.gradient_compression != "none" or averages_itself(plan.optimizer.name):
            problem = "accumulates compression errors, which would keep the gradients of a bad step"
            raise _wrong("plan", plan.parallel.gradient_compression, problem, "Remove SpikeGuard or the compression")
        run = run_of(trainer, "SpikeGuard")
        self._undo = _Undo(run)
        run.looks.append(lambda: self._judge_pending(trainer))

    def on_train_batch_start(self, trainer: TrainerView, pl_module: Module, batch: Any, batch_idx: int) -> None:
        assert self._undo is not None
        progress = run_of(trainer, "SpikeGuard").progress
        if self.action == "skip" or (progress.epoch, progress.batch_idx) in self._skipped:
            self._undo.begin_micro_batch()

    def on_before_optimizer_step(self, trainer: TrainerView, pl_module: Module, optimizer: Optimizer) -> None:
        run = run_of(trainer, "SpikeGuard")
        place, loss = (run.progress.epoch, run.progress.batch_idx), run.now.last_loss
        assert self._undo is not None
        if loss is None or loss is self._latest_loss:  # no micro-batch of this step returned a loss
            return
        if place in self._skipped:  # this bad step caused the rollback
            self._undo.undo()
            run.now.leaves_out_step = True
            return
        self._latest_loss = loss
        norm = run.engine.clip(math.inf, "norm") if "grad_norm" in self.monitor else None
        self._pending.append((place, trainer.accumulate_grad_batches, loss, norm))
        if self.action == "skip":
            self._judge_before_update(trainer, self._undo)

    def _judge_before_update(self, trainer: TrainerView, undo: _Undo) -> None:
        [(place, size, figures)] = self._read(trainer)
        problem = self._judge(trainer, figures)
        if problem is None:
            undo.moving = undo.changed()  # later steps copy only the buffers that this good step changed
            return
        undo.undo()
        run_of(trainer, "SpikeGuard").now.leaves_out_step = True
        self._count_bad(trainer, f"{self._describe(trainer, place, size, problem)}; the step is skipped")

    def on_train_batch_end(self, trainer: TrainerView, pl_module: Module, *_: Any, **__: Any) -> None:
        step, every = trainer.global_step, trainer.log_every_n_steps
        if self._pending and step > 0 and step % every == 0:
            self._judge_pending(trainer)

    def on_train_epoch_end(self, trainer: TrainerView, pl_module: Module) -> None:
        if self._undo is not None:
            self._undo.moving = None  # copy all buffers in the next step, because modules can be frozen or unfrozen

    def _judge_pending(self, trainer: TrainerView) -> None:
        """Check the pending steps and handle the first bad step. Every rank must call this method."""
        for place, size, figures in self._read(trainer):
            problem = self._judge(trainer, figures)
            if problem is None:
                continue
            bad = self._describe(trainer, place, size, problem)
            self._skipped.add(place)
            if self.action == "stop":
                raise TrainingError("SpikeGuard", None, bad, "Lower the learning rate, or use action='skip'")
            self._count_bad(trainer, bad)
            self._is_rolling_back = True
            raise GoBackError(bad)  # the run also repeats the later steps

    def _read(self, trainer: TrainerView) -> list[tuple[Place, int, dict[str, float]]]:
        """Return the pending losses and norms as numbers for the global batch. This method waits for the device and for
        all ranks."""
        pending, self._pending = self._pending, []
        if not pending:
            return []
        figures = [torch.stack([loss, loss if norm is None else norm.to(loss.device)]) for *_, loss, norm in pending]
        own = torch.stack(figures).cpu().double()  # On the CPU, because some devices do not support float64.
        rows = trainer.ranks.sum(own).tolist()  # Each rank has its part of the loss, but the norm is global.
        return [
            (place, size, {"loss": loss, "grad_norm": norm / trainer.world_size})
            for (place, size, *_), (loss, norm) in zip(pending, rows, strict=True)
        ]

    def _judge(self, trainer: TrainerView, figures: dict[str, float]) -> str | None:
        """Return a description of the problem if the step is bad. Otherwise, add the step to the statistics and return
        None.
        """
        self._num_judged += 1
        is_left_to_scaler = False
        for name in self.monitor:
            value, good = figures[name], self._good[name]
            if not math.isfinite(value):
                if name == "grad_norm" and trainer.engine.scaler.is_on:
                    is_left_to_scaler = True  # the loss scaler skips this step and decreases the scale
                    continue
                return f"{name} is {value}"
            if self.factor is not None and len(good) >= self.warmup:
                usual = median(good)
                if value > self.factor * abs(usual):
                    return f"{name} is {value:.4g}, more than {self.factor:g} times the median {usual:.4g}"
        if not is_left_to_scaler:
            for name in self.monitor:
                self._good[name].append(figures[name])
        return None

    def _count_bad(self, trainer: TrainerView, message: str) -> None:
        self.num_bad_steps += 1
        self._bad_at = [at for at in self._bad_at if at > self._num_judged - self.window] + [self._num_judged]
        if trainer.is_global_zero:
            notice(f"SpikeGuard: {message}")
        if len(self._bad_at) > self.max_skips:
            problem = f"{len(self._bad_at)} of the last {self.window} steps are bad, more than max_skips: {message}"
            action = "Lower the learning rate, set gradient_clip_val, or inspect these samples"
            raise TrainingError("SpikeGuard(max_skips)", self.max_skips, problem, action)

    @staticmethod
    def _describe(trainer: TrainerView, place: Place, size: int, problem: str) -> str:
        epoch, batch_idx = place
        run = run_of(trainer, "SpikeGuard")
        samples = run.source.sample_indices(batch_idx, size) if epoch == run.progress.epoch else None
        of_ranks = [each for each in trainer.ranks.data.gather(samples) if each is not None]
        where = f"micro-batches {batch_idx} to {batch_idx + size - 1}" if size > 1 else f"batch {batch_idx}"
        if of_ranks:
            numbers = sorted(number for each in of_ranks for number in each)
            more = "" if len(numbers) <= _MAX_SAMPLES_SHOWN else f" and {len(numbers) - _MAX_SAMPLES_SHOWN} more"
            where += f" (samples {', '.join(map(str, numbers[:_MAX_SAMPLES_SHOWN]))}{more})"
        return f"{problem}, in {where} of epoch {epoch}"


class _Undo:
    """Object that restores the state that a forward pass and a backward pass changed: logged values and buffers.

    Attributes:
        moving: names of the buffers that a step changes, which are copied; None to copy all buffers.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._window = -1
        self._undo_logged: Callable[[], None] = lambda: None
        self._buffers: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}
        self.moving: set[str] | None = None
        self._kept: dict[str, Tensor] = {}

    def begin_micro_batch(self) -> None:
        """Copy the current state at the first micro-batch of a window."""
        window = self._run.progress.num_batches
        if window == self._window:
            return
        self._window = window
        self._undo_logged = self._run.results.mark()
        self._buffers = dict(self._run.engine.module.named_buffers())
        moving = self._buffers if self.moving is None else self._buffers.keys() & self.moving
        self._kept = {name: self._buffers[name].detach().clone() for name in moving}
        self._versions = {name: torch_private.version_of(each) for name, each in self._buffers.items()}

    @torch.no_grad()
    def undo(self) -> None:
        left = self.changed() - self._kept.keys()
        if left:
            notice(f"SpikeGuard: {sorted(left)[:3]} changed for the first time in the bad step and are not restored")
        self._undo_logged()
        for name, value in self._kept.items():
            self._buffers[name].copy_(value)

    def changed(self) -> set[str]:
        """Return the names of the buffers that the step changed."""
        # The version counter of torch does not include updates of running statistics by batch_norm.
        written = {n for n, each in self._buffers.items() if torch_private.version_of(each) != self._versions[n]}
        return {name for name in self._buffers if name in written or name.rpartition(".")[2].startswith("running_")}


def _wrong(field: str, received: object, problem: str, action: str) -> RoomierError:
    return RoomierError(f"SpikeGuard({field})", received, problem, action)
