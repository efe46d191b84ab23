"""Resume from a Lightning checkpoint: weights, optimizers, schedulers, position and callbacks.

[Note: a checkpoint of Lightning]
Lightning saves a checkpoint from within hooks, so it may be written at a point where roomier has no save point. After
the last batch of an epoch, Lightning has already stepped the schedulers that step by epoch, but has not ended the
epoch; from such a checkpoint, the run continues with the next epoch. Within an epoch, the file contains the number of
completed batches, but no position in the data. The run skips these batches, so it reads the same data as an
uninterrupted run. (When Lightning resumes a run, the loader starts from the beginning, unless the loader has a state.)
The file contains neither random states nor metrics of the current epoch.

Every rank maps the file to memory and reads only its shards of the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from roomier.api.adapt import seen_by_user
from roomier.api.callback import Callback, ChecksState
from roomier.api.overrides import lightning_base
from roomier.checkpoint.agree import together
from roomier.checkpoint.lightning import LightningFile, LoopPosition, books_of
from roomier.core.errors import CheckpointError, RoomierError, first_few
from roomier.core.forms import FormError, anything, fields, item_of
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.core.sharded import local_part, local_rows
from roomier.engine.optimizer_state import parameter_names
from roomier.engine.weights_file import prepare_nothing
from roomier.run.run import Run
from roomier.techniques.adapters.layers import is_adapter
from roomier.techniques.optim.schedule import check_scheduler
from roomier.train.saving.group_values import report_kept_values


class LightningWeights:
    """Weights in a Lightning checkpoint that are used as initial weights of a model. See :class:`WeightsToRead`.

    The names may differ by a prefix if the checkpoint contains a submodule of the model, or if the model is a submodule
    of the saved model.

    Args:
        path: the ``.ckpt`` file.
        ranks: the ranks that read the file together.

    Raises:
        CheckpointError: the file is damaged, or contains objects whose construction would execute code.
    """

    def __init__(self, path: Path, ranks: Ranks) -> None:
        self._file = opened(path, ranks, field="weights")
        self._tensors: dict[str, torch.Tensor] = {}

    def check(self, network: nn.Module) -> set[str]:
        """Return the names of the tensors of ``network`` that the file provides.

        Raises:
            RoomierError: the names or shapes in the file do not match the model.
        """
        wanted = _tensors_of(network)
        found = {name: each for name, each in self._file.state_dict.items() if isinstance(each, torch.Tensor)}
        self._tensors = _under_names_of(wanted, found)
        present = {id(wanted[name]) for name in self._tensors if name in wanted}
        lacking = [name for name, each in wanted.items() if name not in self._tensors and id(each) not in present]
        problems = _differences(wanted, self._tensors, [name for name in lacking if not is_adapter(name)])
        if problems:
            action = "Pass the weights of this model, or build the model that was saved"
            path = str(self._file.path)
            raise RoomierError("weights", path, f"does not match the model: {'; '.join(problems)}", action)
        return wanted.keys() - set(lacking)

    @torch.no_grad()
    def read_into(self, network: nn.Module, prepare: Callable[[Tensor], object] = prepare_nothing) -> None:
        """Copy this rank's shards of the weights into the tensors of ``network``.

        Args:
            prepare: function that is called with each tensor before it is written.
        """
        for name, target in _tensors_of(network).items():
            if name not in self._tensors:
                continue
            source = self._tensors[name]
            prepare(target)
            local_part(target).copy_(source[local_rows(target)] if target.dim() else source)


def opened(path: Path, ranks: Ranks, *, field: str = "ckpt_path") -> LightningFile:
    """Open the file on every rank. If the file cannot be opened on one rank, an error is raised on all ranks.

    Raises:
        CheckpointError: the file is damaged or is not a Lightning checkpoint. The error names ``field``.
    """
    found: list[LightningFile] = []
    with errors_about(field, path):
        together(ranks, lambda: found.append(LightningFile(path)))
    return found[0]


@contextmanager
def errors_about(field: str, path: Path) -> Iterator[None]:
    """Re-raise errors about the checkpoint ``path`` as errors about the argument ``field``."""
    try:
        yield
    except CheckpointError as error:
        raise type(error)(field, str(path), error.problem, error.action) from error


def restore_lightning_weights(run: Run, path: Path) -> None:
    """Load the weights of the module from ``path``. Other contents of the file are not restored.

    Raises:
        CheckpointError: the file is damaged, or does not match the model. The model remains unchanged.
    """
    file = opened(path, run.ranks)
    show_checkpoint(run, file.content)  # as in Lightning, the hook may change the names
    run.engine.load_weights(_weights(run, file))


def restore_lightning(run: Run, path: Path) -> None:
    """Restore ``run`` to the point at which Lightning saved ``path``. Every rank must call this function.

    See [Note: a checkpoint of Lightning]. If an error is raised, no state has changed, except for changes by
    ``on_load_checkpoint`` of the module.

    Raises:
        CheckpointError: the file is damaged, contains only weights, or does not match the model, the optimizers or the
            schedulers.
        DataError: the data cannot resume at the saved position.
    """
    file = opened(path, run.ranks)
    show_checkpoint(run, file.content)  # called first, as in Lightning, because the hook may change all contents
    with errors_about("ckpt_path", path):
        position, names = file.position(), parameter_names(run.engine.module)
        if run.plan.optimizer.name is not None:
            named = run.plan.optimizer.name
            problem = f"contains states of the module's optimizer, but the Trainer specifies optimizer={named!r}"
            action = "Remove optimizer from the arguments of the Trainer, or load only the weights: fit(weights=...)"
            raise file.error(problem, action)
        optimizers = file.optimizers(run.engine.optimizers, names)
        file.check_schedulers([config.scheduler for config in run.schedulers.configs])
    restore_position = _position_setter(run, position)
    state: dict[str, Any] = {"module": _weights(run, file), "optimizers": optimizers, "scaler": None}
    _check_values(run, file, state)
    report_kept_values(run.engine.optimizers, optimizers, has_schedulers=bool(run.schedulers.configs))
    if run.engine.scaler.is_on and file.scaler is not None:
        state["scaler"] = {**file.scaler, "num_skipped": torch.zeros_like(run.engine.scaler.num_skipped)}
    run.engine.load(state)
    run.schedulers.load([{"state": each} for each in file.content["lr_schedulers"]])
    restore_position()
    datamodule = run.settled.request.datamodule
    if datamodule is not None and type(datamodule).__qualname__ in file.content:
        datamodule.load_state_dict(file.content[type(datamodule).__qualname__])
    for callback in run.callbacks:
        callback.on_load_checkpoint(run.trainer, seen_by_user(run.module), file.content)
    load_callbacks(_states_of_callbacks(run, file.content["callbacks"]), file.content["callbacks"])
    notice(f"resumed from {path}, a checkpoint of Lightning {file.version}, at step {run.progress.global_step}")


def _check_values(run: Run, file: LightningFile, state: Mapping[str, Any]) -> None:
    """Check the values of the optimizers and schedulers.

    Raises:
        CheckpointError: a value is malformed.
    """
    groups = [group for each in state["optimizers"] for group in each["param_groups"]]
    try:
        run.engine.check(state)
        for index, (config, saved) in enumerate(
            zip(run.schedulers.configs, file.content["lr_schedulers"], strict=True)
        ):
            check_scheduler(config.scheduler, saved, groups, f"lr_schedulers[{index}]")
        for callback, key, stored in _states_of_callbacks(run, file.content["callbacks"]):
            if isinstance(callback, ChecksState):
                callback.check_stored_state(stored, item_of("callbacks", key))
    except FormError as error:
        action = "Use another checkpoint, or load only the weights: fit(weights=...)"
        raise CheckpointError("ckpt_path", str(file.path), f"is malformed: {error}", action) from error


def show_checkpoint(run: Run, content: dict[str, Any]) -> None:
    """Call ``on_load_checkpoint`` of the module with ``content``. The hook may change ``content`` before it is loaded.

    Raises:
        CheckpointError: the hook creates parameters that no optimizer would update.
    """
    module = run.engine.module
    before = {id(each) for each in module.parameters()}
    run.module.on_load_checkpoint(content)
    groups = [group for optimizer in run.engine.optimizers for group in optimizer.param_groups]
    owned = {id(each) for group in groups for each in group["params"]}
    made = [name for name, each in module.named_parameters() if each.requires_grad and id(each) not in before | owned]
    if made and owned:
        problem = (
            f"creates new parameters: {first_few(made)}, but the optimizers were created before this hook ran and "
            "would not train them"
        )
        action = "Create the parameters in __init__ or configure_model, with sizes that save_hyperparameters stored"
        raise CheckpointError("on_load_checkpoint", type(run.module).__name__, problem, action)


def _weights(run: Run, file: LightningFile) -> dict[str, Any]:
    """Return the stored weights.

    Raises:
        CheckpointError: the weights do not match the model.
    """
    own, found = run.engine.weights(), file.state_dict
    if not getattr(seen_by_user(run.module), "strict_loading", True):
        found = {name: found.get(name, each) for name, each in own.items()}
    check_weights(file.path, own, found)
    return dict(found)


def _position_setter(run: Run, position: LoopPosition) -> Callable[[], None]:
    """Return a function that sets the counters and the data of ``run`` to ``position``.

    Raises:
        DataError: the data cannot resume at ``position``.
    """
    num_done = position.batch_idx
    is_epoch_over = position.is_last_batch or num_done >= run.batches.num_training
    epoch = position.epoch + (1 if num_done and is_epoch_over else 0)
    batch_idx = 0 if is_epoch_over else num_done
    data = run.source.position_behind(epoch, batch_idx) if batch_idx else None
    _report_position_within_epoch(run, batch_idx)

    def restore() -> None:
        progress = run.progress
        progress.epoch, progress.batch_idx = epoch, batch_idx
        progress.global_step, progress.num_batches = position.global_step, position.num_batches
        if data is not None:
            run.source.load_state_dict(data)

    return restore


def _report_position_within_epoch(run: Run, batch_idx: int) -> None:
    num_ranks, size = run.ranks.data.world.size, run.plan.batch.accumulate_grad_batches
    if batch_idx and num_ranks > 1:
        notice(
            f"the checkpoint was saved after batch {batch_idx} of an epoch and does not contain the number of ranks. "
            f"Assuming {num_ranks} ranks, as in this run, with {batch_idx} batches each"
        )
    if batch_idx % size:
        notice(
            f"the checkpoint was saved after batch {batch_idx}, within a step of {size} batches. It does not contain "
            f"the gradients of {batch_idx % size} batches"
        )


def load_callbacks(found: Iterable[tuple[Callback, str, Any]], stored: Mapping[str, Any]) -> None:
    """Load the state of each callback in ``found``, whose items are the callback, the key in ``stored``, and the state.
    A notice reports the other states in ``stored``."""
    left = dict(stored)
    for callback, key, state in found:
        callback.load_state_dict(state)
        del left[key]
    for key in (key for key, state in left.items() if state):
        notice(
            f"the checkpoint has a state of callback {key!r}, which this Trainer does not have. The state is ignored"
        )


def _states_of_callbacks(run: Run, stored: Mapping[str, Any]) -> list[tuple[Callback, str, Any]]:
    """Return a tuple for each callback with a stored state: the callback, the key of the state, and the state to load.

    Raises:
        FormError: the state of a ModelCheckpoint is malformed.
    """
    found, left = [], dict(stored)
    for callback in run.callbacks:
        key = next((each for each in left if _is_key_of(callback.state_key, each)), None)
        if key is None:
            continue
        state = left.pop(key)
        fields({}, others=anything)(state, item_of("callbacks", key))
        if lightning_base(type(callback), Callback) is None and "best_k_models" in state:
            try:
                state = books_of(state)
            except (AttributeError, TypeError, ValueError, RuntimeError):
                raise FormError(item_of("callbacks", key), state, "the state of a ModelCheckpoint") from None
        found.append((callback, key, state))
    return found


def _is_key_of(own: str, stored: str) -> bool:
    """Return True if both keys name the same callback. roomier stores intervals in seconds, and Lightning stores
    intervals as timedeltas."""
    mark = "'train_time_interval': "
    return own.partition(mark)[0] == stored.partition(mark)[0] and (own == stored or mark in own)


def _tensors_of(network: nn.Module) -> dict[str, torch.Tensor]:
    tensors = network.state_dict(keep_vars=True).items()
    stored = {name: each for name, each in tensors if isinstance(each, torch.Tensor)}
    return {**dict(network.named_parameters(remove_duplicate=False)), **stored}


def _under_names_of(wanted: Mapping[str, Any], found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return ``found``. A prefix is added or removed if the resulting names match ``wanted``."""
    if not found or not wanted.keys().isdisjoint(found):
        return dict(found)
    first, *_ = found
    for name in wanted:
        longer, shorter = (name, first) if len(name) > len(first) else (first, name)
        if not longer.endswith(f".{shorter}"):
            continue
        prefix = longer.removesuffix(shorter)
        added = {f"{prefix}{key}": each for key, each in found.items()}
        taken = {key.removeprefix(prefix): each for key, each in found.items() if key.startswith(prefix)}
        for renamed in (added, taken):
            if len(renamed) == len(found) and renamed.keys() <= wanted.keys():
                return renamed
    return dict(found)


def check_weights(path: Path, own: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Check that the names and shapes of the weights ``found`` in the checkpoint ``path`` match ``own``.

    Raises:
        CheckpointError: the checkpoint does not match the model.
    """
    problems = _differences(own, found, sorted(own.keys() - found.keys()))
    if problems:
        action = (
            "Pass a checkpoint of this model, or build the model that was saved. With strict_loading = False, the "
            "module ignores missing and unexpected weights"
        )
        raise CheckpointError("ckpt_path", str(path), f"does not match the model: {'; '.join(problems)}", action)


def _differences(wanted: Mapping[str, Any], found: Mapping[str, Any], missing: list[str]) -> list[str]:
    unexpected = [name for name in found if name not in wanted]
    different = [
        f"{name} {list(found[name].shape)} for {list(each.shape)}"
        for name, each in wanted.items()
        if isinstance(each, Tensor) and getattr(found.get(name), "shape", each.shape) != each.shape
    ]
    titles = (("missing", missing), ("unexpected", unexpected), ("different shapes", different))
    return [f"{title}: {first_few(names)}" for title, names in titles if names]
