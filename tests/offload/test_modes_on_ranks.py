"""Offloaded optimizer states under every strategy: the same bits as the same plan without offloading."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from roomier.engine.offloaded_updates import OffloadedUpdates
from tests.covering import few
from tests.parallel.parity import Setup, train_on_ranks
from tests.parallel.tasks import Language, TiedLanguage
from tests.ranks.pool import RankPool

STRATEGIES = {"zero3": 2, "zero2": 2, "ddp": 2, "zero1": 2, "hsdp": 4}
CLIPS: dict[str, dict[str, Any]] = {
    "unclipped": {},
    "sometimes": {"clip": 0.9},
    "always": {"clip": 0.5},
    "elements": {"clip": 1e-3, "clip_algorithm": "value"},
}


def not_supported(updates: OffloadedUpdates, parameter: torch.Tensor) -> None:
    raise AssertionError(f"the mode {updates.mode} became plain: a parameter of shape {parameter.shape} was read")


def same_bits(make_task: Callable[[], Language], setup: Setup) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        tiers = {"optimizer_states": "disk", "folder": folder, **setup.levers["offload"]}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OffloadedUpdates, "_be_plain", not_supported)
            found = train_on_ranks(make_task, replace(setup, levers={**setup.levers, "offload": tiers}))
    expected = train_on_ranks(make_task, replace(setup, levers={**setup.levers, "offload": None}))
    for one, other in zip(
        (found.losses, found.norms, found.weights), (expected.losses, expected.norms, expected.weights), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)  # the first step of 16-mixed overflows
    return True


def cases_of(strategy: str) -> list[tuple[Callable[[], Language], Setup]]:
    """Return all combinations of modes, clipping, precisions, accumulation, models and tiers."""
    found = []
    for mode, clip, precision, accumulate, make_task, tiers in product(
        ["plain", "deferred", "speculative"],
        CLIPS,
        ["32-true", "bf16-mixed", "bf16-true", "16-mixed"],
        [1, 4],
        [Language, TiedLanguage],
        [{}, {"share": 0.5, "buffers": 1}, {"parameters": "disk"}, {"parameters": "disk", "optimizer_states": "none"}],
    ):
        if mode == "speculative" and (precision == "16-mixed" or strategy == "ddp" or "parameters" in tiers):
            continue
        if "parameters" in tiers and strategy not in ("zero3", "hsdp"):
            continue
        setup = Setup(
            strategy,
            STRATEGIES[strategy],
            2 if strategy == "hsdp" else None,
            accumulate,
            precision=precision,
            num_steps=5,
            levers={"offload": {"update": mode, **tiers}},
            **CLIPS[clip],
        )
        found.append((make_task, setup))
    return found


SELECTED = 3  # combinations of each strategy that are neither slow nor more


@pytest.mark.parametrize(
    ("first", "end"),
    [
        (0, SELECTED),
        pytest.param(SELECTED, 2 * SELECTED, marks=pytest.mark.more),
        pytest.param(0, None, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
@pytest.mark.parametrize("strategy", few(STRATEGIES))
def test_every_strategy_computes_the_same_bits(on_ranks: RankPool, strategy: str, first: int, end: int | None) -> None:
    cases = cases_of(strategy)
    random.Random(strategy).shuffle(cases)  # so that a selection contains all values
    cases = cases[first:end]
    results = on_ranks.each(STRATEGIES[strategy], same_bits, cases, timeout_s=3600.0 if end is None else 180.0)
    for case, by_rank in zip(cases, results, strict=True):
        assert all(by_rank), case


@pytest.mark.more
@pytest.mark.parametrize(
    ("strategy", "mode", "clip", "tiers"),
    [
        ("zero3", "deferred", "always", {"parameters": "disk"}),
        ("zero3", "plain", "unclipped", {"parameters": "disk", "optimizer_states": "none"}),
        ("hsdp", "deferred", "elements", {"parameters": "disk"}),
    ],
)
def test_loss_scale_with_parameters_on_disk(
    on_ranks: RankPool, strategy: str, mode: str, clip: str, tiers: dict[str, Any]
) -> None:
    """The first step overflows and is skipped on all ranks. Later steps unscale gradients in the tier."""
    levers = {"offload": {"update": mode, **tiers}}
    shard_size = 2 if strategy == "hsdp" else None
    setup = Setup(
        strategy, STRATEGIES[strategy], shard_size, 2, precision="16-mixed", num_steps=5, levers=levers, **CLIPS[clip]
    )
    assert all(on_ranks(STRATEGIES[strategy], same_bits, Language, setup))
