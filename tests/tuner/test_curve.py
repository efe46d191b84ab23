"""Suggestion and plot of a curve."""

import math
import sys
from pathlib import Path

import pytest
import torch

from roomier.core.errors import RoomierError
from roomier.tuner import LearningRateCurve


def falling_around(rate: float, mode: str = "exponential", noise: float = 0.0) -> LearningRateCurve:
    """Return the curve of a loss that decreases from 2 to 1 like a smooth step, most steeply at ``rate``."""
    rates = [10 ** (-6 + 6 * index / 99) for index in range(100)]
    if mode == "linear":
        rates = [0.01 * (index + 1) for index in range(100)]
        losses = [1 + 1 / (1 + math.exp((each - rate) * 20)) for each in rates]
    else:
        losses = [1 + 1 / (1 + math.exp(3 * math.log(each / rate))) for each in rates]
    torch.manual_seed(0)
    return LearningRateCurve(tuple(rates), tuple(x + noise * float(torch.randn(())) for x in losses), mode)


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("rate", [1e-4, 1e-3, 1e-2])
def test_steepest_descent_is_found_with_noise(rate: float, noise: float) -> None:
    found = falling_around(rate, noise=noise).suggestion()
    assert found is not None
    assert rate / 2 < found < rate * 2


def test_linear_rates_use_linear_distances() -> None:
    found = falling_around(0.5, "linear").suggestion()
    assert found is not None
    assert 0.45 < found < 0.55


def test_no_suggestion_without_a_descent_or_with_few_steps() -> None:
    rising = LearningRateCurve(tuple(range(1, 101)), tuple(float(each) for each in range(100)))
    assert rising.suggestion() is None
    assert LearningRateCurve((0.1, 0.2, 0.3), (3.0, 2.0, 1.0)).suggestion() is None
    assert LearningRateCurve((), ()).suggestion() is None
    assert LearningRateCurve(tuple(range(1, 8)), (7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0)).suggestion(0, 0) is not None


def test_skipped_steps_are_not_suggested() -> None:
    curve = falling_around(1e-4)
    assert curve.suggestion(skip_begin=60) != curve.suggestion()
    assert curve.suggestion(skip_begin=60) >= curve.learning_rates[60]
    assert curve.suggestion(skip_end=70) < curve.learning_rates[30]


def test_smoothed_losses_are_bias_corrected() -> None:
    assert LearningRateCurve((1.0, 2.0, 3.0), (4.0, 4.0, 4.0)).results == {
        "lr": [1.0, 2.0, 3.0],
        "loss": pytest.approx([4.0, 4.0, 4.0]),
    }


def test_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    falling_around(1e-3).save_png(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    axes = falling_around(1e-3).plot(suggest=True).axes[0]
    assert axes.get_xscale() == "log"
    assert axes.get_title().startswith("learning rate of the steepest descent: 0.00")


def test_without_matplotlib_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(RoomierError, match="pip install matplotlib"):
        falling_around(1e-3).save_png(tmp_path / "curve.png")
