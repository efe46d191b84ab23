"""Check that the ranks have loaders of the same length.

If the ranks read different numbers of batches, some ranks wait forever.
"""

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

_SAME = "Pass the same loader on every rank, or a dataset with shards_by_rank = True if each rank has its own data"


def check_lengths(loader: Any, name: str, ranks: Ranks, *, training: bool) -> None:
    """Compare the lengths of ``loader`` on all ranks. A loader without a length is not checked.

    Every rank must call this function. In training, each epoch has as many batches as the shortest loader, and roomier
    prints a notice if the lengths differ. During an evaluation, the ranks take turns with the batches of one loader.
    Different lengths are therefore an error in an evaluation, unless the loader shards itself.

    Args:
        loader: loader of this rank.
        name: name of the argument that the user passed, for errors and notices.
        ranks: ranks whose loaders are compared.
        training: True for a training loader; False for an evaluation loader.

    Raises:
        DataError: the lengths differ in an evaluation, or a loader is empty on some ranks only. The error is raised on
            every rank and contains the lengths on all ranks.
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
            raise DataError(part, each, f"{problem}, but the ranks take turns with the batches of one loader", _SAME)


def check_counts(counts: Sequence[int], name: str, loaders: Any) -> None:
    """Check that every rank has the same number of loaders.

    Raises:
        DataError: the numbers differ.
    """
    if len(set(counts)) > 1:
        raise DataError(name, loaders, f"has {_by_rank(counts, 'loaders')}", "Pass the same loaders on every rank")


def no_batch_on(ranks: Sequence[int], name: str, loader: Any) -> DataError:
    """Return the error for a loader that is empty on ``ranks`` but not on all ranks."""
    on_ranks = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return DataError(name, loader, f"yields no batches on {on_ranks}, but every rank requires a batch", _SAME)


def _by_rank(numbers: Sequence[float], unit: str) -> str:
    return ", ".join(f"{number} {unit} on rank {rank}" for rank, number in enumerate(numbers))
