"""Fits with parameters on disk compute the same bits as fits with parameters on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from roomier.core.sharded import local_part
from tests.covering import few
from tests.offload.test_trainer import Language, check_same, fit
from tests.ranks.pool import RankPool

OPTIONS: dict[str, dict[str, Any]] = {
    "precision and recomputation": {
        "chunked_loss": True,
        "precision": "bf16-mixed",
        "activation_checkpointing": "selective",
        "accumulate_grad_batches": 3,
    },
    "offloaded activations": {"precision": "bf16-true", "activation_checkpointing": "full"},
    "sgd": {"optimizer": {"name": "sgd", "lr": 0.1}, "gradient_clip_algorithm": "value", "gradient_clip_val": 0.1},
    "frozen base": {"lora": {"rank": 2}, "gradient_clip_val": 0.5},
}


@pytest.mark.parametrize("mode", ["deferred, parameters", pytest.param("plain, parameters", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", few(OPTIONS, 2))
def test_options(name: str, mode: str, tmp_path: Path) -> None:
    options = {"max_steps": 6, **OPTIONS[name]}
    expected = fit(tmp_path / "device", None, **options)
    check_same(fit(tmp_path / "tier", mode, **options), expected)


def shards_of_fit(folder: Path, mode: str | None, options: dict[str, Any]) -> dict[str, Tensor]:
    module = fit(folder, mode, Language(), **options)
    with torch.no_grad():
        return {name: local_part(each).clone() for name, each in module.named_parameters()}


def differences(folder: Path, mode: str, options: dict[str, Any]) -> list[str]:
    expected = shards_of_fit(folder / "device", None, options)
    found = shards_of_fit(folder / "tier", mode, options)
    assert found.keys() == expected.keys()
    return [name for name, each in found.items() if not torch.equal(each, expected[name])]


@pytest.mark.parametrize(
    ("num_ranks", "strategy", "mode"),
    [
        (2, "zero3", "deferred, parameters"),
        pytest.param(2, "zero3", "plain, parameters", marks=pytest.mark.slow),
        pytest.param(4, {"name": "hsdp", "shard_size": 2}, "deferred, parameters", marks=pytest.mark.slow),
    ],
)
def test_ranks(on_ranks: RankPool, num_ranks: int, strategy: Any, mode: str, tmp_path: Path) -> None:
    options = {
        "strategy": strategy,
        "devices": num_ranks,
        "accumulate_grad_batches": 2,
        "max_steps": 5,
        "precision": "bf16-mixed",
        "val_check_interval": 3,
    }
    assert on_ranks(num_ranks, differences, tmp_path, mode, options, joins=False) == [[]] * num_ranks
