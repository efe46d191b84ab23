"""Classes that display progress as a bar in a terminal or as lines of text in any other output."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roomier.core.metric_names import printable
from roomier.core.units import format_count

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


@dataclass(frozen=True)
class Standing:
    """Progress of a stage.

    Attributes:
        title: title of the stage, such as ``"epoch 2/10"`` or ``"validation"``.
        num_done: number of completed batches.
        num_total: total number of batches; infinite if this number is unknown.
        step_text: text such as ``"step 50/1000"``; empty in a stage without optimizer steps.
        batches_per_s: batches per second; 0 if the speed is unknown.
        left_s: remaining seconds of the stage, or of the run during training; infinite if unknown.
        metrics: values to show; the keys are metric names.
        items_per_s: samples or tokens per second on all ranks; 0 if unknown.
        item: ``"samples"`` or ``"tokens"``.
    """

    title: str
    num_done: int
    num_total: float
    step_text: str = ""
    batches_per_s: float = 0.0
    left_s: float = math.inf
    metrics: Mapping[str, float] = field(default_factory=dict)
    items_per_s: float = 0.0
    item: str = "samples"

    def texts(self, done: str) -> list[str]:
        """Return the non-empty texts of a line. ``done`` is the text for the completed batches."""
        rate = f"{rate_text(self.batches_per_s)} it/s" if self.batches_per_s else ""
        number = format_count(self.items_per_s) if self.items_per_s >= 1000 else rate_text(self.items_per_s)
        items = f"{number} {self.item}/s" if self.items_per_s else ""
        left = f"ETA {duration_text(self.left_s)}" if math.isfinite(self.left_s) else ""
        metrics = " ".join(f"{printable(name)} {value:.4g}" for name, value in self.metrics.items())
        return [text for text in (self.step_text, done, rate, items, left, metrics) if text]


def rate_text(rate: float) -> str:
    """Format a rate with three significant digits, or as an integer from 100 on: ``1380``, ``99.5``, ``0.0125``."""
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def duration_text(seconds: float) -> str:
    """Format a duration: ``3725.2`` -> ``"1:02:06"``, ``65`` -> ``"1:05"``."""
    minutes, rest_s = divmod(max(0, math.ceil(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest_s:02d}" if hours else f"{minutes}:{rest_s:02d}"


def _count_text(standing: Standing) -> str:
    total = f"/{standing.num_total:.0f}" if math.isfinite(standing.num_total) else ""
    return f"batch {standing.num_done}{total}"


class LineDisplay:
    """Display for log files, with one line per log interval of training and per completed evaluation.

    Attributes:
        redraws_between_log_steps: True if ``draw`` is also called between log steps, when only the time has changed.
    """

    redraws_between_log_steps = False

    def __init__(self, console: Console) -> None:
        self._console = console

    def draw(self, standing: Standing) -> None:
        """Show the progress."""
        texts = standing.texts("" if standing.step_text else _count_text(standing))
        # print instead of rich, because rich needs about 0.3 ms for a plain line
        print(" | ".join([standing.title, *texts]), file=self._console.file, flush=True)

    def end(self, standing: Standing) -> None:
        """Show the progress at the end of a stage."""
        if not standing.step_text:
            self.draw(standing)

    def close(self) -> None:
        """Stop drawing. May be called twice. A later ``draw`` starts a new display."""


class BarDisplay(LineDisplay):
    """Display with one progress bar (from the ``rich`` package) for each running stage. The bar is redrawn only by
    ``draw``, not by a thread."""

    redraws_between_log_steps = True

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def draw(self, standing: Standing) -> None:
        stage = _stage(standing)
        progress = self._started()
        if stage not in self._tasks:
            self._tasks[stage] = progress.add_task("", text="")
        progress.update(
            self._tasks[stage],
            description=standing.title,
            completed=standing.num_done,
            total=standing.num_total if math.isfinite(standing.num_total) else None,
            text=" | ".join(standing.texts(_count_text(standing))),
        )
        progress.refresh()

    def end(self, standing: Standing) -> None:
        self.draw(standing)
        # The bar of an evaluation during training is removed. The last bar of a display remains visible.
        if len(self._tasks) > 1 and self._progress is not None:
            self._progress.remove_task(self._tasks.pop(_stage(standing)))
            self._progress.refresh()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress, self._tasks = None, {}

    def _started(self) -> Progress:
        if self._progress is None:
            from rich.progress import BarColumn, Progress, TextColumn

            # rich must not interpret a name such as "acc[val]" as markup
            texts = [TextColumn(each, markup=False) for each in ("{task.description}", "{task.fields[text]}")]
            columns = (texts[0], BarColumn(bar_width=20), texts[1])
            # Printed text appears above the bar, unless standard output is a file or a pipe.
            self._progress = Progress(
                *columns, console=self._console, auto_refresh=False, redirect_stdout=sys.stdout.isatty()
            )
            self._progress.start()
        return self._progress


def _stage(standing: Standing) -> str:
    return standing.title.split(" ")[0]
