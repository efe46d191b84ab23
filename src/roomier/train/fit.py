"""The training loop, in the order of execution."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch import Tensor

from roomier.api.callback import GoBackError
from roomier.core.device.rng import set_rng_state
from roomier.data.peers import check_peers, compared
from roomier.run.checks import check_finite, check_trains
from roomier.run.run import Run, call
from roomier.train.evaluate import note_batches, validate_within_fit
from roomier.train.reload import reload_loaders
from roomier.train.saving.restore import go_back
from roomier.train.saving.save import report_nothing_to_do, save_point
from roomier.train.step import TrainingStep, forward_backward_of, install_step_hooks, update_of, with_events


def fit(run: Run) -> None:
    """Train until a limit is reached, or until a callback or a signal stops the run.

    Each epoch consists of optimizer steps. A step computes the gradients of its micro-batches, clips the gradients,
    updates the parameters, steps the schedulers and logs values. If validation is due, the step then runs the
    validation. Each step ends with the save point. Checkpoints are saved, and training can end, only at the save point.
    """
    step = TrainingStep(run)
    install_step_hooks(run, step)
    forward_backward, update = forward_backward_of(run), update_of(run)
    if run.events is not None:
        forward_backward = with_events(run.events, forward_backward)
    if not begin(run):
        return
    is_over, is_training = catch_up(run), True
    while is_training:
        try:
            while not is_over:
                for window in windows(run, start_epoch(run), step):
                    step.start_window(window)
                    try:
                        loss = forward_backward(step, window)
                    except Exception as error:
                        assert run.now.window is not None
                        note_batches(error, run.now.window, run.ranks.world)
                        raise
                    if step.skips_epoch:  # discard the gradients of the skipped step
                        step.end()
                        break
                    if is_over := end_step(run, step, len(window), has_stepped=take_step(run, loss, update)):
                        break
                if not is_over:
                    end_epoch(run, is_left=step.skips_epoch)
                    run.vote(waits=True)
                    is_over = save_point(run)
            if not run.now.is_interrupted:
                finish(run)
            is_training = False
        except GoBackError as error:
            go_back(run, error)
            is_over = catch_up(run)
    run.vote(waits=True)


def start_epoch(run: Run) -> Iterator[Any]:
    """Start or resume the current epoch, and return an iterator over its remaining batches."""
    progress = run.progress
    if run.settled.request.options.reload_dataloaders_every_n_epochs:
        reload_loaders(run)
    if run.source.ahead is None:
        run.source.announce(progress.epoch)
    if progress.batch_idx == 0:
        call(run.hooks.on_train_epoch_start)
    batches = run.source.start(progress.epoch)
    if not run.ranks.peers.is_alone:
        batches = compared(run.ranks, batches, run.source)
    progress.batch_idx = run.source.num_batches_done  # a resumed epoch skips these batches
    return batches


def end_step(run: Run, step: TrainingStep, num_batches: int, *, has_stepped: bool) -> bool:
    """Run the code that follows the update in a step. Return True if training ends with this step."""
    progress, schedulers, log_interval = run.progress, run.schedulers, step.log_interval
    progress.global_step += has_stepped
    progress.batch_idx += num_batches
    progress.num_batches += num_batches
    if schedulers.are_there:
        step_schedulers(run, has_stepped=has_stepped)
    step.end()
    if step.frees_gradients:
        run.engine.free_gradients()
    if run.profiler is not None:
        run.profiler.step()
    run.vote()
    done = progress.num_batches if step.counts_batches else progress.global_step
    if done // log_interval > step.first_step // log_interval or run.now.is_stop_agreed:
        log_step(run)
    if run.batches.evaluated and is_validation_due(run, step):
        validate_within_fit(run)
        step.validated_s = time.monotonic()
    if schedulers.watch_each_step and has_stepped:
        step_watching(run)
    return save_point(run)


def take_step(run: Run, loss: Tensor | None, update: Callable[[Tensor | None], None]) -> bool:
    """Run the update, and return True if it counts as a step. If a hook skips the update, the loss is discarded."""
    if loss is None:
        check_trains(run)
        if not run.counts_empty_steps:
            return False
    now, before = run.now, run.now.last_loss
    if loss is not None:
        now.last_loss = loss
    update(loss)
    if not now.leaves_out_step:
        return True
    now.leaves_out_step, now.last_loss = False, before
    return False


def begin(run: Run) -> bool:
    """Run the code that precedes the first step. Return False if no step remains."""
    run.vote(waits=True)
    run.now.num_batches_before = run.progress.num_batches
    has_work = not run.is_at_its_end()
    run.now.is_in_step = has_work or None
    # As in Lightning, the iterator of the first epoch draws its seed and starts its workers before the hook.
    if has_work and (run.now.random_state is None or run.progress.epoch == 0):
        run.source.ahead = run.source.start(run.progress.epoch)
    if has_work:
        call(run.hooks.on_train_start)
    if run.now.random_state is not None:  # at the end, because the code above must not change the restored random state
        set_rng_state(run.now.random_state)
    if not has_work:
        report_nothing_to_do(run)
    return has_work


def catch_up(run: Run) -> bool:
    """Run the validation that a signal interrupted in the previous run. Return True if training ends afterwards."""
    if not run.progress.is_validation_due or validates_at_unknown_end(run):  # end_epoch validates later
        return False
    validate_within_fit(run)
    step_watching(run)
    return save_point(run)


def step_schedulers(run: Run, *, has_stepped: bool) -> None:
    """Step the schedulers that monitor no metric, after the last micro-batch of a window.

    As in Lightning, schedulers step before ``on_train_batch_end`` of this micro-batch, so that a subsequent validation
    uses the new values.
    """
    progress = run.progress
    if has_stepped:
        run.schedulers.step("step", progress.batch_idx, run.results)
    if progress.batch_idx >= run.batches.num_training:
        run.schedulers.step("epoch", progress.epoch + 1, run.results)


def step_watching(run: Run) -> None:
    """Step the schedulers with interval "step" that monitor a metric, unless a signal interrupted the validation."""
    if not run.progress.is_validation_due:
        run.schedulers.step("step", run.progress.batch_idx, run.results, watching=True)


def finish(run: Run) -> None:
    """Run the code that follows the last step. The last step is logged even if it is not a log step."""
    check_finite(run, "at the end")
    if run.results.logged_step != run.log_step and run.progress.num_batches > run.now.num_batches_before:
        log_step(run, is_last=True)
    if run.progress.batch_idx:  # training ended within an epoch: log the metrics of its completed part
        run.results.call(run.hooks.on_train_epoch_end)
        run.log_metrics(run.results.end_epoch("train"))
    call(run.hooks.on_train_end)


def windows(run: Run, batches: Iterator[Any], step: TrainingStep) -> Iterator[list[Any]]:
    """Yield a list of micro-batches for each optimizer step of the epoch. The last list may be shorter.

    All ranks yield the same number of lists. Loaders may end after different numbers of batches on different ranks. In
    this case, the epoch ends on all ranks when the first loader ends.
    """
    progress, num_batches = run.progress, run.batches.num_training
    size = run.settled.accumulation.at(progress.epoch)
    agrees = run.source.may_end_apart and not run.ranks.is_alone
    step.skips_epoch = False
    while (num_left := num_batches - progress.batch_idx) > 0 and not step.skips_epoch:
        num_wanted = size if size <= num_left else int(num_left)
        window = list(islice(batches, num_wanted))
        if agrees:
            counts = run.ranks.gather(len(window))
            if progress.batch_idx == 0 and 0 in counts:
                raise run.source.empty_on([rank for rank, count in enumerate(counts) if count == 0])
            if min(counts) < max(counts):
                run.source.report_dropped(counts, progress.batch_idx)
            window = window[: min(counts)]
        if not window:
            break
        yield window
        if agrees and len(window) < num_wanted:
            break
    if agrees:
        run.source.end_epoch()
    if progress.batch_idx == run.source.num_batches:
        next(batches, None)  # exhaust the iterator of the loader, as a for loop does


def log_step(run: Run, *, is_last: bool = False) -> None:
    """Write the row of values for a log step, or for the last step. This function waits for the device."""
    losses = None if run.ranks.is_alone else run.results.settle(run.loss_number())
    if not run.ranks.peers.is_alone and run.now.window is not None:
        check_peers(run.ranks, run.now.window.batches, run.source)
    check_finite(run, "at a log step", losses)
    row, own = dict[str, Any](), dict[str, Any]()
    if run.loggers.loggers:
        row = run.results.last_step_values() if is_last else run.results.step_values()
    loss = run.loss_number() if losses is None else run.loss_of_all(losses)
    run.results.logged_step, run.results.logged_loss = run.log_step, loss
    if loss is not None:
        own["loss"] = loss
    if is_last and run.progress.batch_idx == 0:  # the epoch of the last step is already counted as completed
        own["epoch"] = run.progress.epoch - 1
    if run.engine.scaler.is_on:
        own["num_skipped_steps"] = run.engine.scaler.num_skipped
    run.log_metrics(row, own)


def is_validation_due(run: Run, step: TrainingStep) -> bool:
    """Return True if a multiple of the validation interval was reached in this window, or training stops.

    If the interval is a time, the ranks agree on it in each step.
    """
    progress, every_n_epoch, interval = run.progress, run.options.check_val_every_n_epoch, run.batches.val_interval
    if every_n_epoch is not None and (progress.epoch + 1) % every_n_epoch:
        return False
    if run.now.is_stop_agreed and run.has_minimum:
        return True
    if (interval_s := run.options.val_check_interval_s) is not None:
        return any(run.ranks.gather(time.monotonic() - step.validated_s >= interval_s))
    done = progress.num_batches if every_n_epoch is None else progress.batch_idx
    return done // interval > (done - progress.batch_idx + step.first_batch) // interval


def end_epoch(run: Run, *, is_left: bool) -> None:
    """Run the code that follows the last step of an epoch.

    Args:
        is_left: True if a hook skipped the remaining batches of the epoch. No validation follows, as in Lightning.
    """
    progress, results = run.progress, run.results
    check_trains(run, is_epoch_over=True)
    check_finite(run, "at the end of an epoch")
    if progress.batch_idx < run.batches.num_training and not progress.is_validation_due:  # ended earlier than expected
        run.schedulers.step("epoch", progress.epoch + 1, results)
    if validates_at_unknown_end(run) and not is_left:
        validate_within_fit(run)
        if progress.is_validation_due:  # interrupted by a signal: the resumed run ends this epoch
            return
    results.call(run.hooks.on_train_epoch_end)
    run.log_metrics(results.end_epoch("train"))
    run.schedulers.step("epoch", progress.epoch + 1, results, watching=True)
    progress.epoch += 1
    progress.batch_idx = 0


def validates_at_unknown_end(run: Run) -> bool:
    """Return True if validation is due at the end of an epoch whose length was unknown.

    The length is unknown if the loader has no length, or if it yielded fewer batches than its length.
    """
    every_n_epoch = run.options.check_val_every_n_epoch
    return bool(
        run.batches.evaluated
        and run.batches.val_interval == run.batches.num_training > run.progress.batch_idx
        and every_n_epoch is not None
        and (run.progress.epoch + 1) % every_n_epoch == 0
    )
