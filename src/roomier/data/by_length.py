"""Batch sampler that groups samples of similar length, so that batches contain little padding."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Sampler

from roomier.core.device.rng import mix_seed
from roomier.core.errors import DataError

_MIN_BATCHES = 8  # Minimum number of batches in a bucket, so that the samples of a batch differ between epochs.
_NUM_BUCKETS = 4  # Minimum number of buckets for a small dataset. These buckets have fewer than _MIN_BATCHES batches.


class LengthGroupedBatchSampler(Sampler[list[int]]):
    """Batch sampler over the indices ``0 .. len(lengths) - 1`` whose batches contain samples of similar length.

    The samples are sorted by length and split into buckets. In each epoch, the samples of each bucket are shuffled and
    split into batches. Then, groups of ``batches_per_step`` consecutive batches are shuffled. Each sample is in exactly
    one batch of an epoch, and the number of batches is the same in each epoch. The longest sample is in the first
    batch, so the first step requires the most memory.

    The order depends only on the arguments of the sampler and on the epoch, but not on the ranks, so a run can resume
    within an epoch with any number of ranks. Rank ``r`` of ``N`` reads every ``N``-th batch. All ranks read the same
    number of batches and, in each step, batches of similar length. If fewer than ``N`` batches remain at the end of an
    epoch, they are dropped; with shuffling, they contain different samples in each epoch. If the lengths or other
    arguments of the sampler have changed, a resume within an epoch raises an error.

    Args:
        lengths: length of each sample, in tokens.
        batch_size: maximum number of samples in a batch.
        max_tokens: maximum number of tokens in a padded batch, which is the number of samples times the length of the
            longest sample. At least one of ``batch_size`` and ``max_tokens`` is required.
        shuffle: if True, use a new order in each epoch. If False, the batches are in descending order of length.
        seed: seed for the order of the batches.
        batches_per_step: number of consecutive batches of similar length. Pass the number of ranks times
            ``accumulate_grad_batches``, or a multiple of this product.
        spread: maximum relative difference between the lengths in a bucket. Buckets with fewer than 8 batches also
            contain shorter samples.

    Raises:
        DataError: an argument is out of range, or a sample is longer than ``max_tokens``.

    Example:
        >>> sampler = LengthGroupedBatchSampler([len(each["input_ids"]) for each in dataset], max_tokens=8192)
        >>> loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=PackedCollate())
    """

    def __init__(
        self,
        lengths: Sequence[int] | Tensor | NDArray[Any],
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        batches_per_step: int = 8,
        spread: float = 0.1,
    ) -> None:
        self.shuffle = shuffle
        self.seed = seed
        self.batches_per_step = _positive("batches_per_step", batches_per_step)
        if not 0 <= spread < 1:
            raise DataError("spread", spread, "must be in [0, 1)", "Pass a fraction of a length, such as 0.1")
        if batch_size is None and max_tokens is None:
            action = "Pass batch_size, in samples, or max_tokens, in tokens"
            raise DataError("batch_size", None, "is required without max_tokens", action)
        most_samples = None if batch_size is None else _positive("batch_size", batch_size)
        most_tokens = None if max_tokens is None else _positive("max_tokens", max_tokens)
        found = _checked(lengths, most_tokens)
        self._settings = {
            "lengths": zlib.crc32(found.numpy().tobytes()),
            "batch_size": most_samples,
            "max_tokens": most_tokens,
            "spread": float(spread),
        }
        ordered, self._indices = torch.sort(found, descending=True, stable=True)
        self._buckets, self._bounds = _split(ordered, most_samples, most_tokens, spread)
        self._epoch = 0

    @property
    def order_settings(self) -> dict[str, int | float | None]:
        """Settings that determine the order of the batches in an epoch, and a checksum of the lengths.

        Checkpoints contain these settings. A run that resumes within an epoch requires equal settings.
        """
        own = {"shuffle": bool(self.shuffle), "seed": int(self.seed), "batches_per_step": self.batches_per_step}
        return {**self._settings, **own}

    def check_order(self, settings: Mapping[str, int | float | None], name: str) -> None:
        """Check that the batches have the same order as in a saved run.

        Args:
            settings: :attr:`order_settings` of the saved run.
            name: name of the loader, for the error.

        Raises:
            DataError: a setting differs from the saved run.
        """
        for setting, value in self.order_settings.items():
            stored = settings.get(setting, value)
            if stored == value:
                continue
            problem = f"has {setting}={value}, but the epoch to resume has {setting}={stored}"
            action = f"Create the sampler with {setting}={stored}, or start a new run from the weights"
            if setting == "lengths":
                problem = "has different lengths than the epoch to resume"
                action = "Resume with the data of the saved run, or start a new run from its weights"
            raise DataError(name, type(self).__name__, problem, action)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, counted from 0. The Trainer calls this method."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the number of batches in one epoch, for all ranks together."""
        return len(self._bounds) - 1

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(mix_seed(int(self.seed), self._epoch))
        indices = self._indices
        if self.shuffle:
            indices = indices[self._places(generator)]
        for number in self._order(generator):
            yield indices[self._bounds[number] : self._bounds[number + 1]].tolist()

    def _places(self, generator: torch.Generator) -> Tensor:
        """Return indices into the samples sorted by length, shuffled within each bucket.

        The longest sample remains in the first batch.
        """
        buckets = [(1, self._buckets[0][1]), *self._buckets[1:]]
        places = [first + torch.randperm(stop - first, generator=generator) for first, stop in buckets]
        return torch.cat([torch.zeros(1, dtype=torch.int64), *places])

    def _order(self, generator: torch.Generator) -> Iterator[int]:
        """Yield the indices of the batches in the order of this epoch. Index 0 is the batch with the longest
        samples.
        """
        size, num_batches = self.batches_per_step, len(self)
        num_groups = -(-num_batches // size)
        if not self.shuffle or num_groups == 1:
            yield from range(num_batches)
            return
        order = (1 + torch.randperm(num_groups - 1, generator=generator)).tolist()
        num_missing = num_groups * size - num_batches
        small = num_groups
        # The smaller group is chosen at random and comes last, so that all other steps read one full group.
        if num_missing:
            small = order.pop()
            order.append(small)
        for group in (0, *order):
            first = group * size - (num_missing if group > small else 0)
            yield from range(first, first + size - (num_missing if group == small else 0))


def _split(
    ordered: Tensor, most_samples: int | None, most_tokens: int | None, spread: float
) -> tuple[list[tuple[int, int]], list[int]]:
    """Split the samples into buckets and batches.

    Returns:
        The range ``(first, stop)`` of each bucket, and the index of the first sample of each batch, followed by the
        number of samples.
    """
    num_samples, ascending = len(ordered), -ordered
    buckets: list[tuple[int, int]] = []
    bounds: list[int] = []
    first = 0
    while first < num_samples:
        longest = max(int(ordered[first]), 1)
        size = num_samples if most_samples is None else most_samples
        if most_tokens is not None:
            size = min(size, most_tokens // longest)
        similar = int(torch.searchsorted(ascending, -math.ceil(longest * (1 - spread)), right=True))
        fewest = max(1, min(_MIN_BATCHES, num_samples // (size * _NUM_BUCKETS)))
        num_batches = max(-(-(similar - first) // size), fewest)
        stop = min(first + num_batches * size, num_samples)
        buckets.append((first, stop))
        bounds.extend(range(first, stop, size))
        first = stop
    return buckets, [*bounds, num_samples]


def _checked(lengths: Sequence[int] | Tensor | NDArray[Any], most_tokens: int | None) -> Tensor:
    found = _as_tensor(lengths)
    if found.device.type != "cpu":
        raise DataError("lengths", found.device, "must be in host memory", "Pass lengths.cpu()")
    is_whole = not (found.is_floating_point() or found.is_complex() or found.dtype is torch.bool)
    if found.dim() != 1 or not len(found) or not is_whole or int(found.min()) < 0:
        action = "Pass the number of tokens of each sample, such as [len(each['input_ids']) for each in dataset]"
        raise DataError("lengths", lengths, "must contain one integer for each sample", action)
    longest = int(found.argmax())
    if most_tokens is not None and int(found[longest]) > most_tokens:
        problem = f"is less than the {int(found[longest])} tokens of sample {longest}"
        raise DataError("max_tokens", most_tokens, problem, "Truncate or remove this sample, or raise max_tokens")
    return found.to(torch.int64)


def _as_tensor(lengths: Any) -> Tensor:
    """Return ``lengths`` as a tensor, or an empty tensor if ``lengths`` does not contain numbers."""
    try:  # a column of the ``datasets`` package is a sequence that torch does not accept
        if isinstance(lengths, np.ndarray):
            return torch.from_numpy(np.ascontiguousarray(lengths))  # torch accepts no negative strides
        return torch.as_tensor(lengths if isinstance(lengths, Tensor) else list(lengths))
    except (TypeError, ValueError, RuntimeError):
        return torch.empty(0)


def _positive(field: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise DataError(field, value, "must be a positive integer", "Pass an integer, at least 1")
    return value
