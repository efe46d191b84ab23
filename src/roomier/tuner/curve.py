"""What a learning-rate range test measured, the rate it suggests, and its picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roomier.core.errors import RoomierError

_SMOOTHING = 0.98
_REACH = 1 / 8  # of a line's neighbourhood to each side, as a share of all steps


@dataclass(frozen=True)
class LearningRateCurve:
    """The loss over the learning rate.

    Attributes:
        learning_rates: of each optimizer step, rising.
        raw_losses: of the same steps, before their update.
        losses: the same, smoothed (an exponential average with 0.98, freed of its bias towards zero).
        mode: how the rates rise: ``"exponential"`` or ``"linear"``.
    """

    learning_rates: tuple[float, ...]
    raw_losses: tuple[float, ...]
    mode: str = "exponential"

    @property
    def losses(self) -> tuple[float, ...]:
        return smoothed(self.raw_losses)

    @property
    def results(self) -> dict[str, list[float]]:
        """``{"lr": [...], "loss": [...]}``, as Lightning's finder has it; the losses are smoothed."""
        return {"lr": list(self.learning_rates), "loss": list(self.losses)}

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """The rate at which the loss falls the most steeply; None where it never falls, or too few steps were taken.

        The slope is that of the line through the losses around it, an eighth of them to each side, over the logarithm
        of the rate (over the rate itself where it rose linearly): losses of single batches are too noisy for less.
        Smith (arXiv:1506.01186, section 3.3) reads the rate off the curve where the loss begins to fall and where it
        stops; the steepest descent lies between.

        Args:
            skip_begin: steps at the beginning that are not looked at.
            skip_end: steps at the end that are not.
        """
        index = self._steepest(skip_begin, skip_end)
        return None if index is None else self.learning_rates[index]

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """A figure of matplotlib with the curve.

        Args:
            suggest: mark the suggested rate. show: open a window. ax: draw there.

        Raises:
            RoomierError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            action = "Run: pip install matplotlib; the numbers are in .results"
            raise RoomierError("plot", "matplotlib", f"is not installed ({error})", action) from error
        if ax is None and show:
            from matplotlib import pyplot

            _, ax = pyplot.subplots()
        elif ax is None:
            ax = Figure(figsize=(6.4, 4.0), layout="constrained").subplots()  # of no window, and kept by nobody
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
        """Write :meth:`plot` to ``path``.

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
    """Of the line of least squares."""
    middle = sum(xs) / len(xs)
    return sum((x - middle) * y for x, y in zip(xs, ys, strict=True)) / sum((x - middle) ** 2 for x in xs)


def smoothed(losses: tuple[float, ...]) -> tuple[float, ...]:
    """An exponential average of ``losses`` up to each of them, divided by the weights that are in it."""
    average, found = 0.0, []
    for number, loss in enumerate(losses, start=1):
        average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
        found.append(average / (1 - _SMOOTHING**number))
    return tuple(found)
