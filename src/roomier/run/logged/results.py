"""Values that a module logs. Step values and their reductions over the epoch stay on the device of the logged values.

[Note: logged values of all ranks]
Logging adds no collective to a step. Values are reduced across ranks when a row is written, and at the end of an epoch
or an evaluation, before the first hook and again after each hook, because a hook may log values. After a reduction, all
ranks have the same value for each name, even if only one rank logged it, so callbacks that monitor a metric make the
same decision on all ranks. Of the ranks that read the same samples, only the first contributes its values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roomier.core import torch_private
from roomier.core.errors import RoomierError, did_you_mean
from roomier.core.forms import one_of
from roomier.core.log import notice
from roomier.core.mesh import OUTER
from roomier.core.metric_names import check_metric_name
from roomier.core.ranks import Ranks
from roomier.core.tree import batch_size_of
from roomier.run.logged.entry import OF_LOADER, OPTIONS, REDUCTIONS, Entry, as_tensor, is_double, reduce_over_ranks

_Shown = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]
"""Values for callbacks, loggers and the progress bar."""


def _show(entry: Entry, value: Any, names: tuple[str, ...], shown: _Shown) -> None:
    """Add the ``value`` of a step or an epoch to ``shown``. The last of ``names`` is the column."""
    callback, logged, bar = shown
    value = entry.shown(value)
    callback.update(dict.fromkeys(names, value))
    if entry.logger:
        logged[names[-1]] = value
    if entry.prog_bar:
        bar[names[-1]] = value


def _show_step(entry: Entry, shown: _Shown) -> None:
    _show(entry, entry.step_figure, entry.names_for_step(), shown)


class Results:
    """The tables of logged values: one for training and one for the current evaluation.

    Args:
        ranks: the ranks across which values are reduced; None means one rank.
        allows_overlaps: True to allow two names that are written to one column, such as ``x_epoch`` and the epoch value
            of ``x``. The column then contains the last value, and a notice is printed. If False, an error is raised.

    Attributes:
        stage: ``"train"``, or the stage of the current evaluation; None outside a loop.
        is_in_batch: True while a batch is processed. In training, the default of ``on_step`` is then True.
        batch: the current batch, from which roomier infers the batch size.
        dataloader_idx: index of the current loader if a stage has several loaders.
        is_muted: True if the current forward pass runs only for other ranks. Values that are logged in this pass are
            ignored.
        loader_of: for each name in the last evaluation, the index of its loader; None if the name was logged for
            several loaders.
        evaluated: epoch values of the last evaluation that the loggers received, by column.
        num_evaluated: for each loader index, the number of batches that completed evaluations processed on this rank.
        logged_step: number of the last step whose values were logged; -1 before the first log step.
        logged_loss: loss of this step over all ranks; None if the step had no loss.
    """

    def __init__(self, ranks: Ranks | None = None, *, allows_overlaps: bool = False) -> None:
        self._ranks = ranks or Ranks()
        self._allows_overlaps = allows_overlaps
        self.is_muted = False
        self.stage: str | None = None
        self.is_in_batch = False
        self.batch: Any = None
        self.dataloader_idx: int | None = None
        # Entries by stage, and for each stage by name and by whether the value was logged within a batch. If a step and
        # a hook at the end of an epoch log values under the same name, the values are separate.
        self._entries: dict[str, dict[tuple[str, bool], Entry]] = {"train": {}}
        # Values that callbacks, loggers and the progress bar read, except newer values of steps. See callback_metrics.
        self._callback_values: dict[str, Tensor] = {}
        self._logged_values: dict[str, Tensor] = {}
        self._bar_values: dict[str, Tensor] = {}
        self._unsaved: set[str] = set()
        self._not_logged: set[str] = set()
        self.loader_of: dict[str, int | None] = {}
        self.evaluated: dict[str, Tensor] = {}
        self.num_evaluated: dict[str, int] = {}
        self.logged_step = -1
        self.logged_loss: float | None = None

    def log(
        self,
        name: str,
        value: Any,
        *,
        prog_bar: bool,
        logger: bool,
        on_step: bool | None,
        on_epoch: bool | None,
        reduce_fx: Any,
        add_dataloader_idx: bool,
        batch_size: int | Tensor | None,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log a value. See :meth:`roomier.Module.log` for the arguments."""
        if not self._ranks.is_alone and hasattr(value, "full_tensor"):
            value = value.full_tensor()  # a DTensor, so every rank must all-gather it
        if rank_zero_only and not self._ranks.is_zero:
            return
        if self.stage is None:
            raise RoomierError("log", name, "no step or epoch is running", "Log in a step or in a hook of the loop")
        if sync_dist_group is not None:
            self._check_group(name, sync_dist_group)
        given = name
        if self.dataloader_idx is not None and add_dataloader_idx:
            name = f"{name}{OF_LOADER}{self.dataloader_idx}"
        table = self._entries.setdefault(self.stage, {})
        key = (name, self.is_in_batch)
        entry, asked = table.get(key), (on_step, on_epoch, prog_bar, logger, reduce_fx)
        if entry is None or entry.asked != asked:
            if add_dataloader_idx and isinstance(given, str) and OF_LOADER in given:
                action = "Remove the index, because roomier appends it to the name, or pass add_dataloader_idx=False"
                raise RoomierError("log", given, "must not contain the index of the loader", action)
            entry = table[key] = self._entry_for(entry, table, name, asked)
            if isinstance(value, Tensor) and value.is_complex():
                action = "Log value.abs(), or log value.real and value.imag separately"
                raise RoomierError("log", (name, value.dtype), "the value must be real", action)
            entry.is_double = is_double(value)
            entry.dataloader_idx = self.dataloader_idx
        elif entry.dataloader_idx != self.dataloader_idx:
            entry.dataloader_idx = None
        if self.is_muted and isinstance(value, (Tensor, Real)):
            return
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise RoomierError("log", (name, tuple(value.shape)), "the value must be a scalar", "Reduce it first")
            value = value.detach()
            if value.dim():
                value = value.reshape(())
        elif not isinstance(value, (float, int)):
            if not isinstance(value, Real):
                self._log_metric(entry, value)
                return
            value = float(value)  # a NumPy scalar
        entry.value, entry.is_unseen = value, True
        if entry.agreed_step is not None:
            entry.agreed = entry.agreed_step = None
        if not (entry.on_epoch or (sync_dist and not self._ranks.is_alone)):
            return
        weight: Any = 1
        if entry.reduce_fx == "mean":
            weight = batch_size_of(self.batch) if batch_size is None else weight_of(batch_size)
        if entry.on_epoch:
            entry.add(value, weight)
        entry.syncs, entry.step_weight, entry.agreed, entry.agreed_step = sync_dist, weight, None, None

    def _entry_for(
        self, entry: Entry | None, table: Mapping[tuple[str, bool], Entry], name: str, asked: tuple[Any, ...]
    ) -> Entry:
        """Create the entry for the first call with ``name``, or for the first call after ``entry`` was restored."""
        if not isinstance(name, str):
            raise RoomierError("log", name, "must be the name of a metric", "Call self.log(name, value)")
        check_metric_name("log", name)
        if entry is not None and entry.asked is not None:
            changes = zip(OPTIONS, entry.asked, asked, strict=True)
            differing = [(option, old, new) for option, old, new in changes if old != new]
            problem = ", ".join(f"{option}={old!r} before and {new!r} now" for option, old, new in differing)
            raise RoomierError(
                "log", name, f"is logged with {problem}", "Use the same arguments each time, or another name"
            )
        for option, value in zip(OPTIONS[:4], asked, strict=False):
            if value not in (True, False, None):  # "no" would count as True
                raise RoomierError(f"log: {option}", value, f"must be a bool, for {name!r}", "Use True or False")
        new = self._new_entry(name, *asked)
        taken = {each: other.name for other in table.values() if other.name != name for each in other.columns}
        for column in sorted(new.columns & taken.keys()):
            problem = f"would be written to the column {column!r}, which the name {taken[column]!r} already uses"
            if not self._allows_overlaps:
                raise RoomierError("log", name, problem, "Use a different name for one of them")
            notice(f"log({name!r}): is written to the column {column!r}, like {taken[column]!r}. Use a different name")
        if entry is not None and entry.reduce_fx == new.reduce_fx:
            new.value, new.total, new.weight, new.metric = entry.value, entry.total, entry.weight, entry.metric
            new.is_unseen = entry.is_unseen
        new.asked = asked
        return new

    def _new_entry(
        self, name: str, on_step: bool | None, on_epoch: bool | None, prog_bar: bool, logger: bool, reduce_fx: Any
    ) -> Entry:
        is_step = self.stage == "train" and self.is_in_batch
        reduction = reduction_of(reduce_fx)
        on_step = is_step if on_step is None else on_step
        on_epoch = not is_step if on_epoch is None else on_epoch
        if not (on_step or on_epoch) and name not in self._not_logged:
            self._not_logged.add(name)
            notice(f"log({name!r}): on_step and on_epoch are both False, so the value is not logged")
        return Entry(name, on_step, on_epoch, prog_bar, logger, reduction)

    def _log_metric(self, entry: Entry, value: Any) -> None:
        torchmetrics = sys.modules.get("torchmetrics")  # already imported if the value is a torchmetrics object
        if torchmetrics is None or not isinstance(value, torchmetrics.Metric):
            problem = "the value must be a number or a torchmetrics metric"
            action = "Log a float or a 0-dim tensor. Log several numbers with self.log_dict"
            raise RoomierError("log", (entry.name, type(value).__name__), problem, action)
        entry.metric = value
        if entry.on_step and not self.is_muted:
            last = torch_private.last_forward_value(value)
            entry.value, entry.is_unseen = last.detach() if isinstance(last, Tensor) else last, True

    def _check_group(self, name: str, group: Any) -> None:
        if self._ranks.is_alone:
            return
        size, mesh = dist.get_world_size(group), self._ranks.mesh
        if size == self._ranks.world.size:
            return
        if size == mesh.data.size and tuple(sorted(dist.get_process_group_ranks(group))) == mesh.along(*OUTER):
            return
        problem = "must contain all ranks, or the ranks with the same place in each group of ranks that share samples"
        action = "Remove sync_dist_group. For a value of some ranks, log a result of self.all_gather(..., group)"
        raise RoomierError("log: sync_dist_group", name, problem, action)

    @property
    def columns(self) -> set[str]:
        """Names of the columns of all values that were logged in this epoch or an earlier epoch."""
        running = {each for table in self._entries.values() for entry in table.values() for each in entry.columns}
        return running | self._logged_values.keys()

    def mark(self) -> Callable[[], None]:
        """Return a function that undoes later training logs, except updates of torchmetrics objects."""
        kept = {key: copy(entry) for key, entry in self._entries["train"].items()}

        def take_back() -> None:
            self._entries["train"] = kept

        return take_back

    def forget_epochs(self) -> None:
        """Clear the values of completed epochs after a sanity check."""
        for shown in (self._callback_values, self._logged_values, self._bar_values):
            shown.clear()

    # Reading ----------------------------------------------------------------------------------------------------

    def settle(self, extra: Any = None) -> list[Any]:
        """Reduce logged values across all ranks. Every rank must call this method at the same time.

        See [Note: logged values of all ranks]. With one rank, this method does nothing.

        Args:
            extra: an additional value to send to the other ranks.

        Returns:
            The values of ``extra`` on all ranks, in the order of the ranks.

        Raises:
            RoomierError: ranks logged a name with different arguments, or only some ranks logged a torchmetrics object.
        """
        if self._ranks.is_alone:
            return [extra]
        stages = dict.fromkeys(("train", self.stage or "train"))
        own = {
            (stage, *key): entry.for_other_ranks()
            for stage in stages
            for key, entry in self._entries.get(stage, {}).items()
        }
        gathered = self._ranks.gather((extra, own))
        of_data_ranks = [gathered[rank][1] for rank in self._ranks.mesh.representatives]
        for (stage, name, is_in_batch), of_all in reduce_over_ranks(of_data_ranks).items():
            table = self._entries.setdefault(stage, {})
            entry = table.get((name, is_in_batch))
            if entry is None:
                entry = table[name, is_in_batch] = Entry(name, *of_all.options)
            if entry.metric is None or not any(of_all.updates):
                entry.agreed = of_all.epoch_value
            elif entry.on_epoch and entry.updates != of_all.updates:
                entry.agreed, entry.updates = torch_private.recompute_metric(entry.metric), of_all.updates
            entry.agreed_step = of_all.step_value
        if self._ranks.mesh.stage > 1:
            self._take_values_of_last_stage(stages)
        return [each for each, _ in gathered]

    def _take_values_of_last_stage(self, stages: Iterable[str]) -> None:
        """Replace the reduced values with those of the last stage of a pipeline, whose metric objects received all
        updates."""
        own = {
            (stage, *key): (
                entry.options,
                entry.is_double,
                self._reduced(entry),
                entry.agreed_step,
                entry.value,
                entry.is_unseen,
            )
            for stage in stages
            for key, entry in self._entries.get(stage, {}).items()
        }
        for (stage, name, is_in_batch), (options, *values) in self._ranks.peers.from_zero(own).items():
            entry = self._entries.setdefault(stage, {}).setdefault((name, is_in_batch), Entry(name, *options))
            entry.is_double, entry.agreed, entry.agreed_step, entry.value, entry.is_unseen = values

    def call(self, hooks: Sequence[Callable[[], Any]]) -> None:
        """Call ``hooks`` at the end of an epoch. Each hook can read previously logged values, reduced across ranks."""
        self.settle()
        for hook in hooks:
            hook()
            self.settle()

    def _reduced(self, entry: Entry) -> Any:
        """Return the value of the epoch so far, or None if no value exists. The value is reduced across ranks if the
        ranks exchanged their values."""
        if not entry.on_epoch:
            return None
        if self._ranks.is_alone:
            return entry.reduced()
        if entry.agreed is None and entry.metric is None:
            return entry.reduced()
        return entry.agreed

    def step_values(self) -> dict[str, Any]:
        """Return the step values of the current stage that loggers receive, by column."""
        return {
            entry.names_for_step()[-1]: entry.agreed_step if entry.syncs and entry.agreed_step is not None else value
            for entry in self._entries.get(self.stage or "train", {}).values()
            if entry.on_step
            and entry.logger
            and (value := entry.value) is not None
            and entry.dataloader_idx in (None, self.dataloader_idx)
        }

    def last_step_values(self) -> dict[str, Any]:
        """Return the values of the last training step that loggers receive, by column, even after its epoch
        has ended."""
        shown = self.logged_metrics
        entries = [entry for entry in self._entries["train"].values() if entry.on_step and entry.logger]
        return {column: shown[column] for entry in entries if (column := entry.names_for_step()[-1]) in shown}

    def end_epoch(self, stage: str) -> dict[str, Tensor]:
        """Reduce the epoch values of ``stage`` across all ranks, clear them, and return the values for the loggers."""
        self.settle()
        ending = self._entries.get(stage, {}).values()
        # read before any reset, because metrics can contain other metrics
        values = [self._reduced(entry) for entry in ending]
        # An evaluation updates only the names that it logs, so the values of other names in a checkpoint do not change.
        names = None if stage == "train" else {name for entry in ending for name in (entry.name, *entry.columns)}
        self._show_steps(names)
        logged: dict[str, Tensor] = {}
        shown = self._callback_values, self._logged_values, self._bar_values
        for entry, value in zip(ending, values, strict=True):
            if stage != "train" and entry.on_step and entry.value is not None:
                _show_step(entry, ({}, self._logged_values, self._bar_values))
            if value is not None:
                if entry.logger:
                    logged[entry.names_for_epoch()[-1]] = as_tensor(value)
                _show(entry, value, entry.names_for_epoch(), shown)
            entry.value, entry.agreed_step = None, None
            entry.reset()
        if stage != "train":
            self._agree_on_loaders(stage)
            self.evaluated = {column: self._logged_values[column] for column in logged}
            self._entries.pop(stage, None)
        return logged

    def _agree_on_loaders(self, stage: str) -> None:
        own = {
            name: entry.dataloader_idx
            for entry in self._entries.get(stage, {}).values()
            for name in (*entry.names_for_step(), *entry.names_for_epoch())
            if entry.asked is not None  # otherwise, the entry comes from another rank
        }
        self.loader_of = {}
        for of_rank in self._ranks.gather(own):
            for name, index in of_rank.items():
                self.loader_of[name] = index if self.loader_of.get(name, index) == index else None

    def abandon(self, stage: str) -> None:
        """Discard an evaluation that was interrupted."""
        for entry in self._entries.pop(stage, {}).values():
            entry.reset()

    def _show_steps(self, names: set[str] | None) -> None:
        """Show the logged values of training steps before newer values replace them. Only ``names`` are shown, or all
        names if ``names`` is None."""
        shown = self._callback_values, self._logged_values, self._bar_values
        for entry in self._unseen_steps():
            if names is None or not names.isdisjoint(entry.names_for_step()):
                _show_step(entry, shown)
                entry.is_unseen = False

    def _unseen_steps(self) -> list[Entry]:
        entries = self._entries["train"].values()
        return [entry for entry in entries if entry.is_unseen and entry.on_step and entry.value is not None]

    def _shown(self) -> _Shown:
        """Return the current values for callbacks, loggers and the progress bar."""
        shown = dict(self._callback_values), dict(self._logged_values), dict(self._bar_values)
        for entry in self._unseen_steps():
            _show_step(entry, shown)
        running = self._entries.get(self.stage or "", {}).values()
        if self.stage != "train":  # callbacks do not receive values of evaluation steps
            for entry in running:
                if entry.on_step and entry.value is not None:
                    _show_step(entry, ({}, *shown[1:]))
        if self.stage is not None and not self.is_in_batch:  # end-of-epoch hooks read the reductions
            for entry in running:
                reduced = self._reduced(entry)
                if reduced is not None:
                    _show(entry, reduced, entry.names_for_epoch(), shown)
        return shown

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """All logged values. The key ``x`` maps to the latest value, from a step or an epoch."""
        return self._shown()[0]

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """Values for the loggers, by column."""
        return self._shown()[1]

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Values for the progress bar, as Python numbers. Reading the values waits for the device."""
        return {name: float(value) for name, value in self._shown()[2].items()}

    # Resume -----------------------------------------------------------------------------------------------------

    def state(self, metrics: Mapping[str, Any], *, of_all_ranks: bool = True) -> dict[str, Any]:
        """Return the reductions of the training epoch and the last values of completed epochs, across all ranks.

        Every rank must call this method at the same time.

        Args:
            metrics: the metric objects whose states are saved, by name.
            of_all_ranks: False to return the reductions of this rank, without communication.
        """
        name_of = {id(metric): name for name, metric in metrics.items()}
        running = []
        own = {key: entry.for_other_ranks() for key, entry in self._entries["train"].items()}
        over_ranks = {}
        if of_all_ranks and not self._ranks.is_alone:
            gathered = self._ranks.gather(own)
            over_ranks = reduce_over_ranks([gathered[rank] for rank in self._ranks.mesh.representatives])
        for key, of_all in over_ranks.items():  # includes names that only other ranks logged
            self._entries["train"].setdefault(key, Entry(key[0], *of_all.options))
        for (name, is_in_batch), entry in self._entries["train"].items():
            if entry.metric is not None and id(entry.metric) not in name_of:
                self._report_unsaved(name)
                continue
            total, weight, value = entry.total, entry.weight, entry.value
            if over_ranks:
                of_all = over_ranks[name, is_in_batch]
                total, weight, value = of_all.total, of_all.weight, of_all.step_value
            running.append(
                {
                    "name": name,
                    "is_in_batch": is_in_batch,
                    "total": total,
                    "weight": weight,
                    "value": value,
                    "options": list(entry.options),
                    "metric": None if entry.metric is None else name_of[id(entry.metric)],
                    "is_double": entry.is_double,
                    "is_unseen": entry.is_unseen,
                }
            )
        shown = {"epoch": self._callback_values, "logged": self._logged_values, "bar": self._bar_values}
        evaluated = dict(self.num_evaluated)
        return {"running": running, **{name: dict(each) for name, each in shown.items()}, "evaluated": evaluated}

    def _report_unsaved(self, name: str) -> None:
        if name not in self._unsaved:
            self._unsaved.add(name)
            notice(
                f"log({name!r}): the metric is not a submodule of the module, so checkpoints do not contain its state "
                "in the current epoch. Make it an attribute (or an item of an nn.ModuleList or ModuleDict)"
            )

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise FormError if ``state`` contains an unknown reduction."""
        for index, saved in enumerate(state["running"]):
            one_of(*REDUCTIONS)(saved["options"][-1], f"results.running[{index}].options[4]")

    def load(self, state: dict[str, Any], metrics: Mapping[str, Any], move: Callable[[Any], Any]) -> None:
        """Restore the values that :meth:`state` returned. ``move`` copies a tensor to the device of the run."""
        self._callback_values, self._bar_values = dict(state["epoch"]), dict(state["bar"])
        self._logged_values = dict(state.get("logged", {}))
        self.num_evaluated = dict(state.get("evaluated", {}))
        self._entries["train"] = restored = {}
        for saved in state["running"]:
            entry = Entry(saved["name"], *saved["options"])
            if saved["metric"] is not None:
                entry.metric = metrics.get(saved["metric"])
                if entry.metric is None:
                    continue
            entry.value = move(saved["value"])
            entry.is_double, entry.is_unseen = saved.get("is_double", False), saved.get("is_unseen", True)
            if self._ranks.is_zero:  # reduced over all ranks, so only one rank continues the reduction
                entry.total, entry.weight = move(saved["total"]), move(saved["weight"])
            restored[saved["name"], saved["is_in_batch"]] = entry


