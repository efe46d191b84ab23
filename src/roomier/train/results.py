"""What a module logged: the value of this step, and the reduction over the epoch, both left on their device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from roomier.core import torch_private
from roomier.core.errors import RoomierError, did_you_mean
from roomier.core.log import notice
from roomier.core.tree import batch_size_of

REDUCTIONS = ("mean", "sum", "min", "max")


@dataclass(slots=True)
class Entry:
    """One name that was logged, with how it is reduced and who sees it.

    Attributes:
        asked: the arguments of the call that made it; None while it comes from a checkpoint.
    """

    name: str
    on_step: bool
    on_epoch: bool
    prog_bar: bool
    logger: bool
    reduce_fx: str
    value: Any = None
    total: Any = None
    weight: Any = 0.0
    metric: Any = None
    asked: tuple[Any, ...] | None = None

    def names_for_step(self) -> tuple[str, ...]:
        return (self.name, f"{self.name}_step") if self.on_step and self.on_epoch else (self.name,)

    def names_for_epoch(self) -> tuple[str, ...]:
        return (self.name, f"{self.name}_epoch") if self.on_step and self.on_epoch else (self.name,)

    @property
    def columns(self) -> set[str]:
        """The names under which loggers see it."""
        of_step = {self.names_for_step()[-1]} if self.on_step else set()
        return of_step | ({self.names_for_epoch()[-1]} if self.on_epoch else set())

    def add(self, value: Any, weight: Any) -> None:
        """Take one value into the epoch's reduction; a value of weight 0 counts for nothing."""
        if isinstance(value, Tensor):  # thousands of steps are added up: fp32 would drift, bf16 lose digits at once
            value = value.float() if value.device.type == "mps" else value.double()
        if self.reduce_fx == "mean":
            if isinstance(weight, Tensor):  # asking whether it is 0 would wait for it
                value = torch.where(weight == 0, 0.0, value * weight)
            elif weight == 0:
                return
            else:
                value = value * weight
            self.weight = self.weight + weight
        if self.total is None:
            self.total = value
        elif self.reduce_fx in ("mean", "sum"):
            self.total = self.total + value
        else:
            extreme = torch.minimum if self.reduce_fx == "min" else torch.maximum
            self.total = extreme(as_tensor(self.total), as_tensor(value))

    def reduced(self) -> Any:
        """The value of the epoch so far; None where nothing was added."""
        if self.metric is not None:
            return self.metric.compute() if self.metric.update_called else None
        if self.total is None or self.reduce_fx != "mean":
            return self.total
        return self.total / self.weight

    def reset(self) -> None:
        self.total, self.weight = None, 0.0
        if self.metric is not None:
            self.metric.reset()


