"""All random states are saved and restored."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from roomier import RoomierError, seed_everything
from roomier.core.device.rng import of_devices, rng_form, rng_state, set_rng_state
from roomier.core.forms import FormError
from tests.device_layer.accelerators import have_accelerator


def draw():
    # An odd number of Gaussian samples, because Python and NumPy keep the second of a pair for the next call.
    return random.random(), random.gauss(0, 1), float(np.random.normal()), np.random.rand(), torch.rand(3).tolist()


def test_a_restored_state_repeats_the_numbers():
    seed_everything(3)
    draw()
    state = rng_state()
    first, second = draw(), draw()
    set_rng_state(state)
    assert (draw(), draw()) == (first, second)
    assert first != second


def test_a_seed_determines_all_numbers():
    assert seed_everything(7) == 7
    first = draw()
    seed_everything(7)
    assert draw() == first
    seed_everything(8)
    assert draw() != first


def test_workers_has_no_effect():
    seed_everything(7)
    first = draw()
    assert seed_everything(7, workers=True) == 7
    assert draw() == first


def test_rng_state_does_not_change_the_state():
    seed_everything(1)
    first = draw()
    seed_everything(1)
    rng_state()
    assert draw() == first


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, "1", True])
def test_invalid_seeds_are_rejected(seed):
    with pytest.raises(RoomierError, match=r"seed=.*\[0, 2\*\*32\)"):
        seed_everything(seed)


GENERATOR = torch.arange(4, dtype=torch.uint8)


class Generators(SimpleNamespace):
    """Device module with one random state per device."""

    def get_rng_state(self, device):
        return self.states[device.index]

    def set_rng_state(self, state, device):
        self.states[device.index] = state


def have_generators(monkeypatch, kind, *states):
    generators = Generators(states=list(states))
    have_accelerator(monkeypatch, kind, count=len(states))
    monkeypatch.setattr(torch, "get_device_module", lambda device: generators)
    return generators


def test_states_of_an_accelerator_are_saved_under_its_type(monkeypatch):
    generators = have_generators(monkeypatch, "xpu", GENERATOR, GENERATOR + 1)
    state = rng_state()
    rng_form(state, "rng")
    assert {kind: list(each) for kind, each in of_devices(state).items()} == {"xpu": ["0", "1"]}
    generators.states = [GENERATOR + 2, GENERATOR + 3]
    set_rng_state(state)
    assert [each.tolist() for each in generators.states] == [[0, 1, 2, 3], [1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("kind", "saved", "restored"),
    [
        ("cuda", {"cuda": {"0": GENERATOR + 5}}, 5),
        # the checkpoint has the states of two devices, but this machine has one device
        ("cuda", {"cuda": {"0": GENERATOR + 5, "7": GENERATOR}}, 5),
        ("mps", {"mps": GENERATOR + 5}, 5),  # the form of earlier versions
        ("mps", {"mps": {"0": GENERATOR + 5}}, 5),
        ("xpu", {"cuda": {"0": GENERATOR + 5}, "mps": GENERATOR}, 0),
        ("xpu", {}, 0),
    ],
)
def test_a_saved_state_is_restored_if_its_device_exists(kind, saved, restored, monkeypatch):
    state = {**rng_state(), **saved}
    rng_form(state, "rng")
    generators = have_generators(monkeypatch, kind, GENERATOR)
    set_rng_state(state)
    assert generators.states[0].tolist() == (GENERATOR + restored).tolist()


@pytest.mark.parametrize("saved", [{"cuda": {"0": GENERATOR}}, {"mps": GENERATOR}, {"npu": {"0": GENERATOR}}])
def test_states_of_absent_accelerators_are_skipped(saved, monkeypatch):
    have_accelerator(monkeypatch, None)
    state = rng_state()
    first = draw()
    set_rng_state({**state, **saved})
    assert draw() == first


@pytest.mark.parametrize(
    "saved",
    [
        {"xpu": GENERATOR.float()},
        {"xpu": {"0": 3}},
        {"xpu": {"first": GENERATOR}},
        {"xpu": {"-1": GENERATOR}},
        {"xpu": {0: GENERATOR}},
        {"xpu": {"99999": GENERATOR}},
        {"xpu": [GENERATOR]},
        {"__class__": GENERATOR},
        {"x" * 100: GENERATOR},
        {3: GENERATOR},
    ],
)
def test_invalid_states_of_devices_are_rejected(saved):
    with pytest.raises(FormError):
        rng_form({**rng_state(), **saved}, "rng")
