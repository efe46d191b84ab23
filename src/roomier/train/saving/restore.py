"""Resume from a checkpoint: find the checkpoint, and restore its state. ``fit(weights=...)`` reads only the initial
weights of a model, from safetensors files or from a checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from roomier import checkpoint
from roomier.api.adapt import seen_by_user
from roomier.api.callback import ChecksState, GoBackError, PlacesTensors
from roomier.api.logger import Logger
from roomier.api.module import Module
from roomier.api.overrides import overrides
from roomier.callbacks.peer_snapshots import PeerSnapshots
from roomier.checkpoint.commit import at_home
from roomier.checkpoint.find import NoUsableCheckpointError, set_aside_incomplete
from roomier.checkpoint.lightning import is_lightning_file
from roomier.checkpoint.record import RECORD_NAME, RECORD_OF_DCP, DamagedCheckpointError, malformed
from roomier.checkpoint.run_state import check_run_state, peek_run, read_plan
from roomier.checkpoint.shown import OWN_ENTRIES, ShownCheckpoint
from roomier.checkpoint.snapshots import rescue
from roomier.core.device.rng import check_rng_state, preserved_rng, rng_state, seed_everything, set_rng_state
from roomier.core.errors import CheckpointError, RoomierError, TrainingError
from roomier.core.forms import item_of
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.core.tree import to_device
from roomier.data.position import check_generators
from roomier.engine.weights_file import WeightsFile, prepare_nothing
from roomier.loggers.group import set_run_folder
from roomier.plan import Plan
from roomier.plan.migrate.deepspeed.checkpoints import refuse_deepspeed_checkpoint
from roomier.plan.parts import AdapterPlan
from roomier.run.logged.metric_state import check_metric_states, load_metric_states, metrics_of
from roomier.run.run import Run
from roomier.run.settled import FirstWeights, Request, Start
from roomier.storage.remote_path import RemotePath
from roomier.techniques.adapters.layers import is_adapter
from roomier.techniques.adapters.lora import as_keyword
from roomier.train.saving.group_values import changed_in_plan, check_same_optimizer, put_changed, report_kept_values
from roomier.train.saving.lightning_resume import (
    LightningWeights,
    check_weights,
    errors_about,
    load_callbacks,
    restore_lightning,
    restore_lightning_weights,
    show_checkpoint,
)
from roomier.train.saving.save import settle_background_save
from roomier.train.settling.job import PREFIX, Job, job_of_fit, run_folder

_START_ANEW = "Restore a copy of the checkpoint, or pass ckpt_path=None to start from step 0"


def resolve_checkpoint(ckpt_path: str | Path | None, root: Path, best_path: str | None) -> Path | None:
    """Return the checkpoint that ``ckpt_path`` names.

    Args:
        ckpt_path: a checkpoint folder; ``"last"`` for the newest complete checkpoint folder under ``root``, or the
            newest ``.ckpt`` file if there is no such folder; ``"best"`` for the best checkpoint of the ModelCheckpoint;
            or None. If no checkpoint exists for ``"last"``, print a notice and return None. With ``"last"``, the
            temporary files of terminated saves are removed, and checkpoints without a record are renamed.
        root: the folder that contains the run folders.
        best_path: path of the best checkpoint; None or empty if no best checkpoint exists.

    Raises:
        CheckpointError: the checkpoint does not exist, or checkpoints exist for ``"last"``, but none can be used.
    """
    if ckpt_path is None:
        return None
    if ckpt_path == "last":
        return _newest(root)
    if ckpt_path == "best":
        if not best_path:
            problem = "no ModelCheckpoint of this Trainer has a best checkpoint"
            raise CheckpointError("ckpt_path", "best", problem, "Pass the path of a checkpoint")
        return at_home(best_path)
    if not isinstance(ckpt_path, (str, Path)):
        raise CheckpointError("ckpt_path", ckpt_path, "must be a path", "Pass a checkpoint, 'last' or 'best'")
    path = at_home(ckpt_path, "ckpt_path")
    refuse_deepspeed_checkpoint("ckpt_path", path)
    return path


def _newest(root: Path) -> Path | None:
    folders = sorted(root.glob(f"{PREFIX}*/checkpoints"))
    for folder in () if isinstance(root, RemotePath) else folders:
        with suppress(OSError):  # removal is optional, and another user may own the folder
            checkpoint.clear_stale(folder)
    unusable = None
    try:
        found = checkpoint.find_last(root, check_run_state, rejects_damage=True)
    except NoUsableCheckpointError as error:
        found, unusable = None, error
    files = [path for folder in folders for path in folder.glob("[!.]*") if is_lightning_file(path)]
    found = found or max(files, key=lambda each: each.stat().st_mtime, default=None)
    if found is None:
        if unusable is not None:
            raise CheckpointError("ckpt_path", "last", unusable.problem, _START_ANEW)
        notice(f"ckpt_path='last': no complete checkpoint under {root}; starting from step 0")
        return None
    if unusable is not None:
        notice(f"ckpt_path='last': {unusable.problem}; using {found}")
    for folder in () if isinstance(root, RemotePath) else folders:
        with suppress(OSError):
            set_aside_incomplete(folder)
    return found


def restore_last(run: Run, path: Path, restore_one: Callable[[Run, Path], None]) -> Path:
    """Call ``restore_one`` with the newest checkpoint ``path``.

    If the checkpoint is damaged, the next older valid checkpoint in the same folder is used, and a notice is printed.
    This fallback is necessary because the search for ``"last"`` does not read tensors and does not compare values with
    the current run.

    Returns:
        The checkpoint that was restored.

    Raises:
        CheckpointError: no checkpoint in the folder can be used. The error describes ``path``.
    """
    try:
        restore_one(run, path)
        return path
    except DamagedCheckpointError as error:
        for older in run.ranks.on_zero(lambda: _older_than(path)):
            with suppress(DamagedCheckpointError):
                restore_one(run, older)
                notice(f"skipped the checkpoint {path} ({error.problem}); using {older}")
                return older
        raise type(error)(error.field, error.received, error.problem, _START_ANEW) from error


def _older_than(path: Path) -> list[Path]:
    """Return the complete older checkpoints in the folder of ``path``, newest first."""
    found = checkpoint.list_complete(path.parent)
    return found[: found.index(path)][::-1] if path in found else []


def restore_weights(run: Run, path: Path) -> None:
    """Load the weights of the module from ``path``. Other contents of the checkpoint are not restored.

    Raises:
        CheckpointError: the checkpoint is damaged, or does not match the model.
    """
    if is_lightning_file(path):
        restore_lightning_weights(run, path)
        return
    with _named_ckpt_path():
        stored, weights = peek_run(path, check_files=True), run.engine.weights()
        _check_weights(run, path, stored, weights)
        only: tuple[str, ...] = ("module",)
        if overrides(run.module, "on_load_checkpoint", Module):
            only = ("module", *(stored.keys() - (OWN_ENTRIES - {"progress", "hyperparameters"})))
        places = _places(run, weights, stored["module"])
        state = checkpoint.load(path, into={"module": places}, only=only, ranks=run.ranks)
        found = loaded_weights(run, path, state, weights)
    run.engine.load_weights(found)  # calls set_extra_state; also copies weights that ``_places`` allocated


def restore(run: Run, path: Path) -> None:
    """Restore ``run`` to the point at which ``path`` was saved. Every rank must call this function.

    Weights are loaded in place, and optimizer states are read directly to the device of each state. Each rank reads
    only its shards. A resume therefore requires no more memory than training, and no copy of the states in host memory.
    The number of ranks and the strategy may differ from the number and the strategy in the saved run. If an error is
    raised, the run is unchanged.

    Raises:
        CheckpointError: the checkpoint is damaged, does not match the model or optimizer, or contains only weights.
        DataError: the data differs from the data of the saved run.
    """
    if is_lightning_file(path):
        restore_lightning(run, path)
        return
    with _named_ckpt_path():
        stored = peek_run(path, check_files=True)
        _check_complete(path, stored)
        weights = run.engine.weights()
        _check_weights(run, path, stored, weights)
        stored_plan = read_plan(path, stored["plan"])
        with malformed(path):
            _check_own_callbacks(run, stored["callbacks"])
        check_same_optimizer(stored_plan, run.plan)
        into: dict[str, Any] = {"module": _places(run, weights, stored["module"])}
        with malformed(path):
            for callback in run.callbacks:  # called first, because a callback may restore the parameter groups
                if isinstance(callback, PlacesTensors):
                    into.update(callback.places(weights, stored))
            run.engine.check(stored)
            into["optimizers"] = run.engine.places(
                stored["optimizers"],
                is_spec=lambda value: isinstance(value, checkpoint.TensorSpec),
                unneeded=checkpoint.UNREAD,
            )
            run.schedulers.check(stored["schedulers"], stored["optimizers"])
            run.results.check(stored["results"])
            check_metric_states(run.module, stored["metrics"])
        run.source.check(stored["data"], stored["progress"]["epoch"])
        changed = changed_in_plan(stored_plan, run.plan, run.engine.optimizers)
        if differences := stored_plan.diff(run.plan):
            notice("the plan differs from the plan of the checkpoint: " + "; ".join(map(str, differences)))
        state = checkpoint.load(
            path, into=into, ranks=run.ranks, empty=into.keys() - {"module"}, check=partial(_check_random_states, path)
        )
        state["module"] = loaded_weights(run, path, state, weights)
    if run.plan.optimizer.name is None:
        report_kept_values(run.engine.optimizers, state["optimizers"], has_schedulers=bool(run.schedulers.configs))
    put_changed(run.engine.optimizers, state["optimizers"], changed)
    run.engine.load(state)
    run.progress.load(state["progress"])
    if run.events is not None and "seeding" in state:  # a run with other seeds did not store its seed
        run.events.seed = state["seeding"]["seed"]
    device = run.engine.device
    load_metric_states(run.module, state["metrics"], run.ranks.data.world)
    run.results.load(state["results"], metrics_of(run.module), lambda value: to_device(value, device))
    run.source.load_state_dict(state["data"])
    _restore_schedulers(run, stored_plan, state["schedulers"])
    if run.settled.request.datamodule is not None:
        run.settled.request.datamodule.load_state_dict(state["datamodule"])
    shown = ShownCheckpoint(state)
    for callback in run.callbacks:
        callback.on_load_checkpoint(run.trainer, seen_by_user(run.module), shown)
    own = {each.state_key: each for each in run.callbacks if each.state_key in shown["callbacks"]}
    load_callbacks([(each, key, shown["callbacks"][key]) for key, each in own.items()], shown["callbacks"])
    run.saves.step, run.saves.path = run.progress.global_step, path
    _restore_random_states(run, state["random"])


def _restore_random_states(run: Run, stored: Mapping[str, Any]) -> None:
    world = run.ranks.data.world
    run.now.random_state = random_state_of(world.rank, stored)
    if len(stored) < world.size:
        notice(
            f"the checkpoint has random states of {len(stored)} ranks, but this run has {world.size} ranks. The "
            "other ranks start with states derived from the state of rank 0"
        )


def _is_strict(run: Run) -> bool:
    """Return True if the weights must match the model, because the module neither accepts nor makes differences."""
    return run.module.strict_loading and not overrides(run.module, "on_load_checkpoint", Module)


def _places(run: Run, own: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors into which the stored weights are read.

    These tensors are the weights of the model, or new tensors if the module may change or reject the loaded weights.
    """
    if _is_strict(run):
        return dict(own)
    return {name: _place(own.get(name), spec) for name, spec in stored.items()}