def as_tensor(value: Any) -> Tensor:
    """``value``; a number as float64, for the default dtype may be one of 16 bits in the step of a bf16-true run."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def _weight(batch_size: Any) -> Any:
    """What was passed as ``batch_size``, a number; a tensor is taken as it is, to look at it would wait for it."""
    is_number = isinstance(batch_size, Real) and float(batch_size) >= 0
    if not is_number and not isinstance(batch_size, Tensor):
        action = "Pass how many samples (or tokens) the value is the mean of"
        raise RoomierError("log: batch_size", batch_size, "is not a weight", action)
    return batch_size


class Results:
    """The tables behind ``Module.log``: one for training, one for the evaluation that is running.

    Attributes:
        stage: ``"train"`` or the stage that is evaluated; None outside a loop.
        is_in_batch: a batch is running, so that ``on_step`` is the default in training.
        batch: the batch that is running, for its size.
        dataloader_idx: set where a stage has several loaders.
    """

    def __init__(self) -> None:
        self.stage: str | None = None
        self.is_in_batch = False
        self.batch: Any = None
        self.dataloader_idx: int | None = None
        # By stage, then by name and whether a batch was running: a value that an epoch's hook logs under the name of
        # one that the steps log is another value.
        self._entries: dict[str, dict[tuple[str, bool], Entry]] = {"train": {}}
        self._epoch_values: dict[str, Tensor] = {}
        self._bar_values: dict[str, Tensor] = {}
        self._unsaved: set[str] = set()

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
    ) -> None:
        """Behind :meth:`roomier.Module.log`, which tells the arguments."""
        if self.stage is None:
            raise RoomierError("log", name, "no step or epoch is running", "Log from a step or a hook of the loop")
        if self.dataloader_idx is not None and add_dataloader_idx:
            name = f"{name}/dataloader_idx_{self.dataloader_idx}"
        table = self._entries.setdefault(self.stage, {})
        key = (name, self.is_in_batch)
        entry, asked = table.get(key), (on_step, on_epoch, prog_bar, logger, reduce_fx)
        if entry is None or entry.asked != asked:
            entry = table[key] = self._asked_anew(entry, table, name, asked)
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise RoomierError("log", (name, tuple(value.shape)), "the value is not a scalar", "Reduce it first")
            value = value.detach()
            if value.dim():
                value = value.reshape(())
        elif not isinstance(value, (float, int)):
            if not isinstance(value, Real):
                self._log_metric(entry, value)
                return
            value = float(value)  # NumPy's
        entry.value = value
        if entry.on_epoch:
            is_mean = entry.reduce_fx == "mean"
            entry.add(
                value, (batch_size_of(self.batch) if batch_size is None else _weight(batch_size)) if is_mean else 1
            )

    def _asked_anew(
        self, entry: Entry | None, table: Mapping[tuple[str, bool], Entry], name: str, asked: tuple[Any, ...]
    ) -> Entry:
        """The entry for the first call of ``name``, or the first since ``entry`` came from a checkpoint."""
        if not isinstance(name, str):
            raise RoomierError("log", name, "is not the name of a metric", "Write self.log(name, value)")
        if entry is not None and entry.asked is not None:
            names = ("on_step", "on_epoch", "prog_bar", "logger", "reduce_fx")
            changes = zip(names, entry.asked, asked, strict=True)
            problem = ", ".join(f"{what}={old!r} before and {new!r} now" for what, old, new in changes if old != new)
            raise RoomierError(
                "log", name, f"is logged with {problem}", "Use the same arguments each time, or another name"
            )
        new = self._new_entry(name, *asked)
        taken = {each: other.name for other in table.values() if other.name != name for each in other.columns}
        for column in new.columns:
            if column in taken:
                problem = f"would be written to the column {column!r}, which belongs to {taken[column]!r}"
                raise RoomierError("log", name, problem, "Use another name for one of the two")
        if entry is not None and entry.reduce_fx == new.reduce_fx:
            new.value, new.total, new.weight, new.metric = entry.value, entry.total, entry.weight, entry.metric
        new.asked = asked
        return new

    def _new_entry(
        self,
        name: str,
        on_step: bool | None,
        on_epoch: bool | None,
        prog_bar: bool,
        logger: bool,
        reduce_fx: Any,
    ) -> Entry:
        is_step = self.stage == "train" and self.is_in_batch
        reduction = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", None)
        if reduction not in REDUCTIONS:
            raise RoomierError("log: reduce_fx", reduce_fx, "is unknown", did_you_mean(str(reduction), REDUCTIONS))
        on_step = is_step if on_step is None else on_step
        on_epoch = not is_step if on_epoch is None else on_epoch
        return Entry(name, on_step, on_epoch, prog_bar, logger, reduction)

    def _log_metric(self, entry: Entry, value: Any) -> None:
        torchmetrics = sys.modules.get("torchmetrics")  # who logs one of its objects has imported it
        if torchmetrics is None or not isinstance(value, torchmetrics.Metric):
            raise RoomierError(
                "log",
                (entry.name, type(value).__name__),
                "the value is neither a number nor a torchmetrics metric",
                "Log a float or a 0-dim tensor; several numbers by name with self.log_dict",
            )
        entry.metric = value
        if entry.on_step:
            last = torch_private.last_forward_value(value)
            entry.value = last.detach() if isinstance(last, Tensor) else last

    def forget_epochs(self) -> None:
        """Forget the values of finished epochs (a sanity check is none)."""
        self._epoch_values.clear()
        self._bar_values.clear()

    # Reading ----------------------------------------------------------------------------------------------------

    def step_values(self) -> dict[str, Any]:
        """What the loggers get at a log step: the ``on_step`` values of training."""
        return {
            entry.names_for_step()[-1]: entry.value
            for entry in self._entries["train"].values()
            if entry.on_step and entry.logger and entry.value is not None
        }

    def end_epoch(self, stage: str) -> dict[str, Tensor]:
        """Reduce the epoch of ``stage`` and forget it; returns what the loggers get."""
        logged: dict[str, Tensor] = {}
        for entry in self._entries.get(stage, {}).values():
            value = entry.reduced() if entry.on_epoch else None
            if value is None:
                continue
            value = as_tensor(value)
            if entry.logger:
                logged[entry.names_for_epoch()[-1]] = value
            self._epoch_values.update(dict.fromkeys(entry.names_for_epoch(), value))
            if entry.prog_bar:
                self._bar_values[entry.names_for_epoch()[-1]] = value
            entry.reset()
        if stage != "train":
            self._entries.pop(stage, None)
        return logged

    def abandon(self, stage: str) -> None:
        """Forget an evaluation that was cut off."""
        for entry in self._entries.pop(stage, {}).values():
            entry.reset()

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Everything logged so far by name: the value of the epoch, else of the step."""
        metrics = dict(self._epoch_values)
        for entry in self._entries["train"].values():
            if entry.on_step and entry.value is not None:
                names = entry.names_for_step()
                metrics.update(dict.fromkeys(names if len(names) == 1 else names[1:], as_tensor(entry.value)))
                metrics.setdefault(entry.name, as_tensor(entry.value))
        if self.stage is not None and not self.is_in_batch:  # a hook at the end of an epoch sees what it gave so far
            for entry in self._entries.get(self.stage, {}).values():
                reduced = entry.reduced() if entry.on_epoch else None
                if reduced is not None:
                    metrics.update(dict.fromkeys(entry.names_for_epoch(), as_tensor(reduced)))
        return metrics

    @property
    def progress_bar_metrics(self) -> dict[str, Any]:
        metrics: dict[str, Any] = dict(self._bar_values)
        for entry in self._entries["train"].values():
            if entry.prog_bar and entry.on_step and entry.value is not None:
                metrics[entry.names_for_step()[-1]] = entry.value
        return metrics

    # Resume -----------------------------------------------------------------------------------------------------

    def state(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The running reductions of the training epoch and the last values of finished ones.

        Args:
            metrics: the metric objects whose states are saved, by name.
        """
        name_of = {id(metric): name for name, metric in metrics.items()}
        running = []
        for (name, is_in_batch), entry in self._entries["train"].items():
            if entry.metric is not None and id(entry.metric) not in name_of:
                self._tell_unsaved(name)
                continue
            running.append(
                {
                    "name": name,
                    "is_in_batch": is_in_batch,
                    "total": entry.total,
                    "weight": entry.weight,
                    "value": entry.value,
                    "options": [entry.on_step, entry.on_epoch, entry.prog_bar, entry.logger, entry.reduce_fx],
                    "metric": None if entry.metric is None else name_of[id(entry.metric)],
                }
            )
        return {"running": running, "epoch": dict(self._epoch_values), "bar": dict(self._bar_values)}

    def _tell_unsaved(self, name: str) -> None:
        if name not in self._unsaved:
            self._unsaved.add(name)
            notice(
                f"log({name!r}): the metric is no submodule of the module, so a checkpoint does not hold what it "
                "gathered in the running epoch. Make it an attribute (or an item of an nn.ModuleList or ModuleDict)"
            )

    def load(self, state: dict[str, Any], metrics: Mapping[str, Any], move: Callable[[Any], Any]) -> None:
        """Put back what :meth:`state` gave; ``move`` brings a tensor to the device of the run."""
        self._epoch_values, self._bar_values = dict(state["epoch"]), dict(state["bar"])
        self._entries["train"] = restored = {}
        for saved in state["running"]:
            entry = Entry(saved["name"], *saved["options"])
            if saved["metric"] is not None:
                entry.metric = metrics.get(saved["metric"])
                if entry.metric is None:
                    continue
            entry.value, entry.total, entry.weight = (move(saved[each]) for each in ("value", "total", "weight"))
            restored[saved["name"], saved["is_in_batch"]] = entry
