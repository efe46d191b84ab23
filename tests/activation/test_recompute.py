"""Recomputation gives bit-identical gradients for every kind of model."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor

from roomier.techniques.activation import recompute
from roomier.techniques.activation.copies import Offload
from tests.activation.kinds import KINDS
from tests.activation.steps import WAYS, Step, assert_equal, recomputed, step_of, use_no_cache
from tests.covering import few


@pytest.fixture(autouse=True)
def moves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "Offload", partial(Offload, min_bytes=1))


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", few(KINDS, 2))
def test_gradients_are_bit_identical(kind: str, autocast: bool) -> None:
    plain = two_steps(kind, autocast, None)
    assert not torch.equal(plain[0].loss, two_steps(kind, autocast, None, seed=4)[0].loss), "dropout"
    for way in WAYS:
        for ours, theirs in zip(two_steps(kind, autocast, way), plain, strict=True):
            assert_equal(ours, theirs)


def two_steps(kind: str, autocast: bool, way: tuple[str, str] | None, seed: int = 3) -> list[Step]:
    torch.manual_seed(0)
    network, loss = KINDS[kind]()
    network.train()
    if way is None:
        use_no_cache(network)

    def autocast_loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return loss()

    with nullcontext() if way is None else recomputed(network, *way):
        return [step_of(network, autocast_loss, seed) for _ in range(2)]
