"""Call functions on all ranks. An error on one rank is raised on all ranks, with the number of the failed rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from roomier.core.errors import CheckpointError, CombinedError, RoomierError, Shown, shorten
from roomier.core.ranks import Ranks
from roomier.core.world import World

T = TypeVar("T")


def all_ranks() -> Ranks:
    """Return the ranks of the default process group, or a single rank if no process group is initialized."""
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks()
    return Ranks(World(rank=dist.get_rank(), size=dist.get_world_size()))


def together(ranks: Ranks, function: Callable[[], T]) -> list[T]:
    """Call ``function`` on every rank and return the results of all ranks, ordered by rank.

    Raises:
        RoomierError: ``function`` failed on at least one rank. Every rank raises the error of the first rank that
            failed, including the number of this rank. If there is only one rank, this rank raises the original
            exception.
    """
    if ranks.is_alone:
        return [function()]
    value: T | None = None
    own: BaseException | None = None
    try:
        value = function()
    except BaseException as error:
        own = error
    outcomes = ranks.gather((value, None if own is None else _failure(own)))
    failures = [(rank, failure) for rank, (_, failure) in enumerate(outcomes) if failure is not None]
    if not failures:
        return [each for each, _ in outcomes]  # type: ignore[misc]
    if own is not None and not isinstance(own, Exception):
        raise own
    rank, first = failures[0]
    is_everywhere = len(failures) == ranks.world.size and all(str(other) == str(first) for _, other in failures)
    where = "" if is_everywhere else f" (on rank {rank})"
    raise type(first)(first.field, first.received, first.problem + where, first.action) from own


def _failure(error: BaseException) -> RoomierError:
    # The received object is sent as text, because it may exist only in the process of the failed rank.
    if isinstance(error, RoomierError) and not isinstance(error, CombinedError):
        return type(error)(error.field, Shown(shorten(error.received)), error.problem, error.action)
    problem = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return CheckpointError("checkpoint", Shown("<failed>"), problem, "See the traceback of the failed rank")
