"""The line that ends a fit."""

from __future__ import annotations

import os
import time
from pathlib import Path

from roomier.callbacks.forecast import MemoryForecast
from roomier.callbacks.progress_display import duration_text
from roomier.core.log import notice
from roomier.core.metric_names import printable
from roomier.run.run import Run
from roomier.trainer.attributes import TrainerAttributes


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
        texts.append(f"run folder {run.folder}")
    monitors, last = trainer.checkpoint_callback, run.saves.path
    best = monitors.best_model_path if getattr(monitors, "monitor", None) else ""
    if last is not None:
        is_best = best and Path(best).absolute() == last.absolute()
        texts.append(f"{'last and best' if is_best else 'last'} checkpoint {_below(run.folder, last)}")
        best = "" if is_best else best
    if best:
        texts.append(f"best checkpoint {_below(run.folder, Path(best))}")
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
    return os.path.relpath(path, folder) if is_inside and folder is not None else str(path)
