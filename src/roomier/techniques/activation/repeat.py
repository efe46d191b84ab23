"""State that is restored before the second forward pass of a block, in addition to the argument tensors and torch's
random generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from roomier.core import torch_private
from roomier.core.errors import RoomierError
from roomier.core.hugging_face import is_cache
from roomier.core.log import notice

_Place = tuple[nn.Module, str]
_COUNTER_OF_NORMS = "num_batches_tracked"
_PRINTED: list[str] = []
"""Notices that this process has printed. A list is used because ``functools.cache`` would cause a compiler warning."""


class Buffers:
    """Buffers of a block that its forward pass modifies, for example running statistics.

    The modified buffers are determined in the first forward pass. The values of buffers are compared, because kernels
    that write statistics do not increase the version counters of autograd.

    Args:
        block: block whose buffers are observed.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._changing: set[_Place] | None = None

    def places(self) -> dict[_Place, Tensor]:
        """Return the current buffers, keyed by module and name."""
        modules = self._block.modules()
        return {(module, name): each for module in modules for name, each in module.named_buffers(recurse=False)}

    def may_change(self, place: _Place) -> bool:
        """Return True if the forward pass can change the buffer at ``place``."""
        return self._changing is None or place in self._changing

    def learn(self, before: dict[_Place, Tensor], versions: dict[_Place, int]) -> None:
        """Determine which buffers were changed by the forward pass that just ended.

        Args:
            before: copies of the buffers that can change.
            versions: version counters of all other buffers before the forward pass.

        Raises:
            RoomierError: the forward pass changed a buffer that the first forward pass did not change.
        """
        now = self.places()
        if self._changing is None:
            changed = {place for place, copy in before.items() if place not in now or not torch.equal(copy, now[place])}
            norms = {(module, name) for module, name in now if hasattr(module, _COUNTER_OF_NORMS)}
            self._changing = changed | norms  # a norm that is temporarily frozen can change its buffers later
        for place, version in versions.items():
            if place not in now or torch_private.version_of(now[place]) != version:
                problem = (
                    f"is a buffer that the first forward pass of {type(self._block).__name__} did not change, but a "
                    "later forward pass changed"
                )
                action = "Use activation_checkpointing='none', because the block cannot be recomputed"
                raise RoomierError("activation_checkpointing", place[1], problem, action)


class Surroundings:
    """State before a forward pass: values of the buffers that the pass changes, and random states of Python and NumPy.

    Args:
        buffers: buffers of the block that runs.
    """

    def __init__(self, buffers: Buffers) -> None:
        places = buffers.places()
        self._buffers = buffers
        self._copies = {place: each.clone() for place, each in places.items() if buffers.may_change(place)}
        self._versions = {
            place: torch_private.version_of(each) for place, each in places.items() if place not in self._copies
        }
        self._generators = _host_generators()

    def end_first_forward(self) -> None:
        """Determine the buffers that the first forward pass changed."""
        if self._copies or self._versions:
            self._buffers.learn(self._copies, self._versions)
        self._versions = {}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Return a context manager that restores this state on entry, and the previous state on exit."""
        generators = _host_generators()
        buffers = {(module, name): getattr(module, name) for module, name in self._copies}
        _set_host_generators(self._generators)
        for (module, name), copy in self._copies.items():
            setattr(module, name, copy.clone())  # not in place: the graph can have saved the current tensor
        try:
            yield
        finally:
            _set_host_generators(generators)
            for (module, name), buffer in buffers.items():
                setattr(module, name, buffer)


def without_caches(arguments: dict[Any, Any], *, is_repeated: bool) -> dict[Any, Any]:
    """Return the ``arguments`` of a Hugging Face block, with an empty cache of keys and values replaced by None.

    Training does not use a cache, and a second forward pass would append to it again.

    Raises:
        RoomierError: a cache is not empty, and ``is_repeated`` is True.
    """
    for name, cache in [(name, value) for name, value in arguments.items() if is_cache(value)]:
        if cache.get_seq_length() == 0:
            arguments = {**arguments, name: None}
            if not _PRINTED:
                _PRINTED.append("no cache")
                notice("use_cache=True has no effect in training, because compiled and recomputed blocks fill no cache")
        elif is_repeated:
            action = "Remove past_key_values in training, or use activation_checkpointing='none'"
            problem = "contains keys and values, so a recomputed block would append its keys and values twice"
            raise RoomierError("past_key_values", type(cache).__name__, problem, action)
    return arguments


def _host_generators() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state(legacy=False)


def _set_host_generators(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
