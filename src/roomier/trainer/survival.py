"""Continue a fit after ranks were killed; see :class:`ElasticRanks` and [Note: ranks that survive] in
``docs/design/launch.md``."""

from __future__ import annotations

import shutil
import traceback
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from roomier.api.module import network_of
from roomier.callbacks.elastic_ranks import ElasticRanks
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.engine.divide import is_sharded
from roomier.launch.failure import chain, is_of_lost_peer
from roomier.plan.choices import averages_itself
from roomier.run.progress import Progress
from roomier.run.run import Run
from roomier.run.settled import Request, Start
from roomier.storage.mirror import local_of
from roomier.train.fit import is_validation_due
from roomier.train.saving.save import save_alone
from roomier.train.settling.job import global_batch_of
from roomier.train.step import takes_closure
from roomier.trainer.attributes import TrainerAttributes

_TIMEOUT_S = 600.0  # a survivor can be in a long activity, such as a validation, before its next collective fails


def continued(trainer: TrainerAttributes, request: Request, error: Exception) -> Request | None:
    """Form a new process group without the ranks that were killed. Every survivor must call this function.

    Args:
        request: the fit that failed.
        error: the error that ended the fit on this rank.

    Returns:
        The request with which the fit continues; None if it cannot continue.

    Raises:
        RoomierError: the survivors could not form a process group.
    """
    callback = next((each for each in trainer.callbacks if isinstance(each, ElasticRanks)), None)
    watch = None if callback is None else callback.take_watch()
    if watch is None or callback is None:
        return None
    run = trainer.fitted
    assert run is not None
    with ExitStack() as on_failure:
        on_failure.callback(watch.close)
        own = _own_step(run, callback), callback.is_at_save_point
        if not is_of_lost_peer(error):
            watch.end_others(error)
            return None
        place = callback.place if request.world.is_one_node else local_of(request.root)
        survivors = watch.survivors(own, place, _TIMEOUT_S)
        if survivors is None:
            return None
        world, is_held = survivors.world_of(request.world), survivors.step >= 0
        after = f"continues after step {survivors.step}" if is_held else "returns to the newest snapshot or checkpoint"
        text = f"{' and '.join(survivors.lost)}. Training {after} on {world.size} of {request.world.size} ranks"
        received = callback.received = Path(survivors.folder)
        on_failure.callback(shutil.rmtree, received, ignore_errors=True)
        checkpoint = received / "state" if is_held else None
        if checkpoint is not None and survivors.source == request.world.rank:
            _write(run, callback, checkpoint)
        watch.close()
        start = Start(checkpoint, run.folder, batch=global_batch_of(run.plan, run.settled.data))
        num_nodes = world.size // world.local_size
        parallel = replace(request.plan.parallel, devices=world.local_size, num_nodes=num_nodes)
        plan = replace(request.plan, parallel=parallel)
        trainer.forget_runs(Progress(**run.progress.state()))
        trainer.world, trainer.ranks, trainer.plan, trainer.requested_plan = world, Ranks(), plan, plan
        if is_sharded(network_of(request.module)):
            assert callback.structure is not None
            callback.structure.restore()
        del run
        for each in chain(error):
            traceback.clear_frames(each.__traceback__)  # the frames refer to the run, and so to the old process groups
        watch.rejoin(survivors)
        on_failure.pop_all()
        notice(text)  # printed by the new rank 0
    return replace(request, plan=plan, world=world, fitted=None, continues=start)


def _own_step(run: Run, callback: ElasticRanks) -> int:
    """Return the step of which this rank has the complete state; -1 if the state is incomplete or divided."""
    held, progress = callback.held, run.progress
    if held is None or takes_closure(run) or averages_itself(run.plan.optimizer.name):
        return -1
    if run.plan.parallel.gradient_compression != "none" or not run.module.automatic_optimization:
        return -1
    stored = held["progress"]
    is_same = (stored["global_step"], stored["num_batches"]) == (progress.global_step, progress.num_batches)
    return progress.global_step if is_same else -1


def _write(run: Run, callback: ElasticRanks, path: Path) -> None:
    """Write the state of this rank to ``path``, for the other ranks."""
    held = callback.held
    assert held is not None
    if not callback.is_at_save_point:  # the step failed after its update, so the continued run completes the step
        run.progress.load(held["progress"])
        is_due = bool(run.batches.evaluated) and run.options.val_check_interval_s is None
        held["progress"]["is_validation_due"] = is_due and is_validation_due(run, held["window"])
        held["progress"]["is_epoch_end_due"] = run.progress.batch_idx >= run.batches.num_training
    save_alone(run, path, held)
