"""Scripts for Accelerate, in which two lines are replaced, train the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.covering import few
from tests.prepared.scripts import CLASSIFIER, for_roomier, largest_difference, rows_of, run
from tests.ranks.pool import RankPool

ROUNDING = 1e-6
NUM_SAMPLES = 17  # a prime number, so that the last batches are incomplete


def made(strategy: str, devices: int, precision: str = "no", **parallel: Any) -> str:
    plan = {"parallel": {"strategy": strategy, "devices": devices, "accelerator": "cpu", **parallel}}
    return f"accelerator = Accelerator(plan={plan}, mixed_precision={precision!r}, gradient_accumulation_steps=2)"


def check_equal(ours: dict[str, Any], theirs: dict[str, Any], rounding: float = ROUNDING) -> None:
    assert largest_difference(ours["weights"], theirs["weights"]) <= rounding
    assert ours["rates"] == pytest.approx(theirs["rates"], rel=1e-12)
    assert ours["lengths"] == theirs["lengths"]
    assert rows_of(ours).shape == rows_of(theirs).shape
    torch.testing.assert_close(rows_of(ours), rows_of(theirs), rtol=10 * rounding, atol=10 * rounding)


def test_two_lines_are_replaced() -> None:
    before, after = CLASSIFIER.splitlines(), for_roomier(CLASSIFIER, "accelerator = Accelerator(plan=...)").splitlines()
    assert sum(old != new for old, new in zip(before, after, strict=True)) == 2


@pytest.mark.parametrize("name", ["classifier", "adversaries"])
@pytest.mark.parametrize("precision", few(["no", "bf16"]))
def test_one_process(name: str, precision: str) -> None:
    theirs = run(name, NUM_SAMPLES, precision=precision)
    ours = run(name, NUM_SAMPLES, made("single", 1, precision))
    check_equal(ours, theirs)
    if name == "classifier":
        assert len(rows_of(ours)) == 2 * NUM_SAMPLES


@pytest.mark.parametrize(("num_ranks", "num_samples"), few([(2, 17), (4, 17), (4, 3), (2, 24)]))
def test_several_processes(num_ranks: int, num_samples: int, on_ranks: RankPool) -> None:
    calls = [("classifier", num_samples, None), ("classifier", num_samples, made("ddp", num_ranks))]
    theirs, ours = on_ranks.each(num_ranks, run, calls)
    for rank in range(num_ranks):
        check_equal(ours[rank], theirs[rank])
        assert len(rows_of(ours[rank])) == 2 * num_samples


@pytest.mark.more
def test_two_models_on_two_ranks(on_ranks: RankPool) -> None:
    calls = [("adversaries", 17, None), ("adversaries", 17, made("ddp", 2))]
    for theirs, ours in zip(*on_ranks.each(2, run, calls), strict=True):
        check_equal(ours, theirs)


def test_sharded_strategies(on_ranks: RankPool) -> None:
    strategies = ("ddp", "zero1", "zero2", "zero3")
    found = on_ranks.each(2, run, [("classifier", 17, made(strategy, 2)) for strategy in strategies])
    for of_strategy in found[1:]:
        check_equal(of_strategy[0], found[0][0])
        assert of_strategy[1]["weights"] == {}  # rank 0 has the full weights
        torch.testing.assert_close(rows_of(of_strategy[1]), rows_of(found[0][1]), rtol=1e-5, atol=1e-5)


@pytest.mark.more
def test_mixed_precision_on_shards(on_ranks: RankPool) -> None:
    found = on_ranks.each(2, run, [("classifier", 17, made(strategy, 2, "bf16")) for strategy in ("ddp", "zero3")])
    assert largest_difference(found[1][0]["weights"], found[0][0]["weights"]) < 0.02  # bf16 has 8 bits


@pytest.mark.slow
def test_a_model_of_hugging_face(on_ranks: RankPool) -> None:
    for precision in ("no", "bf16"):
        theirs = run("language_model", 13, precision=precision)
        check_equal(run("language_model", 13, made("single", 1, precision)), theirs)
    calls = [("language_model", 13, None), ("language_model", 13, made("ddp", 2))]
    calls += [("language_model", 13, made(strategy, 2)) for strategy in ("zero2", "zero3")]
    theirs, *ours = on_ranks.each(2, run, calls)
    for of_strategy in ours:
        check_equal(of_strategy[0], theirs[0])


@pytest.mark.more
def test_optimizer_states_on_disk(tmp_path: Path) -> None:
    plan = {"offload": {"optimizer_states": "disk", "folder": str(tmp_path)}}
    make = f"accelerator = Accelerator(cpu=True, plan={plan}, gradient_accumulation_steps=2)"
    check_equal(run("classifier", NUM_SAMPLES, make), run("classifier", NUM_SAMPLES))
