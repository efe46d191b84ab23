"""SpikeGuard: steps whose loss or gradients went astray are left out, undone, or end the run.

[Note: what waits for what]
To leave a step out, the loss and the norm of its gradients must be known before the update: the host waits for the
device once in each step. To go back, or to stop, they may be known later: they stay on the device, and are read where a
log row is written and before a checkpoint is, where the host waits anyway.

[Note: a step that is left out]
Weights, optimizer states, schedulers, loss scale, ``global_step``, buffers of the model (running statistics), and what
``self.log`` added to the figures of the epoch are as if the batch had not been. The position in the data has moved on,
and so have the random states, torchmetrics objects, and what hooks of the user did.

[Note: going back]
PaLM (Chowdhery et al. 2022, section 5.1) met spikes by starting again from a checkpoint before them and leaving out
the batches around them. Here the run goes on from its last checkpoint, and takes every step again but those that were
found. Rows of steps that are taken again stand twice in the log.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from roomier.api.callback import Callback
from roomier.api.go_back import GoBackError
from roomier.api.module import Module
from roomier.api.overrides import overrides
from roomier.core import torch_private
from roomier.core.errors import RoomierError, TrainingError, did_you_mean
from roomier.core.forms import anything, count, fields, items, list_of, mapping_of, number
from roomier.core.log import notice
from roomier.run.run import run_of

if TYPE_CHECKING:
    from roomier.api.trainer_view import TrainerView
    from roomier.run.run import Run

ACTIONS = ("skip", "rollback", "stop")
FIGURES = ("loss", "grad_norm")
_MAX_SAMPLES_TOLD = 16
Place = tuple[int, int]
"""An epoch and the first micro-batch of a step in it."""


class SpikeGuard(Callback):
    """Looks at the loss and the norm of the gradients (before clipping) of each step. One that is NaN or infinite, or
    more than ``factor`` times the median of those before it, is bad.

    Figures are those of the whole batch, over all ranks, which decide alike. What was bad is told, with the numbers of
    the samples where roomier makes the order of the data, else of the micro-batches. With a loss scale (``16-mixed``),
    gradients that are not finite are left to that, as long as the loss is finite. See the notes in
    ``callbacks/spike_guard.py``: what waits for the device, and what a step that is left out leaves behind.

    Args:
        action: ``"skip"``: leave out the update of a bad step, at the price of waiting for the device once a step.
            ``"rollback"``: go on from the last checkpoint of this run, without the bad steps; nothing waits.
            ``"stop"``: end the run with an error; nothing waits.
        factor: how many times the median is a spike; None for none, only what is not finite is bad then.
        window: of how many good steps the median is.
        warmup: so many good steps are needed before there are spikes.
        max_skips: more bad steps than this among the last ``window`` end the run with an error.
        monitor: what is looked at: ``"loss"``, ``"grad_norm"``, or both.

    Attributes:
        num_bad_steps: those that were left out so far.

    Raises:
        RoomierError: an argument is wrong; when a fit begins, that the module or the Plan has no place at which a step
            can be looked at.
        TrainingError: too many bad steps, or one with ``action="stop"``, or with ``"rollback"`` and no checkpoint.
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
            raise _wrong("action", action, "is not known", did_you_mean(str(action), ACTIONS))
        if factor is not None and (not isinstance(factor, (int, float)) or not 1 < factor < math.inf):
            raise _wrong("factor", factor, "is no factor above 1", "Use 10.0, say, or None")
        for name, value, least in (("window", window, 1), ("warmup", warmup, 1), ("max_skips", max_skips, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise _wrong(name, value, "is no number of steps", f"Use an integer of {least} or more")
        if warmup > window:
            raise _wrong("warmup", warmup, f"is more than window={window}, so there would be no spikes", "Lower it")
        names = (monitor,) if isinstance(monitor, str) else tuple(monitor)
        unknown = [name for name in names if name not in FIGURES]
        if unknown or not names:
            raise _wrong("monitor", monitor, "is not known", "Use 'loss', 'grad_norm', or both")
        self.action, self.factor, self.window, self.warmup = action, factor, window, warmup
        self.max_skips, self.monitor = max_skips, names
        self._is_going_back = False
        self._undo: _Undo | None = None
        self._forget()

    def _forget(self) -> None:
        self.num_bad_steps = 0
        self._good: dict[str, deque[float]] = {name: deque(maxlen=self.window) for name in self.monitor}
        self._num_judged = 0
        self._bad_at: list[int] = []  # which of the judged steps were bad, of the last ones
        self._left_out: set[Place] = set()  # what a run that went back leaves out
        self._latest_loss: Tensor | None = None
        self._pending: list[tuple[Place, int, Tensor, Tensor | None]] = []

    # Checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "good": {name: list(values) for name, values in self._good.items()},
            "num_judged": self._num_judged,
            "bad_at": list(self._bad_at),
            "num_bad_steps": self.num_bad_steps,
            "left_out": [list(place) for place in sorted(self._left_out)],
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
        if self._is_going_back:  # what it found since then is what it goes back for
            self._is_going_back = False
            self._left_out |= stored
            return
        self._left_out = stored
        self._num_judged, self._bad_at = state_dict["num_judged"], list(state_dict["bad_at"])
        self.num_bad_steps = state_dict["num_bad_steps"]

    # The run ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        if stage == "fit":
            self._forget()
            self._is_going_back, self._undo = False, None

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        module, plan = run_of(trainer, "SpikeGuard").module, trainer.plan
        if not module.automatic_optimization:
            problem = "optimizes by hand (automatic_optimization=False)"
            raise _wrong("module", type(pl_module).__name__, problem, "Look at the loss in its training_step")
        if overrides(module, "optimizer_step", Module) or isinstance(trainer.optimizers[0], LBFGS):
            problem = "computes its gradients within the update (optimizer_step, or an optimizer with a closure)"
            raise _wrong("module", type(pl_module).__name__, problem, "Do without one of the two")
        if plan.parallel.gradient_compression != "none" or plan.optimizer.name == "onebit_adam":
            problem = "compresses gradients, and keeps what it left out: a bad step would stay in that"
            raise _wrong("plan", plan.parallel.gradient_compression, problem, "Do without one of the two")
        run = run_of(trainer, "SpikeGuard")
        self._undo = _Undo(run)
        run.looks.append(lambda: self._look(trainer))

    def on_train_batch_start(self, trainer: TrainerView, pl_module: Module, batch: Any, batch_idx: int) -> None:
        assert self._undo is not None
        progress = run_of(trainer, "SpikeGuard").progress
        if self.action == "skip" or (progress.epoch, progress.batch_idx) in self._left_out:
            self._undo.begin_micro_batch()

    def on_before_optimizer_step(self, trainer: TrainerView, pl_module: Module, optimizer: Optimizer) -> None:
        run = run_of(trainer, "SpikeGuard")
        place, loss = (run.progress.epoch, run.progress.batch_idx), run.now.last_loss
        assert self._undo is not None
        if loss is None or loss is self._latest_loss:  # no micro-batch of this step gave one
            return
        if place in self._left_out:  # this one it went back for
            self._undo.undo()
            run.now.leaves_out_step = True
            return
        self._latest_loss = loss
        norm = run.engine.clip(math.inf, "norm") if "grad_norm" in self.monitor else None
        size = trainer.accumulate_grad_batches
        self._pending.append((place, size, loss, norm))
        if self.action == "skip":
            self._judge_before_update(trainer, self._undo)

    def _judge_before_update(self, trainer: TrainerView, undo: _Undo) -> None:
        [(place, size, figures)] = self._read(trainer)
        problem = self._judge(trainer, figures)
        if problem is None:
            undo.end_good_step()
            return
        undo.undo()
        run_of(trainer, "SpikeGuard").now.leaves_out_step = True
        told = f"{self._tell(trainer, place, size, problem)}; the step is left out"
        self._count_bad(trainer, told)

    def on_train_batch_end(
        self, trainer: TrainerView, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, every = trainer.global_step, trainer.log_every_n_steps
        if self._pending and step > 0 and step % every == 0:
            self._look(trainer)

    def on_train_epoch_end(self, trainer: TrainerView, pl_module: Module) -> None:
        if self._undo is not None:
            self._undo.end_epoch()

    def _look(self, trainer: TrainerView) -> None:
        """Judge the steps that were not looked at yet; every rank is here."""
        bad: list[str] = []
        for place, size, figures in self._read(trainer):
            problem = self._judge(trainer, figures)
            if problem is not None:
                bad.append(self._tell(trainer, place, size, problem))
                self._left_out.add(place)
                break  # what follows a bad step is not to be judged
        if not bad:
            return
        if self.action == "stop":
            raise TrainingError("SpikeGuard", None, bad[0], "Lower the learning rate, or use action='skip'")
        self._count_bad(trainer, bad[0])
        self._is_going_back = True
        raise GoBackError(bad[0])

    def _read(self, trainer: TrainerView) -> list[tuple[Place, int, dict[str, float]]]:
        """The pending figures as numbers of the whole batch: this waits for the device, and for all ranks."""
        pending, self._pending = self._pending, []
        if not pending:
            return []
        figures = [torch.stack([loss, loss if norm is None else norm.to(loss.device)]) for *_, loss, norm in pending]
        own = torch.stack(figures).cpu().double()  # on the host: not every device has float64
        rows = trainer.ranks.sum(own).tolist()  # a loss is a share, a norm that of all
        size_of_world = trainer.world_size
        return [
            (place, size, {"loss": loss, "grad_norm": norm / size_of_world})
            for (place, size, *_), (loss, norm) in zip(pending, rows, strict=True)
        ]

    def _judge(self, trainer: TrainerView, figures: dict[str, float]) -> str | None:
        """What is wrong with a step; a good one is remembered."""
        self._num_judged += 1
        is_left_to_scale = False
        for name in self.monitor:
            value, good = figures[name], self._good[name]
            if not math.isfinite(value):
                if name == "grad_norm" and trainer.engine.scaler.is_on:
                    is_left_to_scale = True  # it leaves out this step, and lowers itself
                    continue
                return f"{name} is {value}"
            if self.factor is not None and len(good) >= self.warmup:
                usual = _median(good)
                if value > self.factor * abs(usual):
                    return f"{name} is {value:.4g}, more than {self.factor:g} times the {usual:.4g} of the steps before"
        if not is_left_to_scale:
            for name in self.monitor:
                self._good[name].append(figures[name])
        return None

    def _count_bad(self, trainer: TrainerView, told: str) -> None:
        self.num_bad_steps += 1
        self._bad_at = [at for at in self._bad_at if at > self._num_judged - self.window] + [self._num_judged]
        if trainer.is_global_zero:
            notice(f"SpikeGuard: {told}")
        if len(self._bad_at) > self.max_skips:
            problem = f"{len(self._bad_at)} bad steps among the last {self.window}, more than max_skips: {told}"
            action = "Lower the learning rate, set gradient_clip_val, or look at these samples"
            raise TrainingError("SpikeGuard(max_skips)", self.max_skips, problem, action)

    @staticmethod
    def _tell(trainer: TrainerView, place: Place, size: int, problem: str) -> str:
        epoch, batch_idx = place
        source = run_of(trainer, "SpikeGuard").source
        samples = source.sample_indices(batch_idx, size) if epoch == trainer.current_epoch else None
        of_ranks = [each for each in trainer.ranks.gather(samples) if each is not None]
        where = f"micro-batches {batch_idx} to {batch_idx + size - 1}" if size > 1 else f"batch {batch_idx}"
        if of_ranks:
            numbers = sorted(number for each in of_ranks for number in each)
            more = "" if len(numbers) <= _MAX_SAMPLES_TOLD else f" and {len(numbers) - _MAX_SAMPLES_TOLD} more"
            where += f" (samples {', '.join(map(str, numbers[:_MAX_SAMPLES_TOLD]))}{more})"
        return f"{problem}, in {where} of epoch {epoch}"


class _Undo:
    """Puts back what a forward and a backward change: figures that were logged, and buffers."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._window = -1
        self._undo_logged: Callable[[], None] = lambda: None
        self._buffers: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}
        self._moving: set[str] | None = None  # those that a step changes; None where it is not known yet
        self._kept: dict[str, Tensor] = {}

    def begin_micro_batch(self) -> None:
        """The first of a window remembers what there is."""
        window = self._run.progress.num_batches
        if window == self._window:
            return
        self._window = window
        self._undo_logged = self._run.results.mark()
        self._buffers = dict(self._run.engine.module.named_buffers())
        moving = self._buffers if self._moving is None else self._buffers.keys() & self._moving
        self._kept = {name: self._buffers[name].detach().clone() for name in moving}
        self._versions = {name: torch_private.version_of(each) for name, each in self._buffers.items()}

    def end_good_step(self) -> None:
        """From here on only the buffers that changed are copied."""
        self._moving = self._changed()

    def end_epoch(self) -> None:
        """Parts may be frozen or unfrozen between epochs: all buffers are looked at anew."""
        self._moving = None

    @torch.no_grad()
    def undo(self) -> None:
        left = self._changed() - self._kept.keys()
        if left:
            notice(f"SpikeGuard: {sorted(left)[:3]} changed in the bad step for the first time, and stay as they are")
        self._undo_logged()
        for name, value in self._kept.items():
            self._buffers[name].copy_(value)

    def _changed(self) -> set[str]:
        # torch does not count what batch_norm writes to running statistics.
        written = {n for n, each in self._buffers.items() if torch_private.version_of(each) != self._versions[n]}
        return {name for name in self._buffers if name in written or name.rpartition(".")[2].startswith("running_")}


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return (ordered[half] + ordered[-half - 1]) / 2  # the same one twice, where their number is odd


def _wrong(field: str, received: object, problem: str, action: str) -> RoomierError:
    return RoomierError(f"SpikeGuard({field})", received, problem, action)
