"""Random draws that come out the same on every rank: the order of a loader that all ranks read alike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from roomier.data.seeding import mix_seed, seed_generators


class CommonDraws:
    """States of the CPU generators of Python, NumPy and torch that take the place of this rank's inside a block.

    A sampler that shuffles by the global generators gives every rank its order only where all ranks draw alike, and
    each rank has drawn other numbers before (its dropout, say).
    """

    def __init__(self) -> None:
        self._states: tuple[Any, ...] | None = None
        self._is_inside = False

    @property
    def are_seeded(self) -> bool:
        return self._states is not None

    def seed(self, seed: int, epoch: int) -> None:
        """Begin anew with what depends on ``seed`` and ``epoch`` alone."""
        outer = _states()
        seed_generators(mix_seed(seed, epoch))
        self._states = _states()
        _set_states(outer)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Draw in here; the generators of this rank are as before behind it. One inside another is the same as one."""
        if self._is_inside:
            yield
            return
        assert self._states is not None, "seed() comes first"
        self._is_inside = True
        outer = _states()
        _set_states(self._states)
        try:
            yield
        finally:
            self._states = _states()
            _set_states(outer)
            self._is_inside = False

    def read(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """What ``iterator`` gives, each drawn inside."""
        while True:
            with self.inside():
                try:
                    each = next(iterator)
                except StopIteration:
                    return
            yield each


def _states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_states(states: tuple[Any, ...]) -> None:
    of_python, of_numpy, of_torch = states
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)
