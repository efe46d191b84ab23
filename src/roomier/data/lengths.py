"""Whether the ranks were given loaders of one length. Ranks that read different numbers of batches wait forever."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from roomier.core.errors import DataError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.data.batch_feeds import length_of
from roomier.data.combined import CombinedLoader
from roomier.data.divided import share_of

_SAME = "Pass the same loader on every rank, or a data set with shards_by_rank = True if each rank has data of its own"


def check_lengths(loader: Any, name: str, ranks: Ranks, *, training: bool) -> None:
    """Compare the lengths of ``loader`` on all ranks, which must all call it. A loader without a length is not checked.

    In training, each epoch has as many batches as the shortest loader, and a notice says so. In an evaluation, ranks
    take turns with the batches of one loader, so lengths that differ are an error, unless the loader divides itself.

    Raises:
        DataError: on every rank, with the numbers of the ranks.
    """
    if ranks.is_alone:
        return
    parts = {name: loader}
    if isinstance(loader, CombinedLoader):
        parts = {f"{name}{part}": each for part, each in zip(loader.part_names, loader.flattened, strict=True)}
    of_ranks = ranks.gather([length_of(each) for each in parts.values()])
    check_counts([len(lengths) for lengths in of_ranks], name, loader)
    for (part, each), lengths in zip(parts.items(), zip(*of_ranks, strict=True), strict=True):
        if 0 in lengths and any(lengths):
            raise no_batch_on([rank for rank, length in enumerate(lengths) if length == 0], part, each)
        if len(set(lengths)) == 1 or math.inf in lengths:
            continue
        problem = f"has {_by_rank(lengths, 'batches')}"
        if training:
            notice(f"{part}: {problem}; each epoch has as many batches as the shortest loader. {_SAME}")
        elif share_of(each, ranks.world).divided_by is None:
            raise DataError(part, each, f"{problem}, and the ranks take turns with the batches of one loader", _SAME)


def check_counts(counts: Sequence[int], name: str, loaders: Any) -> None:
    """Compare how many loaders each rank has.

    Raises:
        DataError: the numbers differ.
    """
    if len(set(counts)) > 1:
        raise DataError(name, loaders, f"holds {_by_rank(counts, 'loaders')}", "Pass the same loaders on every rank")


def no_batch_on(ranks: Sequence[int], name: str, loader: Any) -> DataError:
    """The error for a loader that is empty on some of the ranks."""
    on_ranks = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return DataError(name, loader, f"gives no batch on {on_ranks}, and all ranks train and evaluate together", _SAME)


def _by_rank(numbers: Sequence[float], unit: str) -> str:
    return ", ".join(f"{number} {unit} on rank {rank}" for rank, number in enumerate(numbers))