def weight_of(batch_size: Any) -> Any:
    """Return ``batch_size`` as a number or a tensor. A tensor is not checked, because the check would wait for the
    device.

    Raises:
        RoomierError: ``batch_size`` is neither a non-negative number nor a tensor.
    """
    is_number = isinstance(batch_size, Real) and float(batch_size) >= 0
    if not is_number and not isinstance(batch_size, Tensor):
        action = "Pass the number of samples (or tokens) over which the value is averaged"
        raise RoomierError("log: batch_size", batch_size, "must be a non-negative number", action)
    return batch_size


def reduction_of(reduce_fx: Any) -> str:
    """Return the name of the reduction ``reduce_fx``.

    Raises:
        RoomierError: the reduction is not supported.
    """
    if isinstance(reduce_fx, str):
        name = {"avg": "mean"}.get(reduce_fx.lower(), reduce_fx.lower())
    else:
        name = next((each for each, fx in _FUNCTIONS.items() if reduce_fx in fx), getattr(reduce_fx, "__name__", "?"))
        if name in REDUCTIONS and reduce_fx not in _FUNCTIONS[name]:
            name = f"{getattr(reduce_fx, '__module__', '?')}.{name}"
    if name not in REDUCTIONS:
        advice = did_you_mean(name, REDUCTIONS)
        advice += f"{'' if advice.endswith('?') else '.'} For another reduction, log a torchmetrics object"
        raise RoomierError("log: reduce_fx", reduce_fx, "is not a known reduction", advice)
    return name


_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "mean": (torch.mean,),
    "sum": (torch.sum, sum),
    "min": (torch.min, min),
    "max": (torch.max, max),
}
