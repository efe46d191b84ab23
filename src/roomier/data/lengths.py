"""Check that the ranks have loaders of the same length.

If the ranks read different numbers of batches, some ranks wait forever.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.utils.data.distributed import DistributedSampler

from roomier.core.errors import DataError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.core.world import World
from roomier.data.batch_feeds import length_of
from roomier.data.combined import CombinedLoader
from roomier.data.divided import share_of
from roomier.data.rebuild import parts_of
from roomier.data.share import SAME_LOADER, no_batch_on


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
    divided_by = [_divided_by(each, ranks.world, training) for each in parts.values()]
    of_ranks = ranks.gather(
        [(length_of(each), by is None) for each, by in zip(parts.values(), divided_by, strict=True)]
    )
    check_counts([len(of_rank) for of_rank in of_ranks], name, loader)
    for part, each, by, of_part in zip(parts, parts.values(), divided_by, zip(*of_ranks, strict=True), strict=True):
        lengths, are_whole = zip(*of_part, strict=True)
        if len(set(are_whole)) > 1:
            problem = f"shards itself across ranks, but not on rank {are_whole.index(True)}"
            action = "Create the loader in train_dataloader(), which runs on each rank after the ranks have started"
            raise DataError(part, each, problem, action)
        if 0 in lengths and any(lengths):
            raise no_batch_on([rank for rank, length in enumerate(lengths) if length == 0], part, each)
        if len(set(lengths)) == 1 or math.inf in lengths:
            continue
        problem = f"has {_by_rank(lengths, 'batches')}"
        if training:
            notice(f"{part}: {problem}; each epoch has as many batches as the shortest loader. {SAME_LOADER}")
        elif by is None:
            raise DataError(
                part, each, f"{problem}, but the ranks take turns with the batches of one loader", SAME_LOADER
            )


def _divided_by(loader: Any, world: World, training: bool) -> str | None:
    if not training and any(isinstance(part, DistributedSampler) for part in parts_of(loader)):
        return DistributedSampler.__name__  # an evaluation replaces it, so it can be created for other ranks
    return share_of(loader, world).divided_by


def check_counts(counts: Sequence[int], name: str, loaders: Any) -> None:
    """Check that every rank has the same number of loaders.

    Raises:
        DataError: the numbers differ.
    """
    if len(set(counts)) > 1:
        raise DataError(name, loaders, f"has {_by_rank(counts, 'loaders')}", "Pass the same loaders on every rank")


def _by_rank(numbers: Sequence[float], unit: str) -> str:
    return ", ".join(f"{number} {unit} on rank {rank}" for rank, number in enumerate(numbers))
