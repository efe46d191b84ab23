"""Streams with an exact position: a shuffled stream, and a weighted mixture of streams.

Both yield the same samples on every rank, in an order that depends only on the seed and the epoch, so roomier shards
their batches, and a run can resume on any number of ranks.

[Note: blocks of a shuffled stream]
A shuffle buffer usually replaces a random sample by the next sample of the stream. A sample can then remain in the
buffer for the rest of the epoch, so a position would have to contain all samples of the buffer. :class:`ShuffleBuffer`
reads a block of samples, yields them in a random order, and only then reads the next block. A position therefore
consists of the position of the stream at the start of the block and a number, and a resumed run reads at most one block
again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from roomier.core.device.rng import mix_seed
from roomier.core.errors import DataError
from roomier.data.choose import has_shuffle_buffer, speaks_state
from roomier.data.rebuild import set_loader_epoch


class _Reader:
    """A stream that is read, with its position.

    Args:
        stream: stream that is read.
        position: position at which it is read; None for the start.

    Attributes:
        samples: the samples after the position.
    """

    def __init__(self, stream: Iterable[Any], position: dict[str, Any] | None = None) -> None:
        self.stream = stream
        self.samples = self._opened()
        self._restores = speaks_state(stream) and not has_shuffle_buffer(stream)
        self._position = position or {"num_read": 0, "stream": None}
        self._num_read: int = self._position["num_read"]

    def _opened(self) -> Iterator[Any]:
        stream: Any = self.stream
        num_skipped = self._position["num_read"]
        if self._position["stream"] is not None:
            stream.load_state_dict(self._position["stream"])
            num_skipped = 0
        for sample in islice(stream, num_skipped, None):
            self._num_read += 1
            yield sample

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        if self._num_read == self._position["num_read"]:  # the stream itself may be at the end of its last epoch
            return self._position
        stream: Any = self.stream
        return {"num_read": self._num_read, "stream": stream.state_dict() if self._restores else None}


class _Stream(IterableDataset[Any], ABC):
    """Stream whose order depends on its settings and the epoch. It starts again in each iteration, except in the first
    one after a position was loaded."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._epoch = 0
        self._is_resumed = False

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """Return the arguments on which the order depends."""

    @abstractmethod
    def _start(self) -> None:
        """Return to the start of the epoch."""

    @abstractmethod
    def _samples(self) -> Iterator[Any]:
        """Yield the samples after the position."""

    def __iter__(self) -> Iterator[Any]:
        if not self._is_resumed:
            self._start()
        self._is_resumed = False
        return self._samples()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, on which the order depends. A Trainer calls this method."""
        self._epoch = epoch

    def _check(self, state: Mapping[str, Any]) -> None:
        for name, value in self._settings().items():
            if state[name] != value:
                problem = f"was {state[name]!r} in the saved run, so its samples were in a different order"
                raise DataError(name, value, problem, f"Pass {name}={state[name]!r}, or start a new run")


class ShuffleBuffer(_Stream):
    """Stream that yields the samples of ``stream`` in a random order, a block of ``size`` samples at a time. See
    [Note: blocks of a shuffled stream].

    A run resumes at the exact sample. It reads at most one block again if ``stream`` has ``state_dict`` and
    ``load_state_dict``, otherwise all earlier samples of the epoch.

    Args:
        stream: stream with the same order on each rank. Streams of the datasets package keep their shards shuffled by
            ``set_epoch``.
        size: number of samples in memory.
        seed: seed of the order, together with the epoch.

    Raises:
        DataError: ``size`` is not positive, or a loaded position has another ``size`` or ``seed``.

    Example:
        >>> loader = DataLoader(ShuffleBuffer(stream, size=10_000), batch_size=8)
    """

    def __init__(self, stream: Iterable[Any], size: int, seed: int = 0) -> None:
        super().__init__(seed)
        if size < 1:
            raise DataError("size", size, "must be at least 1", "Pass the number of samples that fit in memory")
        self.stream, self.size = stream, size
        self._start()

    def _start(self) -> None:
        self._reader = _Reader(self.stream)
        self._at_block = self._reader.state_dict()
        self._block, self._num_yielded = 0, 0

    def _samples(self) -> Iterator[Any]:
        set_loader_epoch(self.stream, self._epoch)
        while samples := list(islice(self._reader.samples, self.size)):
            generator = torch.Generator().manual_seed(mix_seed(self.seed, self._epoch, self._block))
            order = torch.randperm(len(samples), generator=generator)
            for place in order[self._num_yielded :].tolist():
                self._num_yielded += 1
                yield samples[place]
            self._at_block = self._reader.state_dict()
            self._block, self._num_yielded = self._block + 1, 0

    def _settings(self) -> dict[str, Any]:
        return {"size": self.size, "seed": self.seed}

    def state_dict(self) -> dict[str, Any]:
        """Return the position: nested dicts of numbers, and the state of ``stream``."""
        position = {"epoch": self._epoch, "block": self._block, "num_yielded": self._num_yielded}
        return {**self._settings(), **position, "reader": self._at_block}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position of :meth:`state_dict` in the next iteration."""
        self._check(state)
        self._epoch, self._block, self._num_yielded = state["epoch"], state["block"], state["num_yielded"]
        self._reader = _Reader(self.stream, state["reader"])
        self._at_block = self._reader.state_dict()
        self._is_resumed = True


class Mixture(_Stream):
    """Stream that takes each sample from one of several streams, which is chosen at random with ``weights``.

    The choice for a sample depends only on the seed, the epoch and the index of the sample, so it does not change if a
    run resumes. The mixture ends when the chosen stream has no sample left.

    Args:
        streams: streams with the same order on each rank.
        weights: relative frequency of each stream.
        seed: seed of the choices, together with the epoch.

    Raises:
        DataError: the weights are not positive, or do not match the streams, or a loaded position has other settings.

    Example:
        >>> Mixture([web, code], weights=[0.9, 0.1])
    """

    def __init__(self, streams: Sequence[Iterable[Any]], weights: Sequence[float], seed: int = 0) -> None:
        super().__init__(seed)
        if len(weights) != len(streams) or not all(each > 0 for each in weights):
            action = f"Pass {len(streams)} positive numbers"
            raise DataError("weights", weights, "must contain a positive number for each stream", action)
        self.streams, self.weights = list(streams), list(weights)
        self._bounds = [each / sum(weights) for each in accumulate(weights)]
        self._start()

    def _start(self) -> None:
        self._readers = [_Reader(each) for each in self.streams]
        self._num_yielded = 0

    def _samples(self) -> Iterator[Any]:
        for stream in self.streams:
            set_loader_epoch(stream, self._epoch)
        while True:
            drawn = mix_seed(self.seed, self._epoch, self._num_yielded) / 2**63
            chosen = min(bisect_right(self._bounds, drawn), len(self.streams) - 1)
            for sample in islice(self._readers[chosen].samples, 1):
                self._num_yielded += 1
                yield sample
                break
            else:
                return

    def _settings(self) -> dict[str, Any]:
        return {"weights": self.weights, "seed": self.seed}

    def state_dict(self) -> dict[str, Any]:
        """Return the position: nested dicts of numbers, and the states of the streams."""
        position = {"epoch": self._epoch, "num_yielded": self._num_yielded}
        return {**self._settings(), **position, "readers": [each.state_dict() for each in self._readers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position of :meth:`state_dict` in the next iteration."""
        self._check(state)
        self._epoch, self._num_yielded = state["epoch"], state["num_yielded"]
        self._readers = [_Reader(*each) for each in zip(self.streams, state["readers"], strict=True)]
        self._is_resumed = True
