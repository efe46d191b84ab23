"""What fails on one rank fails on all of them, with one error that says where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from roomier.core.errors import CheckpointError, RoomierError, Shown, shorten
from roomier.core.ranks import Ranks
from roomier.core.world import World

T = TypeVar("T")


@dataclass(frozen=True)
class _Told:
    """An error in a form that travels: what it was about may be an object that only its own process knows."""

    kind: type[RoomierError]
    field: str
    received: str
    problem: str
    action: str


def all_ranks() -> Ranks:
    """The ranks of the process group that this process is in; alone where there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks()
    return Ranks(World(rank=dist.get_rank(), size=dist.get_world_size()))


def together(ranks: Ranks, function: Callable[[], T]) -> list[T]:
    """What ``function()`` returned on each rank, by rank, once it is done on all of them.

    Raises:
        RoomierError: it failed on some rank: the error of the first such one, with its number, on every rank. Alone,
            what it raised.
    """
    if ranks.is_alone:
        return [function()]
    value: T | None = None
    own: BaseException | None = None
    try:
        value = function()
    except BaseException as error:
        own = error
    outcomes = ranks.gather((value, None if own is None else _told(own)))
    failures = [(rank, told) for rank, (_, told) in enumerate(outcomes) if told is not None]
    if not failures:
        return [each for each, _ in outcomes]  # type: ignore[misc]
    if own is not None and not isinstance(own, Exception):
        raise own
    rank, told = failures[0]
    is_everywhere = len(failures) == ranks.world.size and all(other == told for _, other in failures)
    where = "" if is_everywhere else f" (on rank {rank})"
    raise told.kind(told.field, Shown(told.received), told.problem + where, told.action) from own


def _told(error: BaseException) -> _Told:
    if isinstance(error, RoomierError):
        return _Told(type(error), error.field, shorten(error.received), error.problem, error.action)
    problem = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return _Told(CheckpointError, "checkpoint", "<failed>", problem, "See the traceback of that rank")
