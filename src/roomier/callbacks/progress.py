"""ProgressBar: callback that shows the progress, speed and remaining time of a run."""

from __future__ import annotations

import math
import sys
import time
from numbers import Real
from typing import TYPE_CHECKING, Any

from torch import Tensor

from roomier.api.callback import Callback
from roomier.api.module import Module
from roomier.api.trainer_view import TrainerView
from roomier.callbacks.progress_display import BarDisplay, LineDisplay, Standing
from roomier.callbacks.throughput import num_tokens_of
from roomier.core.errors import RoomierError
from roomier.core.tree import batch_size_of
from roomier.run.run import run_of

if TYPE_CHECKING:
    from rich.console import Console


def shown_numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the numeric values in ``metrics`` as Python floats."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, (Real, Tensor))}


class ProgressBar(Callback):
    """Callback that shows progress on standard error. In a terminal, the callback draws a bar. Otherwise, the callback
    prints one line per log interval and per evaluation.

    Metrics logged with ``prog_bar=True`` are read only at log steps. Between log steps, the bar is redrawn only when
    ``refresh_interval_s`` has passed, so the overhead per step is less than a microsecond. The displayed rate is the
    mean since training started, excluding the first batch (warm-up), validation and saving. The samples or tokens per
    second are this rate times the mean size of the batches at which the bar was drawn, on all ranks.

    Args:
        refresh_interval_s: minimum time between two redraws, in seconds.
        console: console on which the callback draws. By default, a console on standard error is created when a stage
            starts.

    Raises:
        RoomierError: ``refresh_interval_s`` is not positive.

    Example:
        >>> trainer = roomier.Trainer(callbacks=[ProgressBar(refresh_interval_s=1.0)])
    """

    reads_parameters = False
    _shown_trainer: TrainerView | None = None

    def __init__(self, refresh_interval_s: float = 0.1, console: Console | None = None) -> None:
        if not refresh_interval_s > 0:
            raise RoomierError("refresh_interval_s", refresh_interval_s, "must be positive", "Use seconds such as 0.1")
        self.refresh_interval_s = refresh_interval_s
        self._console = console
        self._display: LineDisplay | None = None
        self._is_training = False
        self._log_every_n_steps = 1
        self._log_interval = 0
        self._next_draw_s = math.inf
        self._metrics: dict[str, float] = {}
        self._num_timed_batches = -1  # the first batch starts the clock
        self._item, self._num_items, self._num_counted = "samples", 0, 0
        self._clock_began_s = 0.0
        self._title, self._num_total = "", math.inf
        self._num_evaluated = 0.0
        self._evaluation_began_s = 0.0
        self._rest_began_s: float | None = None
        self._num_done, self._logged_step = 0, -1

    @property
    def trainer(self) -> TrainerView:
        """The Trainer of the last call.

        Raises:
            TypeError: the bar has not been used yet, as in Lightning.
        """
        if self._shown_trainer is None:
            raise TypeError(f"The `{type(self).__name__}._trainer` reference has not been set yet.")
        return self._shown_trainer

    @property
    def total_train_batches(self) -> float:
        """Number of training batches per epoch."""
        return 0 if self._shown_trainer is None else self._shown_trainer.num_training_batches

    @property
    def total_val_batches(self) -> float:
        """Number of validation batches of all loaders; 0 in an epoch without validation."""
        trainer = self._shown_trainer
        every = 1 if trainer is None else trainer.check_val_every_n_epoch
        is_validated = trainer is not None and (every is None or (trainer.current_epoch + 1) % every == 0)
        return sum(trainer.num_val_batches) if trainer is not None and is_validated else 0

    def get_metrics(self, trainer: TrainerView, pl_module: Any) -> dict[str, Any]:
        """Return the values to show, by name. Override this method to add, change or remove values."""
        return dict(trainer.progress_bar_metrics)

    @property
    def is_enabled(self) -> bool:
        """True while the progress is displayed."""
        return self._display is not None

    def setup(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        self._shown_trainer = trainer

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print ``args`` like the built-in ``print``. ``LightningModule.print`` calls this method."""
        print(*args, **kwargs)

    # Training -----------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._is_training = True
        self._log_every_n_steps = trainer.log_every_n_steps
        self._log_interval = trainer.global_step // self._log_every_n_steps
        self._num_timed_batches = -1
        self._num_items = self._num_counted = 0
        self._metrics = {}
        self._rest_began_s = None
        self._logged_step = -1
        self._open(trainer)

    def on_save_checkpoint(self, trainer: TrainerView, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        self._rest_clock()

    def on_train_batch_start(self, trainer: TrainerView, pl_module: Module, batch: Any, batch_idx: int) -> None:
        if self._rest_began_s is not None:
            self._clock_began_s += time.monotonic() - self._rest_began_s
            self._rest_began_s = None

    def _rest_clock(self) -> None:
        """Pause the clock until the next batch."""
        if self._rest_began_s is None:
            self._rest_began_s = time.monotonic()

    def on_train_batch_end(
        self, trainer: TrainerView, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._num_timed_batches += 1
        now_s = time.monotonic()
        log_interval = trainer.global_step // self._log_every_n_steps
        if log_interval == self._log_interval and now_s < self._next_draw_s and self._num_timed_batches:
            return
        if self._num_timed_batches == 0:
            self._clock_began_s = now_s
        is_log_step = log_interval != self._log_interval
        self._log_interval = log_interval
        if self._display is not None:
            self._count_items(batch)
        self._draw_training(trainer, batch_idx + 1, is_log_step)

    def _count_items(self, batch: Any) -> None:
        """Add the tokens of ``batch``, or its samples if it has no tokens. Only batches that are drawn are counted, so
        that steps between them have no overhead. Sizes are read from shapes."""
        num_tokens = num_tokens_of(batch)
        self._item = "tokens" if num_tokens else "samples"
        self._num_items += num_tokens or batch_size_of(batch)
        self._num_counted += 1

    def on_train_epoch_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._next_draw_s = 0.0  # the first batch of the next epoch redraws the bar

    def on_train_end(self, trainer: TrainerView, pl_module: Module) -> None:
        self._is_training = False
        if self._num_timed_batches >= 0 and self._logged_step != trainer.global_step:
            progress, num_total = run_of(trainer, "fit").progress, trainer.num_training_batches
            num_done = progress.batch_idx or (int(num_total) if math.isfinite(num_total) else self._num_done)
            self._draw_training(trainer, num_done, is_log_step=True, epoch=progress.epoch - (progress.batch_idx == 0))
        self._close()

    def _draw_training(self, trainer: TrainerView, num_done: int, is_log_step: bool, epoch: int | None = None) -> None:
        if self._display is None:
            return
        self._num_done = num_done
        if is_log_step:
            self._logged_step = trainer.global_step
            self._metrics = shown_numbers(self.get_metrics(trainer, trainer.lightning_module))
        elif not self._display.redraws_between_log_steps:
            self._next_draw_s = math.inf
            return
        last_epoch = trainer.max_epochs
        of_epochs = f"/{last_epoch - 1}" if last_epoch is not None and last_epoch > 0 else ""
        num_steps = trainer.num_steps_in_all
        of_steps = f"/{num_steps:.0f}" if math.isfinite(num_steps) else ""
        elapsed_s = time.monotonic() - self._clock_began_s
        batches_per_s = self._num_timed_batches / elapsed_s if self._num_timed_batches > 0 and elapsed_s > 0 else 0.0
        num_left = num_batches_left(trainer, num_done) if self._is_training else math.nan
        self._display.draw(
            Standing(
                title=f"epoch {trainer.current_epoch if epoch is None else epoch}{of_epochs}",
                num_done=num_done,
                num_total=trainer.num_training_batches,
                step_text=f"step {trainer.global_step}{of_steps}",
                batches_per_s=batches_per_s,
                items_per_s=batches_per_s * trainer.num_data_ranks * self._num_items / max(self._num_counted, 1),
                item=self._item,
                left_s=num_left / batches_per_s if batches_per_s else math.inf,
                metrics=self._metrics,
            )
        )
        self._schedule_redraw()

    # Evaluation ---------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: TrainerView, pl_module: Module) -> None:
        if trainer.sanity_checking:
            self._start_evaluation(trainer, "sanity check", trainer.num_sanity_val_steps)
        else:
            self._start_evaluation(trainer, "validation")

    def on_test_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._start_evaluation(trainer, "test")

    def on_predict_start(self, trainer: TrainerView, pl_module: Module) -> None:
        self._start_evaluation(trainer, "predict")

    def on_validation_batch_end(self, trainer: TrainerView, pl_module: Module, *_: Any, **__: Any) -> None:
        # In each round, every rank evaluates one batch, but the last round can be incomplete.
        self._num_evaluated = min(self._num_evaluated + trainer.num_data_ranks, self._num_total)
        if time.monotonic() >= self._next_draw_s and self._display is not None:
            self._display.draw(self._evaluation_progress({}))
            self._schedule_redraw()

    on_test_batch_end = on_validation_batch_end
    on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: TrainerView, pl_module: Module) -> None:
        if self._display is not None:
            metrics = shown_numbers(self.get_metrics(trainer, trainer.lightning_module))
            self._display.end(self._evaluation_progress(metrics))
        if self._is_training:
            self._schedule_redraw()
        else:
            self._close()

    on_test_end = on_validation_end
    on_predict_end = on_validation_end

    def _start_evaluation(self, trainer: TrainerView, title: str, most_of_a_loader: float = math.inf) -> None:
        self._open(trainer)
        num_total = sum(min(most_of_a_loader, number) for number in run_of(trainer, "val_limits").batches.limits)
        self._title, self._num_total, self._num_evaluated = title, num_total, 0
        self._evaluation_began_s = time.monotonic()
        self._rest_clock()

    def _evaluation_progress(self, metrics: dict[str, float]) -> Standing:
        elapsed_s = max(time.monotonic() - self._evaluation_began_s, 1e-9)
        rate = self._num_evaluated / elapsed_s
        num_left = self._num_total - self._num_evaluated
        left_s = num_left / rate if rate and num_left > 0 else math.inf
        return Standing(self._title, int(self._num_evaluated), self._num_total, "", rate, left_s, metrics)

    # The display --------------------------------------------------------------------------------------------------

    def _open(self, trainer: TrainerView) -> None:
        if self._display is None and trainer.is_global_zero:
            from rich.console import Console

            console = self._console or Console(file=sys.stderr)
            is_terminal = console.is_terminal and not console.is_dumb_terminal
            self._display = BarDisplay(console) if is_terminal else LineDisplay(console)
        self._schedule_redraw()

    def _schedule_redraw(self) -> None:
        """Set the time of the next redraw between log steps."""
        redraws = self._display is not None and self._display.redraws_between_log_steps
        self._next_draw_s = time.monotonic() + self.refresh_interval_s if redraws else math.inf

    def _close(self) -> None:
        self._is_training = False
        if self._display is not None:
            self._display.close()
        self._display, self._next_draw_s = None, math.inf

    def on_exception(self, trainer: TrainerView, pl_module: Module, exception: BaseException) -> None:
        self._close()

    def teardown(self, trainer: TrainerView, pl_module: Module, stage: str) -> None:
        self._close()


def num_batches_left(trainer: TrainerView, num_done: int) -> float:
    """Return the number of training batches that remain until the regular end of the run; infinite if unknown.

    Args:
        num_done: number of completed batches of the current epoch.
    """
    by_steps = (trainer.num_steps_in_all - trainer.global_step) * trainer.accumulate_grad_batches
    max_epochs = trainer.max_epochs
    if max_epochs is None or max_epochs < 0 or math.isinf(trainer.num_training_batches):
        return by_steps
    num_later_epochs = max_epochs - trainer.current_epoch - 1
    return min(by_steps, trainer.num_training_batches - num_done + num_later_epochs * trainer.num_training_batches)
