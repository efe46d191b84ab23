"""Random numbers of training that do not depend on the number of ranks that compute a sample.

[Note: events]
With ``seeding="stream"``, the generators of a rank continue from one step to the next, so a random number depends on
all random numbers that the rank drew before. With ``seeding="events"``, the generators are seeded at the start of each
micro-batch from (seed, step, data rank, micro-batch). Each call of a unit (a block, or an outermost module with
parameters or dropout outside of the blocks) is an *event*: it draws one integer, which is equal on all ranks that read
the same samples, and runs with generators that are seeded from this integer. If the unit runs on a slice of the
sequence, its seed also depends on the index of the slice. After the event, the previous states are restored. Ranks that
share samples therefore draw equal numbers outside of the events, even if they draw different numbers inside or, in a
pipeline, skip the event.

The integer comes from torch's CPU generator, because every form of recomputation restores this generator: a block that
is called again in the backward pass draws the same integer, even if the model recomputes it with
``torch.utils.checkpoint``.

The states are restored at the end of a step, so evaluations, the optimizer, callbacks and the loaders draw the same
numbers as without events.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from roomier.core.device.rng import generator_state, mix_seed, seed_generators, set_generator_state
from roomier.core.wrapped_forward import WrappedForward, install

T = TypeVar("T")
_numpy: Any = np.random  # the stubs of NumPy lack these two functions

_running: list[Events] = []
"""The events of the step that runs now. Like the generators, they belong to the process: on accelerators, blocks are
recomputed in a thread of autograd."""

_spare: list[np.random.MT19937] = []
"""Unused generators. To replace NumPy's generator takes a hundredth of the time of a copy of its state."""


class Events:
    """Seeds of the micro-batches and events of one run. See [Note: events].

    Args:
        seed: seed of the run, equal on all ranks.
        device: device of this rank.
        data_rank: index of the share of the samples that this rank reads; all ranks that read the same samples have the
            same index.
        coordinate: index of the slice of the sequence that this rank computes.

    Attributes:
        index: index of the next micro-batch in the window.
    """

    def __init__(self, seed: int, device: torch.device, *, data_rank: int = 0, coordinate: int = 0) -> None:
        self.seed = seed
        self.device = device
        self._data_rank = data_rank
        self._coordinate = coordinate
        self._step = self.index = 0

    @contextmanager
    def window(self, step: int) -> Iterator[None]:
        """Run the micro-batches of one optimizer step in this context, and restore the generators when it ends."""
        self._step, self.index = step, 0
        with _restored(self.device):
            _running.append(self)
            try:
                yield
            finally:
                _running.remove(self)

    def begin_micro_batch(self) -> None:
        """Seed the generators for the next micro-batch of the window. Without a window, this has no effect."""
        if self in _running:
            self.seed_generators(self.index)
            self.index += 1

    def seed_generators(self, index: int) -> None:
        """Seed the generators for micro-batch ``index`` of the current window."""
        _seed(mix_seed(self.seed, self._step, self._data_rank, index), self.device)

    def seeded(self, function: Callable[..., T]) -> Callable[..., T]:
        """Return ``function``, before each call of which :meth:`begin_micro_batch` is called."""

        def call(*args: Any) -> T:
            self.begin_micro_batch()
            return function(*args)

        return call

    def seed_of_event(self, *, is_sliced: bool) -> int:
        """Draw the integer of an event, and return the seed of this rank."""
        return mix_seed(int(torch.randint(2**62, (), device="cpu")), self._coordinate * is_sliced)


class EventForward(WrappedForward):
    """Wrapper for the ``forward`` method of a unit. In a training step, each call is an event; see [Note: events]."""

    def __init__(self, module: nn.Module, *, is_sliced: bool) -> None:
        super().__init__(module)
        self._is_sliced = is_sliced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _running:  # an evaluation or a dry run
            return self.forward(*args, **kwargs)
        events = _running[-1]
        seed = events.seed_of_event(is_sliced=self._is_sliced)
        with _restored(events.device):
            _seed(seed, events.device)
            return self.forward(*args, **kwargs)


def install_events(units: Iterable[nn.Module], sliced: Collection[nn.Module] = ()) -> None:
    """Make each call of a unit in training an event. The units in ``sliced`` run on slices of the sequence."""
    for unit in units:
        install(unit, EventForward(unit, is_sliced=unit in sliced))


def _seed(seed: int, device: torch.device) -> None:
    seed_generators(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


@contextmanager
def _restored(device: torch.device) -> Iterator[None]:
    """Restore the generators of Python, NumPy, the CPU and ``device`` at the end of the context."""
    of_python, of_numpy, of_torch = random.getstate(), _numpy.get_bit_generator(), torch.get_rng_state()
    of_device = None if device.type == "cpu" else generator_state(device)
    inner = _spare.pop() if _spare else np.random.MT19937(0)
    _numpy.set_bit_generator(inner)
    try:
        yield
    finally:
        random.setstate(of_python)
        _numpy.set_bit_generator(of_numpy)
        _spare.append(inner)
        torch.set_rng_state(of_torch)
        if of_device is not None:
            set_generator_state(device, of_device)
