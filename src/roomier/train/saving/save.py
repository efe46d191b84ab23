"""The save point, and the contents of a checkpoint."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from roomier import checkpoint
from roomier.api.adapt import seen_by_user
from roomier.api.lightning_module import LightningAdapter, described_datamodule, described_hparams
from roomier.callbacks.checkpoint_folder import remove_saved
from roomier.checkpoint.commit import at_home
from roomier.checkpoint.shown import ShownCheckpoint, without_objects
from roomier.checkpoint.snapshots import INTERRUPTED
from roomier.core.device.rng import rng_state
from roomier.core.hugging_face import find_pretrained
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.core.tree import map_tensors
from roomier.launch.job import may_requeue
from roomier.run.checks import check_finite, check_finite_weights
from roomier.run.logged.metric_state import metric_states, metrics_of
from roomier.run.progress import WantedSave
from roomier.run.run import Run
from roomier.run.states import RunningStage
from roomier.storage.mirror import local_of, shown
from roomier.train.saving.remote import upload


def save_point(run: Run) -> bool:
    """Save the checkpoints that are due, and determine whether training ends. Call this function at the end of a
    step.

    Within a step, only a checkpoint that is saved at the save point can be resumed with bit-identical results. After
    the last batch of an epoch, the save point follows the end of the epoch. A signal may stop the run before the end of
    the epoch, or during a validation. In this case, the resumed run completes the step.

    Returns:
        True if training ends here.
    """
    progress, now, saves, is_over = run.progress, run.now, run.saves, False
    progress.is_epoch_end_due = progress.batch_idx >= run.batches.num_training
    if not (progress.is_epoch_end_due or progress.is_validation_due):
        now.is_in_step = False
        is_over = run.is_over()
        if is_over or run.stop.received is not None:
            now.is_finishing, now.is_interrupted = True, not is_over
        for hook in run.hooks.on_save_point:
            hook()
        if saves.deferred:
            _write_deferred(run)
        if saves.background is not None and (is_over or run.is_background_save_over()):
            settle_background_save(run)
    if run.stop.received is not None and not is_over:
        _save_interrupted(run)
        run.now.is_in_step = None
        return True
    if is_over:
        state = run.saves.state_at_end or _state_outside_engine(run)  # a save at this point has computed the state
        run.saves.state_at_end = map_tensors(_kept_on_host, state)
        run.now.is_in_step = None
        return True
    run.now.is_in_step = True
    return False


def save_checkpoint(
    run: Run,
    path: str | Path,
    weights_only: bool,
    *,
    asynchronous: bool = False,
    when_committed: Callable[[], None] | None = None,
) -> None:
    """Write a checkpoint to ``path``, or schedule it for the next save point if a step is running. Every rank must call
    this function.

    Args:
        path: folder of the checkpoint.
        weights_only: True to save only the weights and the hyperparameters.
        asynchronous: True to return after the state is copied to host memory, and write the checkpoint during training.
        when_committed: function that is called on every rank, in this thread, after the checkpoint is committed.
    """
    wanted = WantedSave(local_of(at_home(path, "filepath")), weights_only, asynchronous, when_committed)
    if run.now.is_in_step:
        run.saves.deferred.append(wanted)
    else:
        write_checkpoint(run, wanted)


def write_checkpoint(run: Run, wanted: WantedSave) -> None:
    """Write the full state of a run, or only its weights and hyperparameters. Every rank must call this function.

    Raises:
        TrainingError: the loss or a weight is not finite, so the checkpoint must not replace a valid checkpoint.
        CheckpointError: this checkpoint, or the previous background checkpoint, cannot be written.
    """
    saves = run.saves
    if wanted.start is None:
        settle_background_save(run)
    run.engine.settle()  # each rank saves its shard, even if a hook has unsharded the parameters
    check_finite(run, "before a checkpoint")
    check_finite_weights(run)
    state = _with_hooks(run, weights(run) if wanted.weights_only else full_state(run))
    if wanted.start is not None:
        wanted.start(wanted.path, state)
        return
    then = partial(_committed, run, wanted, run.progress.global_step)
    is_training = run.settled.request.state.stage is RunningStage.TRAINING
    if not wanted.asynchronous or run.now.is_finishing or not is_training:  # the save must end before the run ends
        started_s = time.monotonic()
        checkpoint.save(wanted.path, state, run.ranks)
        saves.duration_s = time.monotonic() - started_s
        then()
        return
    saves.background = saves.background or checkpoint.BackgroundSaver(run.ranks)
    saves.background.start(wanted.path, state)
    saves.when_settled = then


def save_alone(run: Run, path: Path, held: Mapping[str, Any]) -> None:
    """Write the state of ``run`` to ``path`` without communication, after a step that failed on this rank.

    Args:
        held: entries of the state as of the end of the previous step. Callbacks, schedulers and the DataModule are
            saved in their current state.
    """
    progress, buffers = held["progress"], held["buffers"]
    run.progress.load(progress)
    datamodule = run.settled.request.datamodule
    state = {
        **_description(run),
        **run.engine.state(),
        **{name: held[name] for name in ("random", "data", "results", "metrics")},
        "callbacks": {callback.state_key: callback.state_dict() for callback in run.callbacks},
        "schedulers": run.schedulers.state(),
        "datamodule": {} if datamodule is None else datamodule.state_dict(),
    }
    state["module"] = {name: buffers.get(name, value) for name, value in state["module"].items()}
    checkpoint.save(path, _with_hooks(run, state), Ranks())


def _with_hooks(run: Run, state: dict[str, Any]) -> dict[str, Any]:
    shown = ShownCheckpoint(state)
    for callback in run.callbacks:
        callback.on_save_checkpoint(run.trainer, seen_by_user(run.module), shown)
    run.module.on_save_checkpoint(shown)
    return _data_of_lightning(run, shown) if isinstance(run.module, LightningAdapter) else dict(shown)


def _data_of_lightning(run: Run, shown: ShownCheckpoint) -> dict[str, Any]:
    state, left_out = without_objects(shown)
    if new := [place for place in left_out if place not in run.saves.not_stored]:
        run.saves.not_stored.update(new)
        name, places = type(seen_by_user(run.module)).__name__, ", ".join(new)
        notice(f"{name} adds objects to its checkpoints, but a checkpoint can contain only data. Not saved: {places}")
    return state


def settle_background_save(run: Run) -> None:
    """Wait until a background checkpoint is complete, and call its callback. Every rank must call this function.

    Raises:
        CheckpointError: the checkpoint cannot be written.
    """
    if run.saves.background is None or not run.saves.background.is_busy:
        return
    then, run.saves.when_settled = run.saves.when_settled, None
    run.saves.background.wait()
    if then is not None:
        then()


def end_background_save(run: Run) -> None:
    """End the background save when a run ends; see :meth:`BackgroundSaver.end`."""
    if run.saves.background is not None:
        run.saves.background.end()
    run.saves.background = run.saves.when_settled = None


def _committed(run: Run, wanted: WantedSave, step: int) -> None:
    if not wanted.weights_only:
        run.saves.step, run.saves.path = step, wanted.path
        run.ranks.on_zero(partial(_remove_interrupted, run))
    if not wanted.path.name.startswith("."):  # otherwise, a file for Lightning replaces this folder
        upload(run, wanted.path)
    if wanted.when_committed is not None:
        wanted.when_committed()


def weights(run: Run) -> dict[str, Any]:
    """Return the state that evaluation requires."""
    return {**_description(run), "module": run.engine.weights()}


def full_state(run: Run) -> dict[str, Any]:
    """Return the state from which a run resumes as if it had not been stopped.

    If training ended within an epoch, the metrics of the completed part were already logged and processed by callbacks.
    A resumed run must not start with these effects, so a save after the end uses the state of the last save point.
    """
    is_at_save_point = run.now.is_in_step is False
    outside = (None if is_at_save_point else run.saves.state_at_end) or _state_outside_engine(run)
    if is_at_save_point and run.now.is_finishing:
        run.saves.state_at_end = outside
    return {**_description(run), **run.engine.state(), **outside}


def _description(run: Run) -> dict[str, Any]:
    pretrained = _pretrained_config(run.engine.module)
    datamodule = run.settled.request.datamodule
    return {
        **({} if pretrained is None else {"pretrained": pretrained}),
        "plan": run.plan.to_dict(),
        "progress": run.progress.state(),
        **({} if run.events is None else {"seeding": {"seed": run.events.seed}}),
        "epoch": run.current_epoch,
        **described_hparams(run.module),
        **({} if datamodule is None else {"datamodule_init": described_datamodule(datamodule)}),
    }


def _state_outside_engine(run: Run) -> dict[str, Any]:
    datamodule = run.settled.request.datamodule
    callbacks = {callback.state_key: callback.state_dict() for callback in run.callbacks}
    own = rng_state(), map_tensors(_kept_on_host, metric_states(run.module))  # hooks of callbacks may draw numbers
    random, metrics = zip(*run.ranks.data.gather(own), strict=True)
    return {
        "callbacks": callbacks,
        "schedulers": run.schedulers.state(),
        "random": {str(rank): each for rank, each in enumerate(random)},
        "data": run.source.state_dict(),
        "datamodule": {} if datamodule is None else datamodule.state_dict(),
        "results": run.results.state(metrics_of(run.module)),
        "metrics": {str(rank): each for rank, each in enumerate(metrics)},
    }


def _kept_on_host(tensor: Tensor) -> Tensor:
    # The copy outlives training. Callback tensors that are on the device, such as averaged weights, are copied to host
    # memory.
    return tensor.detach().to("cpu", copy=True)


def _write_deferred(run: Run) -> None:
    for wanted in run.saves.deferred:
        write_checkpoint(run, wanted)
    run.saves.deferred.clear()


def _save_interrupted(run: Run) -> None:
    """Save a checkpoint unless a callback saved a checkpoint at this step, and print how to resume the run."""
    step, signal = run.progress.global_step, run.stop.received
    assert signal is not None
    run.now.is_interrupted = True
    run.now.is_in_step = False
    _write_deferred(run)
    settle_background_save(run)
    is_saved = is_found_as_last(run) if may_requeue(os.environ) else run.saves.step == step
    if run.folder is not None and run.settled.request.keeps_checkpoints and not is_saved:
        _report_short_time(run)
        write_checkpoint(run, WantedSave(run.folder / "checkpoints" / f"{INTERRUPTED}{step}"))
    if run.saves.step != step:
        notice(f"stopped by {signal.name} at step {step}. No checkpoint was saved, because checkpoints are disabled")
        return
    assert run.saves.path is not None
    ckpt_path = "last" if is_found_as_last(run) else shown(run.saves.path)
    notice(
        f"stopped by {signal.name} at step {step}, saved at {shown(run.saves.path)}. Resume with "
        f"trainer.fit(..., ckpt_path={ckpt_path!r}) or `roomier fit ... --ckpt_path {ckpt_path}`"
    )


def _report_short_time(run: Run) -> None:
    """Name the newest checkpoint if the machine probably stops before another one is complete."""
    preemption, saves = run.stop.preemption, run.saves
    if preemption is None or preemption.stops_at is None or saves.path is None or saves.duration_s is None:
        return
    left_s = (preemption.stops_at - datetime.now(UTC)).total_seconds()
    if left_s < saves.duration_s:
        end = f"this machine stops in {left_s:.0f} s, but the last checkpoint took {saves.duration_s:.0f} s"
        notice(f"{end}. If the save is not completed, resume from {shown(saves.path)}", every_rank=True)


def is_found_as_last(run: Run) -> bool:
    """Return whether ``ckpt_path="last"`` and a restarted job find a checkpoint of the current step in the run
    folder."""
    if run.saves.step != run.progress.global_step or run.saves.path is None or run.folder is None:
        return False
    return local_of(run.saves.path).absolute().parent == (run.folder / "checkpoints").absolute()


def _remove_interrupted(run: Run) -> None:
    """Remove checkpoints that earlier interruptions wrote, if the new checkpoint replaces them. No callback manages
    these checkpoints."""
    if run.folder is None or run.saves.path is None or run.saves.step is None:
        return
    folder = run.folder.absolute() / "checkpoints"
    if run.saves.path.absolute().parent != folder:
        return
    uploads = run.uploads
    remote = [] if uploads is None else [path for path in uploads.own_in(folder) if path.name.startswith(INTERRUPTED)]
    for path in {*folder.glob(f"{INTERRUPTED}*"), *remote}:
        number = path.name.removeprefix(INTERRUPTED)
        is_given = os.path.realpath(path) == run.settled.start.given_path
        if number.isdecimal() and int(number) < run.saves.step and not is_given:
            remove_saved(str(path), uploads)


def report_nothing_to_do(run: Run) -> None:
    """Print the reason why a fit ends before its first step."""
    progress, options = run.progress, run.options
    at = f"step {progress.global_step}, epoch {progress.epoch}"
    if run.stop.received is not None:
        run.now.is_interrupted = True
        notice(f"stopped by {run.stop.received.name} at {at}, before the first step. There is no state to save")
    elif run.batches.num_training == 0:
        has_none = run.source.num_batches == 0
        reason = f"{run.source.name} yields no batches" if has_none else "limit_train_batches=0 skips all batches"
        notice(f"nothing to train: {reason}")
    else:
        given = {name: getattr(options, name) for name in ("max_steps", "max_epochs", "max_time")}
        limits = ", ".join(f"{name}={value}" for name, value in given.items() if value not in (None, -1))
        notice(f"nothing to train: the run is at {at}, and its limits are {limits}. Raise the limits to continue")


def _pretrained_config(module: nn.Module) -> dict[str, Any] | None:
    """Return a description of the Hugging Face model that ``module`` is or contains; None if it contains no such model.

    Returns:
        ``{"prefix": ..., "config": {...}, "generation_config": {...}}``. The names of the model's weights start with
        the prefix, such as ``"model."`` or ``""``. The generation config is None if the model does not generate text.
    """
    found = find_pretrained(module)
    if found is None:
        return None
    prefix, model = found
    config = json.loads(model.config.to_json_string(use_diff=False))
    # fully_shard creates a class for each module.
    own = next(cls for cls in type(model).__mro__ if not cls.__module__.startswith("torch."))
    config["architectures"] = [own.__name__]
    generation = getattr(model, "generation_config", None) if model.can_generate() else None
    return {
        "prefix": prefix,
        "config": config,
        "generation_config": None if generation is None else json.loads(generation.to_json_string()),
    }
