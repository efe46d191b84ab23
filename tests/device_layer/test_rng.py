"""All random states are saved and restored."""

import random

import numpy as np
import pytest
import torch

from roomier import RoomierError, seed_everything
from roomier.device.rng import rng_state, set_rng_state


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


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, "1", True, None])
def test_invalid_seeds_are_rejected(seed):
    with pytest.raises(RoomierError, match=r"seed=.*\[0, 2\*\*32\)"):
        seed_everything(seed)
