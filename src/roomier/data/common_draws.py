"""Random numbers that are identical on every rank, for loaders whose order must be the same on all ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from roomier.data.seeding import mix_seed, seed_generators


class CommonDraws:
    """Separate states for the CPU generators of Python, NumPy and torch. The context :meth:`inside` uses these states.

    A sampler that shuffles with the global generators yields the same order on all ranks only if the states of these
    generators are identical on all ranks. The global states can differ, for example after dropout.
    """

    def __init__(self) -> None:
        self._states: tuple[Any, ...] | None = None
        self._is_inside = False

    @property
    def are_seeded(self) -> bool:
        """True after :meth:`seed`."""
        return self._states is not None

    def seed(self, seed: int, epoch: int) -> None:
        """Set the separate states to values that depend only on ``seed`` and ``epoch``."""
        outer = _states()
        seed_generators(mix_seed(seed, epoch))
        self._states = _states()
        _set_states(outer)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Use the separate states in this context, and restore the global states when the context ends. Contexts can be
        nested."""
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
        """Yield the elements of ``iterator``, which runs with the separate states."""
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
