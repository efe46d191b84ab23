"""The save point, and what a checkpoint holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roomier import checkpoint
from roomier.api.hparams import is_plain
from roomier.core.log import notice
from roomier.core.rng import rng_state
from roomier.train.run import Run, call


def save_point(run: Run) -> bool:
    """The one place of a step where a checkpoint resumes bit for bit: everything due at this step is done.

    Returns:
        Whether training ends here.
    """
    run.is_in_step = False
    run.is_finishing = is_over = run.is_over()
    call(run.hooks.on_save_point)
    for path, weights_only in run.deferred_saves:
        write_checkpoint(run, path, weights_only)
    run.deferred_saves.clear()
    if run.stop.received is not None:
        _save_interrupted(run)
    run.is_in_step = not is_over
    return is_over


def save_checkpoint(run: Run, path: str | Path, weights_only: bool) -> None:
    """Write a checkpoint at ``path``: now, or from within a step at its save point."""
    if run.is_in_step:
        run.deferred_saves.append((Path(path), weights_only))
    else:
        write_checkpoint(run, Path(path), weights_only)


def write_checkpoint(run: Run, path: Path, weights_only: bool = False) -> None:
    """Write what a resume needs, or the weights with the hyperparameters alone.

    Raises:
        TrainingError: the loss is not finite: such weights must not take the place of good ones.
        CheckpointError: it could not be written.
    """
    run.check_finite("before a checkpoint")
    state = weights(run) if weights_only else full_state(run)
    for callback in run.trainer.callbacks:
        callback.on_save_checkpoint(run.trainer, run.module, state)
    run.module.on_save_checkpoint(state)
    checkpoint.save(path, state)
    run.saved_step = run.progress.global_step


def weights(run: Run) -> dict[str, Any]:
    """What evaluation needs."""
    return {
        "plan": run.plan.to_dict(),
        "progress": run.progress.state(),
        "hyperparameters": {name: value for name, value in run.module.hparams.items() if is_plain(value)},
        "module": run.engine.state()["module"],
    }


def full_state(run: Run) -> dict[str, Any]:
    """What a run needs to go on as if it had not stopped."""
    datamodule = run.trainer.datamodule
    return {
        **weights(run),
        **run.engine.state(),
        "schedulers": run.schedulers.state(),
        "random": {"0": rng_state()},  # by rank
        "data": run.source.state_dict(),
        "datamodule": {} if datamodule is None else datamodule.state_dict(),
        "results": run.results.state(),
        "callbacks": {callback.state_key: callback.state_dict() for callback in run.trainer.callbacks},
    }


def _save_interrupted(run: Run) -> None:
    step = run.progress.global_step
    assert run.stop.received is not None
    if run.saved_step != step and run.folder is not None and run.trainer.enable_checkpointing:
        write_checkpoint(run, run.folder / "checkpoints" / f"interrupted-step={step}")
    if run.saved_step == step:
        notice(
            f"stopped by {run.stop.received.name} at step {step}, saved; go on with "
            "trainer.fit(..., ckpt_path='last'), or `roomier fit ... --ckpt_path last`"
        )
    else:
        notice(f"stopped by {run.stop.received.name} at step {step}; nothing was saved: checkpoints are turned off")
