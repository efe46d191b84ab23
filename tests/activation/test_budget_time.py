"""The time of a step for a range of budgets."""

from __future__ import annotations

import time

import pytest

from tests.activation.budgets import Language, Net, engine_for, measured_peak, rank_correlation, take_step, tokens


@pytest.mark.slow
def test_the_time_of_a_step_decreases_with_larger_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"num_layers": 8, "width": 192, "num_heads": 4, "dropout": 0.1}
    window = [tokens(24)]
    budgets = [part / 9 for part in range(10)]
    modules = [Net(Language(**sizes)) for _ in budgets]
    engines = [engine_for(module, budget) for module, budget in zip(modules, budgets, strict=True)]
    times_s: list[list[float]] = [[] for _ in budgets]
    for turn in range(13):
        for module, engine, taken_s in zip(modules, engines, times_s, strict=True):
            start_s = time.process_time()
            take_step(engine, module, window)
            if turn >= 3:
                taken_s.append(time.process_time() - start_s)
    best_s = [min(each) for each in times_s]
    peaks = [measured_peak(engine, module, window) for engine, module in zip(engines, modules, strict=True)]
    with capsys.disabled():
        for budget, seconds, peak in zip(budgets, best_s, peaks, strict=True):
            print(f"\n{budget:.2f}  {1e3 * seconds:.1f} ms  {peak / 2**20:.1f} MiB", end="")
    assert rank_correlation(budgets, best_s) <= -0.9