def _place(own: Any, stored: Any) -> Any:
    if not isinstance(stored, checkpoint.TensorSpec):
        return stored
    if isinstance(own, Tensor) and (tuple(own.shape), own.dtype) == (stored.shape, stored.dtype):
        return torch.empty_like(own)
    return torch.empty(stored.shape, dtype=stored.dtype)


def loaded_weights(run: Run, path: Path, state: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights to load from ``state``, after ``on_load_checkpoint`` of the module has changed them.

    With ``strict_loading=False``, weights that exist only in the model retain their values, and weights that exist only
    in the checkpoint are ignored.

    Raises:
        CheckpointError: the weights do not match the model.
    """
    if _is_strict(run):
        found: dict[str, Any] = state["module"]
        return found
    shown = ShownCheckpoint(state)
    show_checkpoint(run, shown)
    state.update(shown)
    found = shown["module"]
    if run.module.strict_loading:
        check_weights(path, own, found)
    elif differing := sorted(own.keys() ^ found.keys()):
        notice(f"strict_loading=False: ignoring {len(differing)} weights that are not in both: {differing[:5]}")
    return {name: found.get(name, value) for name, value in own.items()}


def random_state_of(rank: int, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored random state of ``rank``. If no state is stored, derive a random state that is the same in each
    resume."""
    own: dict[str, Any] | None = stored.get(str(rank))
    if own is not None:
        return own
    seed = zlib.crc32(stored["0"]["torch"].numpy().tobytes()) ^ zlib.crc32(rank.to_bytes(8, "little"))
    with preserved_rng():
        seed_everything(seed)
        return rng_state()


@contextmanager
def _named_ckpt_path() -> Iterator[None]:
    """Re-raise errors about a checkpoint as errors about the ``ckpt_path`` argument."""
    try:
        yield
    except CheckpointError as error:
        if error.field != "checkpoint":
            raise
        raise type(error)("ckpt_path", error.received, error.problem, error.action) from error.__cause__


def _restore_schedulers(run: Run, stored: Plan, states: Sequence[Mapping[str, Any]]) -> None:
    if run.plan.optimizer.name is None:
        run.schedulers.load(states)
        return
    has_other_step_count = stored.batch.accumulate_grad_batches != run.plan.batch.accumulate_grad_batches
    run.schedulers.load_planned(states, run.num_steps_in_all, has_other_step_count=has_other_step_count)


def _check_own_callbacks(run: Run, states: Mapping[str, Any]) -> None:
    for callback in run.callbacks:
        key = callback.state_key
        if key in states and isinstance(callback, ChecksState):
            callback.check_stored_state(states[key], item_of("callbacks", key))


def _check_random_states(path: Path, state: Mapping[str, Any]) -> None:
    with malformed(path):
        for rank, each in state["random"].items():
            check_rng_state(each, item_of("random", rank))
        check_generators(state["data"], "data")


def _check_complete(path: Path, stored: Mapping[str, Any]) -> None:
    of_engine, of_run = ("module", "optimizers", "scaler"), ("plan", "progress", "random", "datamodule", "callbacks")
    needed = (*of_engine, *of_run, "schedulers", "data", "results", "metrics")
    missing = [key for key in needed if key not in stored]
    if missing:
        problem = f"does not contain {', '.join(missing)}, because it was saved with weights only"
        action = "Load the weights with Module.load_from_checkpoint and start a new fit"
        raise CheckpointError("ckpt_path", str(path), problem, action)


def _check_weights(run: Run, path: Path, stored: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    """Check that adapters, names and shapes are those of the model, unless the module accepts differences."""
    names = stored.get("module", {})
    adapter = AdapterPlan(**stored.get("plan", {}).get("adapter", {}))
    is_that_of_plan = adapter == run.plan.adapter and adapter.lora_rank is not None
    if names.keys() != weights.keys() and not is_that_of_plan and any(map(is_adapter, names)):
        lora = "lora" if adapter.lora_rank is None else f"lora={as_keyword(adapter)}"
        action = (
            f"Pass {lora} to the Trainer, as in the saved run. Or load the model and its adapters with "
            "load_from_checkpoint, or write files of the merged model with `roomier export`"
        )
        raise CheckpointError("ckpt_path", str(path), "was saved with adapters that this model does not have", action)
    if _is_strict(run):
        check_weights(path, weights, names)


@dataclass(frozen=True)
class PlainCheckpoint:
    """Weights from a checkpoint without adapters, for a model that has adapters. The weights are read before
    quantization.

    Args:
        path: path of the checkpoint.
        ranks: the ranks that read the checkpoint together.
    """

    path: Path
    ranks: Ranks

    def check(self, network: nn.Module) -> set[str]:
        """Return the names of the tensors in ``network`` that the checkpoint provides, which are all tensors except
        adapters."""
        tensors = {**network.state_dict(), **dict(network.named_parameters(remove_duplicate=False))}
        return {name for name in tensors if not is_adapter(name)}

    def read_into(self, network: nn.Module, prepare: Callable[[Tensor], object] = prepare_nothing) -> None:
        """Read the weights into the tensors of ``network``.

        Args:
            prepare: unused; required by the protocol :class:`WeightsToRead`.

        Raises:
            CheckpointError: the checkpoint is damaged, or does not match the model.
        """
        plain = {
            name: checkpoint.UNREAD if isinstance(each, Tensor) and each.is_meta else each  # of another stage
            for name, each in network.state_dict().items()
            if not is_adapter(name)
        }
        with errors_about("weights", self.path):
            read = checkpoint.load(self.path, into={"module": plain}, only=("module",), ranks=self.ranks)["module"]
        found = {name: each for name, each in read.items() if each is not None}
        network.load_state_dict(found, strict=False)  # calls set_extra_state; the tensors already contain the weights


def find_start(
    request: Request, ranks: Ranks, loggers: Sequence[Logger], best_path: str | None
) -> tuple[Start, Job | None]:
    """Find the checkpoint from which ``request`` resumes, and create the run folder. Every rank must call this
    function.

    Returns:
        The checkpoint and the folder of the run; and the job to record in this folder, or None if no launcher restarts
        jobs.

    Args:
        loggers: the loggers, which receive the run folder.
        best_path: path of the best checkpoint of the last fit, for ``ckpt_path="best"``.

    Raises:
        RoomierError: the checkpoint or the weights file does not exist. For a fit, ``"last"`` may name none.
    """
    root, asked = request.root, request.ckpt_path
    for each in request.trainer.callbacks if request.is_fit and request.keeps_files else ():
        if isinstance(each, PeerSnapshots) and not isinstance(root, RemotePath):
            rescue(each.place, root, ranks)
    if request.continues is not None:
        start = _continued(request.continues, ranks)
        set_run_folder(loggers, start.folder)
        return start, None
    path = ranks.on_zero(lambda: resolve_checkpoint(asked, root, best_path))
    if asked == "last" and path is None and not request.is_fit:
        action = "Pass default_root_dir of the fit, the path of a checkpoint, or None for the weights of the module"
        raise CheckpointError("ckpt_path", asked, f"names no checkpoint, because {root} contains none", action)
    job = job_of_fit(root, ranks) if request.is_fit and request.keeps_files else None
    earlier = None if job is None else ranks.on_zero(lambda: job.find_earlier(root))
    if earlier is not None:
        path = earlier[0]
    folder = None if request.fitted is None else request.fitted.folder  # an evaluation adds rows to the logs of the fit
    if request.is_fit:
        folder = ranks.on_zero(lambda: run_folder(root, path)) if request.keeps_files else None
    set_run_folder(loggers, folder)
    weights = first_weights(request.weights, path, request.plan, ranks)
    is_last = asked == "last" or earlier is not None
    return Start(path, folder, weights, None if earlier is None else earlier[1], is_last), job


def _continued(start: Start, ranks: Ranks) -> Start:
    """Return ``start`` with a checkpoint. Its parameters are read while the engine is built, because the model has no
    values after the loss of a shard.

    Raises:
        CheckpointError: the run has no checkpoint.
    """
    folder = start.folder
    if start.checkpoint is not None:
        return start
    path = None if folder is None else ranks.on_zero(lambda: checkpoint.find_last(folder, check_run_state))
    if path is None:
        problem = "contains no snapshot or checkpoint from which the other ranks can continue"
        action = "Add PeerSnapshots(every_n_steps=...), or ModelCheckpoint(every_n_train_steps=...)"
        raise CheckpointError("folder of the run", str(folder), problem, action)
    return replace(start, checkpoint=path, weights=FirstWeights(file=PlainCheckpoint(path, ranks)), is_last=True)


def first_weights(weights: object, ckpt_path: Path | None, plan: Plan, ranks: Ranks) -> FirstWeights:
    """Return the source of the initial weights; an empty source if there are no weights to read.

    Args:
        weights: path of a safetensors file, a folder of safetensors files, a checkpoint or a Lightning ``.ckpt`` file;
            None for no initial weights.
        ckpt_path: the checkpoint that the run resumes from. If this argument is set, ``weights`` is not read.

    Raises:
        RoomierError: ``weights`` is not a path, or no such file exists.
    """
    if weights is None:
        return FirstWeights()
    if not isinstance(weights, (str, Path)):
        action = "Pass a .safetensors file, a folder with model.safetensors, or a roomier or Lightning checkpoint"
        raise RoomierError("weights", weights, "is not a path", action)
    if ckpt_path is not None:
        notice(f"weights={str(weights)!r} is not read, because the run resumes from {ckpt_path}")
        return FirstWeights()
    path = at_home(weights, "weights", RoomierError)
    if (path / RECORD_NAME).is_file():
        if plan.adapter.lora_rank is not None and not any(is_adapter(name) for name in _peek(path).get("module", {})):
            return FirstWeights(file=PlainCheckpoint(path, ranks))
        return FirstWeights(checkpoint=path)
    if is_lightning_file(path):
        return FirstWeights(file=LightningWeights(path, ranks))
    _check_is_no_folder_of_checkpoints(path)
    if not any(path.glob("model.safetensors*")):
        refuse_deepspeed_checkpoint("weights", path)
    return FirstWeights(file=WeightsFile(path))


def restore_first_weights(run: Run) -> None:
    """Load the initial weights of the model of ``run`` if a checkpoint contains them.

    Raises:
        CheckpointError: the checkpoint is damaged, or does not match the model.
    """
    path = run.settled.start.weights.checkpoint
    if path is not None:
        with errors_about("weights", path):
            restore_weights(run, path)


def _check_is_no_folder_of_checkpoints(path: Path) -> None:
    if not path.is_dir() or any(path.glob("*.safetensors*")):
        return
    newest = checkpoint.find_last(path)
    if newest is not None:
        problem = "is not a checkpoint, but a folder that contains checkpoints"
        raise RoomierError("weights", str(path), problem, f"Pass one of them. The newest is {newest}")
    if (path / RECORD_OF_DCP).is_file():
        _peek(path)  # raises an error that describes a sharded checkpoint


def _peek(path: Path) -> dict[str, Any]:
    with errors_about("weights", path):
        return peek_run(path)


def go_back(run: Run, error: GoBackError) -> None:
    """Restore the newest checkpoint of the run as a resumed run does.

    Raises:
        TrainingError: the run has no checkpoint.
    """
    settle_background_save(run)
    path, step = run.saves.path, run.saves.step
    if path is None:
        problem = f"{error}, but the run has no checkpoint to return to"
        action = "Add ModelCheckpoint(every_n_train_steps=...), or skip bad steps before the update"
        raise TrainingError("loss", None, problem, action) from error
    run.results.is_in_batch, run.results.batch = False, None
    run.source.close()
    restore(run, path)
    run.saves.deferred.clear()
    run.now.is_finishing, run.now.is_in_step = False, True
    run.saves.state_at_end = run.now.last_loss = None
    if run.now.random_state is not None:
        set_rng_state(run.now.random_state)
    if run.ranks.is_zero:
        notice(f"the run returns to step {step}: {path}")
