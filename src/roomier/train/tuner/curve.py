"""Result of a learning rate range test: the measured losses, the suggested rate, and a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roomier.core.errors import RoomierError

_SMOOTHING = 0.98
_REACH = 1 / 8  # Extent of the fitted line on each side, as a fraction of the steps that are not ignored.


@dataclass(frozen=True)
class LearningRateCurve:
    """Curve of the loss as a function of the learning rate.

    Attributes:
        learning_rates: learning rate of each optimizer step, in ascending order.
        raw_losses: loss of each step before its update.
        losses: smoothed losses (exponential average with factor 0.98, bias-corrected).
        mode: spacing of the rates: ``"exponential"`` or ``"linear"``.

    Example:
        >>> curve = Tuner(trainer).lr_find(model, loader)
        >>> curve.suggestion()
        >>> curve.save_png("lr_find.png")
    """

    learning_rates: tuple[float, ...]
    raw_losses: tuple[float, ...]
    mode: str = "exponential"

    @property
    def losses(self) -> tuple[float, ...]:
        """Smoothed losses."""
        return smoothed(self.raw_losses)

    @property
    def results(self) -> dict[str, list[float]]:
        """Dict ``{"lr": [...], "loss": [...]}`` with smoothed losses, as in Lightning's learning rate finder."""
        return {"lr": list(self.learning_rates), "loss": list(self.losses)}

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the rate at which the loss decreases most steeply; None if the loss never decreases or the number of
        steps is too small.

        The slope at a step is the slope of a line fitted to the surrounding losses (on each side, an eighth of the
        steps that are not ignored). The line is fitted to the losses as a function of the logarithm of the rate, or of
        the rate itself if the rate increases linearly. A line through fewer losses would be too sensitive to the noise
        of individual batches. Smith (arXiv:1506.01186, section 3.3) reads two rates from the curve: the rate at which
        the loss begins to decrease, and the rate at which the loss stops decreasing. The rate of the steepest descent
        is between these two rates.

        Args:
            skip_begin: number of steps to ignore at the beginning.
            skip_end: number of steps to ignore at the end.
        """
        index = self._steepest(skip_begin, skip_end)
        return None if index is None else self.learning_rates[index]

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Return a matplotlib figure with the curve.

        Args:
            suggest: True to mark the suggested rate.
            show: True to open a window.
            ax: axes to draw on; None creates a figure.

        Raises:
            RoomierError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            action = "Run: pip install matplotlib. The values of the curve are in .results"
            raise RoomierError("plot", "matplotlib", f"is not installed ({error})", action) from error
        if ax is None and show:
            from matplotlib import pyplot

            _, ax = pyplot.subplots()
        elif ax is None:
            # This Figure has no window, and matplotlib has no global reference to it.
            ax = Figure(figsize=(6.4, 4.0), layout="constrained").subplots()
        losses = self.losses
        ax.plot(self.learning_rates, self.raw_losses, color="0.8", linewidth=0.8)
        ax.plot(self.learning_rates, losses, color="C0")
        low, high = min(losses, default=0.0), max(losses, default=1.0)
        ax.set_ylim(low - 0.1 * (high - low or 1.0), high + 0.1 * (high - low or 1.0))
        if self.mode == "exponential":
            ax.set_xscale("log")
        index = self._steepest() if suggest else None
        if index is not None:
            ax.plot(self.learning_rates[index], losses[index], "o", color="C3")
            ax.set_title(f"learning rate of the steepest descent: {self.learning_rates[index]:.3g}")
        ax.set_xlabel("learning rate")
        ax.set_ylabel("loss")
        figure = ax.get_figure()
        if show:
            figure.show()
        return figure

    def save_png(self, path: str | Path, *, suggest: bool = True) -> None:
        """Save the figure of :meth:`plot` as a PNG file at ``path``.

        Raises:
            RoomierError: matplotlib is not installed.
        """
        self.plot(suggest=suggest).savefig(path, format="png", dpi=120)

    def _steepest(self, skip_begin: int = 10, skip_end: int = 1) -> int | None:
        losses, rates = self.raw_losses, self.learning_rates
        xs = [math.log(rate) for rate in rates] if self.mode == "exponential" else list(rates)
        first, end = max(skip_begin, 0), len(losses) - max(skip_end, 0)
        reach = max(2, round(_REACH * (end - first)))
        slopes = {
            index: _slope(xs[index - reach : index + reach + 1], losses[index - reach : index + reach + 1])
            for index in range(first + reach, end - reach)
        }
        if not slopes:
            return None
        steepest = min(slopes, key=slopes.__getitem__)
        return steepest if slopes[steepest] < 0 else None


def _slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the slope of the least-squares line."""
    middle = sum(xs) / len(xs)
    return sum((x - middle) * y for x, y in zip(xs, ys, strict=True)) / sum((x - middle) ** 2 for x in xs)


def smoothed(losses: tuple[float, ...]) -> tuple[float, ...]:
    """Return the bias-corrected exponential averages of ``losses``, one average for each loss."""
    average, found = 0.0, []
    for number, loss in enumerate(losses, start=1):
        average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
        found.append(average / (1 - _SMOOTHING**number))
    return tuple(found)
