"""Reports of a run: the forecast of its memory, the line that ends a fit, and the metrics of an evaluation."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.nn.parameter import is_lazy

from roomier.api.module import Module, network_of
from roomier.api.trainer_view import TrainerView
from roomier.callbacks import MemoryForecast
from roomier.callbacks.progress_display import duration_text
from roomier.checkpoint.commit import at_home
from roomier.core.device.resolve import resolve_device
from roomier.core.device.rng import preserved_rng
from roomier.core.log import notice
from roomier.core.metric_names import printable
from roomier.plan import Plan
from roomier.planner.fake.shapes import shapes_of
from roomier.planner.memory.kinds import total_bytes
from roomier.run.run import Run
from roomier.storage.mirror import local_of, shown
from roomier.trainer.attributes import TrainerAttributes
from roomier.trainer.keywords.arguments import ordered


def metrics_table(stage: str, of_loaders: Sequence[Mapping[str, float]]) -> str:
    """Return the metrics of all loaders as text, with one metric per line."""
    rows = {name: value for metrics in of_loaders for name, value in metrics.items()}
    width = max(map(len, rows), default=0)
    lines = [f"  {name:<{width}}  {value:.6g}" for name, value in rows.items()]
    return "\n".join([f"{stage}:", *lines] if lines else [f"{stage}: no metrics were logged"])


def by_loader(
    metrics: Mapping[str, float], loader_of: Mapping[str, int | None], num_loaders: int
) -> list[dict[str, float]]:
    """Split ``metrics`` by loader.

    Args:
        metrics: names and logged values.
        loader_of: index of the loader for each metric; None for a metric over all loaders, which every dict contains.
        num_loaders: number of loaders.
    """
    return [
        {name: value for name, value in metrics.items() if loader_of.get(name) in (None, index)}
        for index in range(num_loaders)
    ]


def report_end(trainer: TrainerAttributes, run: Run) -> None:
    """Print one line with the reason for the end, steps, time, losses, files, and forecast and measured memory. Print
    no line if the fit ran no step or if a signal ended it, because another line reports this."""
    now, progress = run.now, run.progress
    if now.is_interrupted or progress.num_batches == now.num_batches_before:
        return
    elapsed = duration_text(time.monotonic() - now.started_s)
    texts = [f"{_reason(run)} after step {progress.global_step} in {elapsed}"]
    if run.results.logged_loss is not None:
        texts.append(f"loss {run.results.logged_loss:.4g}")
    values = trainer.callback_metrics if run.results.loader_of else {}
    evaluated = {name: value for name, value in values.items() if name in run.results.loader_of}
    losses = [name for name in evaluated if "loss" in name.lower()] or list(evaluated)[:1]
    texts += [f"{printable(name)} {float(evaluated[name]):.4g}" for name in losses]
    if run.folder is not None:
        texts.append(f"run folder {shown(run.folder)}")
    monitors, last = trainer.checkpoint_callback, run.saves.path
    best = monitors.best_model_path if getattr(monitors, "monitor", None) else ""
    if last is not None:
        is_best = best and local_of(at_home(best)).absolute() == last.absolute()
        texts.append(f"{'last and best' if is_best else 'last'} checkpoint {_below(run.folder, last)}")
        best = "" if is_best else best
    if best:
        texts.append(f"best checkpoint {_below(run.folder, local_of(at_home(best)))}")
    texts += [each.record.line() for each in trainer.callbacks if isinstance(each, MemoryForecast) and each.record]
    notice(" | ".join(texts))


def _reason(run: Run) -> str:
    if run.progress.global_step >= run.settled.step_limit:
        return f"training is complete: max_steps={run.settled.step_limit:.0f} is reached"
    if run.progress.epoch >= run.settled.epoch_limit:
        return f"training is complete: max_epochs={run.settled.epoch_limit:.0f} is reached"
    max_time_s = run.options.max_time_s
    if max_time_s is not None and time.monotonic() - run.now.started_s >= max_time_s:
        return f"training is complete: max_time={run.options.max_time} is reached"
    return "training was stopped by trainer.should_stop (for example, by EarlyStopping)"


def _below(folder: Path | None, path: Path) -> str:
    """Return ``path`` relative to ``folder`` if the folder contains it."""
    is_inside = folder is not None and path.absolute().is_relative_to(folder.absolute())
    return os.path.relpath(path, folder) if is_inside and folder is not None else shown(path)


LARGE_BYTES = 2**30
"""Minimum number of bytes of model states on one rank for which a run's memory is compared with its forecast by
default."""


# with 64-true, 8 bytes each for the weight, the gradient, its bucket, two states and a margin
_MOST_BYTES_OF_A_PARAMETER = 48


def prepare_forecast(trainer: TrainerAttributes, module: Module) -> None:
    """Add a MemoryForecast to a fit if the forecast is useful, and store the shapes of ``module`` in
    ``trainer.shapes``.

    Call this function before the model is built. MemoryForecast and the report after an out-of-memory error read these
    shapes.
    """
    was_built = trainer.fitted is not None and trainer.fitted.module is module
    if not was_built:  # otherwise the shapes of the last fit are retained, because the built model has different shapes
        trainer.shapes = None
    # remove the callback of the previous fit
    trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, _ByDefault)]
    has_callback = any(isinstance(each, MemoryForecast) for each in trainer.callbacks)
    may_run_out = resolve_device(trainer.plan.parallel.accelerator).type != "cpu"
    is_short = bool(trainer.options.num_dev_batches) or not module.automatic_optimization
    # a tracked step is not compiled, so it requires more memory than other steps
    is_left_alone = is_short or trainer.plan.compile.enabled
    num_parameters = sum(each.numel() for each in network_of(module).parameters() if not is_lazy(each))
    may_be_large = num_parameters * _MOST_BYTES_OF_A_PARAMETER >= LARGE_BYTES
    may_be_added = not is_left_alone and not has_callback and (trainer.choice is not None or may_be_large)
    if not was_built and (has_callback or may_run_out or may_be_added):
        trainer.shapes = _shapes(module, tells=has_callback)
    shapes = trainer.shapes if may_be_added else None
    is_planned = trainer.choice is not None
    is_added = shapes is not None and (is_planned or _states_bytes(shapes, trainer.plan) >= LARGE_BYTES)
    if trainer.ranks.from_zero(is_added):  # rank 0 decides, because one rank may be unable to copy the model
        trainer.callbacks = ordered([*trainer.callbacks, _ByDefault()])


class _ByDefault(MemoryForecast):
    """The MemoryForecast that roomier adds by default."""

    def on_train_end(self, trainer: TrainerView, pl_module: Module) -> None:
        """Do not report that a short run has no forecast, because the user did not request a forecast."""


def _shapes(module: Module, *, tells: bool) -> Module | None:
    """Return a copy of ``module`` without values; None if the module cannot be copied."""
    try:
        with preserved_rng(), torch.device("meta"):
            copied = shapes_of(module)
    except Exception as error:  # a model that cannot be copied can still be trained
        if tells:
            notice(
                f"MemoryForecast: no forecast is available, because {type(module).__name__} cannot be copied ({error})"
            )
        return None
    for parameter in copied.parameters():
        for name in ("page", "pages", "_paged_as"):  # values of a model that is created in parts
            parameter.__dict__.pop(name, None)
    return copied


def _states_bytes(shapes: Module, plan: Plan) -> int:
    """Return the peak size in bytes of the model states on one rank; 0 if unknown. Without a named optimizer, assume
    AdamW."""
    from roomier.planner.memory.predict import predict  # late import: loads torch's sharding modules

    optimizer = plan.optimizer
    if optimizer.name is None:
        plan = dataclasses.replace(plan, optimizer=dataclasses.replace(optimizer, name="adamw"))
    try:
        return total_bytes(predict(network_of(shapes), plan).peak.num_bytes)
    except Exception:  # the model may still be trainable; otherwise, building the model raises the error
        return 0
