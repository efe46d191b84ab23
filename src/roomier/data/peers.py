"""Comparison of the batches of peers, which are ranks that compute parts of the same samples.

If their batches differed, the parts would not belong together, and training would be wrong without an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, TypeVar

from roomier.core.errors import DataError
from roomier.core.ranks import Ranks, sendable
from roomier.data.batch_feeds import length_of
from roomier.data.share import checksum
from roomier.data.source import Source

T = TypeVar("T")
_END = object()


def check_peers(ranks: Ranks, batch: Any, source: Source) -> None:
    """Compare ``batch`` on all peers. Every rank must call this function at the same time.

    Args:
        ranks: the ranks of the run.
        batch: batch of this rank, or the error that was raised instead.
        source: source of the batch, for the error.

    Raises:
        DataError: two peers have different batches, or a rank passed an error. The error is raised on every rank.
    """
    is_error = isinstance(batch, DataError)
    sums = ranks.gather(sendable(batch) if is_error else (batch is _END, checksum(batch)))
    for error in sums:
        if isinstance(error, Exception):
            raise batch if is_error else error
    _check_equal(ranks, sums, source.name, source.loader, "yields different batches, or different numbers of batches,")


def check_peer_lengths(ranks: Ranks, loader: Any, name: str) -> None:
    """Compare the number of batches of ``loader`` on all peers. Every rank must call this function at the same time.

    Raises:
        DataError: the numbers differ on two peers. The error is raised on every rank.
    """
    lengths = ranks.gather(length_of(loader))
    _check_equal(ranks, lengths, name, loader, f"has {', '.join(map(str, lengths))} batches by rank, which differ")


def _check_equal(ranks: Ranks, values: Sequence[Any], name: str, loader: Any, differs: str) -> None:
    for rank, own in enumerate(values):
        first = ranks.mesh.representative_of(rank)
        if own != values[first]:
            problem = (
                f"{differs} on ranks {first} and {rank}, but these ranks compute parts of the same samples, so they "
                "must read the same batches"
            )
            action = (
                "Seed the order and the augmentation of the loader equally on all ranks. If the loader shards itself, "
                "use trainer.data_rank and trainer.num_data_ranks instead of the rank and the world size"
            )
            raise DataError(name, loader, problem, action)


def compared(ranks: Ranks, batches: Iterator[T], source: Source, *, each: bool = False) -> Iterator[T]:
    """Yield the elements of ``batches``. When the first one is read, compare it on all peers.

    Args:
        each: True to compare every element and the end, so that peers cannot read different numbers of batches.

    Raises:
        DataError: see :func:`check_peers`.
    """
    batch: Any
    for number in count():
        try:
            batch = next(batches, _END)
        except DataError as error:  # possibly only on the ranks with the same coordinate
            if not each and number:
                raise
            batch = error
        if each or not number:
            check_peers(ranks, batch, source)
        if batch is _END:
            return
        yield batch
