"""Checks that stop a run if a loss or a weight is not finite, or if no batch results in an optimizer step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

import torch

from roomier.core.errors import TrainingError
from roomier.core.sharded import local_part
from roomier.core.tree import batch_size_of
from roomier.run.run import Run

MAX_BATCHES_BEFORE_FIRST_STEP = 1000
"""Number of batches without an optimizer step after which a run is stopped if the length of its epoch is unknown.

A loader without a length may never end, so the run would otherwise process batches forever without training. If the
length is known, a later batch can still have a loss, so the check waits for the end of the epoch.
"""


def check_finite(run: Run, where: str, losses: Sequence[float | None] | None = None) -> None:
    """Raise an error if a loss is not finite, before the loss is logged or saved. Every rank must call this function.

    A loss scaler skips each step whose loss is not finite, and halves its scale each time. A scale below 1 has been
    halved many times in a row, so a smaller scale would not prevent the problem.

    Args:
        where: location of the check, for the message.
        losses: losses of the last step on each rank, if they are known.

    Raises:
        TrainingError: the last loss is not finite on a rank, and no loss scaler skips its step.
    """
    for look in run.looks:
        look()
    if run.ranks.is_alone:
        if run.now.last_loss is None or bool(torch.isfinite(run.now.last_loss)):
            return
    elif losses is None:
        losses = run.ranks.gather(run.loss_number())
    if run.engine.scaler.is_on and run.engine.scaler.factor >= 1.0:
        return
    losses = losses or [run.loss_number()]
    found = [rank for rank, loss in enumerate(losses) if loss is not None and not math.isfinite(loss)]
    if found:
        problem = (
            f"is not finite{_on(run, found)} at step {run.progress.global_step} ({where}; the loss is checked every "
            f"log_every_n_steps={run.options.log_every_n_steps} steps, before each checkpoint and after each "
            "epoch)"
        )
        raise TrainingError("loss", losses[found[0]], *_explained(run, problem, found))


def check_finite_weights(run: Run) -> None:
    """Raise an error if weights are not finite, before they are saved. Every rank must call this function.

    A step with a finite loss can produce weights that are not finite.

    Raises:
        TrainingError: a trained parameter contains NaN or infinity.
    """
    found = {rank: each for rank, each in enumerate(run.ranks.gather(_not_finite(run))) if each is not None}
    if found:
        name, value = next(iter(found.values()))
        on_ranks = _on(run, [rank for rank, (other, _) in found.items() if other == name])
        problem = f"this parameter is not finite{on_ranks} after step {run.progress.global_step}"
        raise TrainingError(
            name, value, f"{problem} (found before a checkpoint was saved)", _way_back(run, list(found))
        )


def check_trains(run: Run, *, is_epoch_over: bool = False) -> None:
    """Raise an error if a run does not perform any optimizer steps.

    Raises:
        TrainingError: the first epoch had no optimizer step. If its length is unknown, the error is raised after
            :data:`MAX_BATCHES_BEFORE_FIRST_STEP` batches.
    """
    num_batches = run.progress.num_batches
    is_endless = math.isinf(run.batches.num_training) and num_batches >= MAX_BATCHES_BEFORE_FIRST_STEP
    is_time_to_judge = num_batches > 0 if is_epoch_over else is_endless
    has_trained = run.progress.global_step > 0
    if run.counts_empty_steps and run.saves.step is None:
        has_trained = run.now.last_loss is not None
    if has_trained or not is_time_to_judge:
        return
    if run.module.automatic_optimization:
        problem = f"returned no loss for any of the first {num_batches} batches, so no parameter was trained"
        action = "Return the loss at the end of training_step. None skips a batch"
        raise TrainingError("training_step", None, problem, action)
    if math.isinf(run.settled.epoch_limit) and run.options.max_time is None:
        raise TrainingError(
            "training_step",
            type(run.module).__name__,
            f"stepped no optimizer in the first {num_batches} batches, but max_steps counts only optimizer steps",
            "In training_step, call step() of self.optimizers() instead of a different optimizer, or set max_epochs",
        )


def _not_finite(run: Run) -> tuple[str, float] | None:
    """Return the name of a parameter on this rank that contains NaN or infinity, and one of its invalid values; None if
    all parameters are finite."""
    for name, parameter in run.engine.module.named_parameters():
        if not (parameter.requires_grad and parameter.is_floating_point()):
            continue
        own = local_part(parameter.detach())
        if own.numel() and not own.is_meta:  # else another stage of a pipeline has the values
            extremes = torch.stack(own.aminmax())  # isfinite() would allocate a second tensor
            if not bool(extremes.isfinite().all()):
                return name, float(extremes.sum())
    return None


def _on(run: Run, ranks: Sequence[int]) -> str:
    """Return text that names ``ranks``, for use in an error message."""
    if run.ranks.is_alone:
        return ""
    if len(ranks) == run.ranks.world.size:
        return f" on all {len(ranks)} ranks"
    return f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _explained(run: Run, problem: str, found: Sequence[int]) -> tuple[str, str]:
    """Return the problem and the recommended action for an error. If the last batch shows the cause, the problem
    includes it."""
    empty = _batch_without_terms(run)
    if empty is None:
        return problem, _way_back(run, found)
    action = "Remove such samples in the dataset or in collate_fn"
    return f"{problem}: {empty}, so the mean over its labels is 0/0", f"{_saved(run)} {action}"


def _batch_without_terms(run: Run) -> str | None:
    """Describe the batch of the last step if its loss is a mean over zero terms; otherwise return None.

    With several ranks or accumulated gradients, losses are weighted by their number of terms, so a batch without terms
    has no effect.
    """
    window = run.now.window
    if window is None or len(window.batches) > 1 or not run.ranks.is_alone or run.module.loss_reduction != "mean":
        return None
    with suppress(Exception):  # num_loss_terms is user code, and its error must not replace the error of the loss
        if int(run.module.num_loss_terms(window.batches[0])) == 0:
            is_empty = batch_size_of(window.batches[0]) == 0
            problem = "contains no samples" if is_empty else "contains only ignored labels (-100)"
            return f"batch {window.first_batch} of epoch {window.epoch} {problem}"
    return None


def _way_back(run: Run, found: Sequence[int]) -> str:
    advice = "Lower the learning rate, set gradient_clip_val, or find the operation with Trainer(detect_anomaly=True)"
    if len(found) > 1:  # the summed gradients made the weights NaN on all ranks
        advice += ". To find the rank on which the first invalid loss occurs, also set log_every_n_steps=1"
    return f"{_saved(run)} {advice}"


def _saved(run: Run) -> str:
    if run.saves.step is None:
        return "No checkpoint has been saved yet."
    return f"The checkpoint of step {run.saves.step} is unchanged. Resume from it with fit(ckpt_path='last')."
