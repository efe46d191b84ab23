"""What a second forward of a block must find as the first one found it, beside its tensors and torch's generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from roomier.core import torch_private
from roomier.core.errors import RoomierError
from roomier.core.log import notice

_Place = tuple[nn.Module, str]
_COUNTER_OF_NORMS = "num_batches_tracked"
_TOLD: list[str] = []
"""What was said once in this process. Not ``functools.cache``, of which the compiler warns."""


class Buffers:
    """Which buffers of a block its forward changes: running statistics, say.

    It is seen at the first forward. Values are compared: kernels that write statistics do not tell autograd.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._changing: set[_Place] | None = None

    def places(self) -> dict[_Place, Tensor]:
        """Where they are, and what is there."""
        modules = self._block.modules()
        return {(module, name): each for module in modules for name, each in module.named_buffers(recurse=False)}

    def may_change(self, place: _Place) -> bool:
        return self._changing is None or place in self._changing

    def learn(self, before: dict[_Place, Tensor], versions: dict[_Place, int]) -> None:
        """After a forward: what it changed of ``before``, copies of what may change, and ``versions`` of the others.

        Raises:
            RoomierError: it changed one that the first forward did not change.
        """
        now = self.places()
        if self._changing is None:
            changed = {place for place, copy in before.items() if place not in now or not torch.equal(copy, now[place])}
            norms = {(module, name) for module, name in now if hasattr(module, _COUNTER_OF_NORMS)}
            self._changing = changed | norms  # norms may be frozen for a while
        for place, version in versions.items():
            if place not in now or torch_private.version_of(now[place]) != version:
                problem = f"a {type(self._block).__name__} changes this buffer in its forward, but not in its first one"
                action = "Use activation_checkpointing='none': the block could not be computed a second time"
                raise RoomierError("activation_checkpointing", place[1], problem, action)


class Surroundings:
    """What was there before a forward: values of the buffers it changes, and the generators of Python and NumPy."""

    def __init__(self, buffers: Buffers) -> None:
        places = buffers.places()
        self._buffers = buffers
        self._copies = {place: each.clone() for place, each in places.items() if buffers.may_change(place)}
        self._versions = {
            place: torch_private.version_of(each) for place, each in places.items() if place not in self._copies
        }
        self._generators = _host_generators()

    def end_first_forward(self) -> None:
        """See what it changed."""
        if self._copies or self._versions:
            self._buffers.learn(self._copies, self._versions)
        self._versions = {}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """It is there again inside, and after it what was there before."""
        generators = _host_generators()
        buffers = {(module, name): getattr(module, name) for module, name in self._copies}
        _set_host_generators(self._generators)
        for (module, name), copy in self._copies.items():
            setattr(module, name, copy.clone())  # not written over: a backward may have saved what is there
        try:
            yield
        finally:
            _set_host_generators(generators)
            for (module, name), buffer in buffers.items():
                setattr(module, name, buffer)


def without_caches(arguments: dict[Any, Any], *, is_repeated: bool) -> dict[Any, Any]:
    """``arguments`` of a block of Hugging Face's with None for the cache of keys and values: there is none to use in
    training, and a second forward would add to it again.

    Raises:
        RoomierError: there is something in it, and the block ``is_repeated``.
    """
    caches = sys.modules.get("transformers.cache_utils")
    found = {} if caches is None else {k: v for k, v in arguments.items() if isinstance(v, caches.Cache)}
    for name, cache in found.items():
        if cache.get_seq_length() == 0:
            arguments = {**arguments, name: None}
            _say_no_cache()
        elif is_repeated:
            action = "Leave out past_key_values in training, or use activation_checkpointing='none'"
            problem = "holds keys and values, to which a block that is computed again would add its own twice"
            raise RoomierError("past_key_values", type(cache).__name__, problem, action)
    return arguments


def _say_no_cache() -> None:
    if _TOLD:
        return
    _TOLD.append("no cache")
    notice("use_cache=True has no effect in training: blocks that are compiled or computed again fill no cache")


def _host_generators() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state(legacy=False)


def _set_host_generators(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
