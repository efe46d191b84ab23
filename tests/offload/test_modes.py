"""Offloaded optimizer states: every mode computes the same bits as the same plan without offloading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from roomier.core.errors import PlanError
from roomier.engine.offloaded_updates import OffloadedUpdates
from roomier.engine.prepared import PreparedEngine
from roomier.models.gpt import GPT
from roomier.techniques.offload.states import OffloadedStates
from tests.covering import few
from tests.engine.test_step_in_backward import ADAMW, Trained, check_same, make_engine, make_network
from tests.optim.named import CLASSES

MODES = ["plain", "deferred", "speculative"]
NUM_STEPS = 12
CLIPS: dict[str, dict[str, Any]] = {
    "sometimes": {"gradient_clip_val": 15.3},
    "elements": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    "unclipped": {},
    "never": {"gradient_clip_val": 1e9},
    "always": {"gradient_clip_val": 0.5},
}


def offloaded(network: GPT, mode: str, folder: Path, optimizer: Any = ADAMW, **flags: Any) -> PreparedEngine:
    tiers = {"optimizer_states": "disk", "folder": str(folder), "update": mode, **flags.pop("tiers", {})}
    return make_engine(network, False, optimizer, offload=tiers, **flags)


def train(network: GPT, engine: PreparedEngine, num_steps: int = NUM_STEPS, num_micro_batches: int = 1) -> Trained:
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)  # for dropout
    trained = Trained()
    for step in range(num_steps):
        batches = [torch.randint(61, (2, 9), generator=generator) for _ in range(num_micro_batches)]
        loss = engine.forward_backward(lambda batch: network(batch[:, :-1], batch[:, 1:])[1], batches)
        assert loss is not None
        trained.losses.append(loss)
        norm = engine.clip()
        trained.norms.append(None if norm is None else norm.clone())
        engine.step()
        for group in engine.optimizers[0].param_groups:  # as a schedule does
            group["lr"] = 3e-3 / (1 + step)
    engine.settle()
    trained.weights = {name: each.detach().clone() for name, each in network.named_parameters()}
    trained.states = engine.state()["optimizers"]
    return trained


@pytest.mark.parametrize("clip", few(CLIPS, 3))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_micro_batches", few([1, 4]))
def test_every_mode_computes_the_same_bits(mode: str, clip: str, num_micro_batches: int, tmp_path: Path) -> None:
    flags = {**CLIPS[clip], "accumulate_grad_batches": num_micro_batches}
    if clip == "sometimes" and num_micro_batches > 1:
        flags["gradient_clip_val"] = 5.9
    plain, network = make_network(), make_network()
    expected = train(plain, make_engine(plain, False, ADAMW, **flags), num_micro_batches=num_micro_batches)
    engine = offloaded(network, mode, tmp_path, **flags)
    found = train(network, engine, num_micro_batches=num_micro_batches)
    check_same(found, expected)
    if clip == "sometimes":
        clipped = [norm > flags["gradient_clip_val"] for norm in expected.norms if norm is not None]
        assert any(clipped)
        assert not all(clipped)
    assert isinstance(engine._updates, OffloadedUpdates)


@pytest.mark.parametrize("clip", few(CLIPS, 2))
@pytest.mark.parametrize("mode", few(["deferred", "plain"]))
@pytest.mark.parametrize("states", few(["disk", "none"]))
def test_parameters_in_a_tier(mode: str, clip: str, states: str, tmp_path: Path) -> None:
    flags = {**CLIPS[clip], "accumulate_grad_batches": 2}
    plain, network = make_network(), make_network()
    expected = train(plain, make_engine(plain, False, ADAMW, **flags), num_micro_batches=2)
    tiers = {"parameters": "disk", "optimizer_states": states}
    engine = offloaded(network, mode, tmp_path, tiers=tiers, **flags)
    check_same(train(network, engine, num_micro_batches=2), expected)


@pytest.mark.parametrize("mode", few(["speculative", "deferred", "plain"]))
@pytest.mark.parametrize("name", few([name for name in CLASSES if name != "onebit_adam"], 3))
def test_every_optimizer_by_name(name: str, mode: str, tmp_path: Path) -> None:
    plain, network = make_network(), make_network()
    optimizer = {"name": name, "lr": 1e-3}
    expected = train(plain, make_engine(plain, False, optimizer, **CLIPS["sometimes"]), 6)
    check_same(train(network, offloaded(network, mode, tmp_path, optimizer, **CLIPS["sometimes"]), 6), expected)


class Foreign(torch.optim.AdamW):
    """An optimizer that is defined outside torch."""


def test_unsupported_optimizers_are_rejected(tmp_path: Path) -> None:
    for make, name in ((torch.optim.LBFGS, "LBFGS"), (Foreign, "Foreign")):
        network = make_network()
        with pytest.raises(PlanError, match=name):
            offloaded(network, "plain", tmp_path, make(network.parameters(), lr=0.1))


def test_speculative_updates_are_accepted_or_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates are accepted if gradients are not clipped. If each step clips, speculation pauses."""
    counts = dict.fromkeys(("accept", "reject"), 0)
    for name in counts:
        original = getattr(OffloadedStates, name)

        def counted(self: OffloadedStates, number: int, name: str = name, original: Any = original) -> None:
            counts[name] += 1
            original(self, number)

        monkeypatch.setattr(OffloadedStates, name, counted)
    network = make_network()
    engine = offloaded(network, "speculative", tmp_path, **CLIPS["never"])
    train(network, engine, 6)
    num_units = len(engine._updates._units)
    assert counts == {"accept": 5 * num_units, "reject": 0}  # the first of six steps creates the states
    network = make_network()
    train(network, offloaded(network, "speculative", tmp_path, **CLIPS["always"]), 10)
    assert counts == {"accept": 5 * num_units, "reject": 4 * num_units}
