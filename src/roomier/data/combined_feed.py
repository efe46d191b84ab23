"""Feed that reads several loaders in one training run, and stores a position for each loader.

[Note: passes within an epoch]
In the mode ``max_size_cycle``, an epoch includes several passes over a short loader. If roomier creates the order, each
pass counts as a separate epoch: pass ``c`` of epoch ``e`` is shuffled as epoch ``e + c * 2**32``. Only ``e`` is passed
to ``set_epoch`` of a loader.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from roomier.core.errors import DataError
from roomier.core.ranks import Ranks
from roomier.data.combined import CombinedLoader, JointLoader, begin, num_joined, num_joined_left, read_on
from roomier.data.feeds import PASS, Feed


class CombinedFeed(Feed):
    """Feed for a CombinedLoader. Each of its loaders has a separate feed.

    Args:
        loader: CombinedLoader that the user passed.
        feeds: feeds of the loaders in ``loader``, in the same order.
    """

    kind = "combined"

    def __init__(self, loader: CombinedLoader, feeds: Sequence[Feed], *, name: str, ranks: Ranks) -> None:
        super().__init__(name)
        self._loader = loader
        self._feeds = feeds
        self._ranks = ranks
        self._limits: Sequence[float] = [math.inf] * len(feeds)
        self._parts: list[JointLoader] = []
        self._ended_before = [True] * len(feeds)  # True for each loader whose last pass was complete
        self.may_end_apart = any(feed.may_end_apart for feed in feeds)
        if loader.mode == "sequential":
            for feed in feeds:  # a rank with fewer batches would reach the next loader before the other ranks
                if feed.ends_by_rank:
                    problem = (
                        "can yield different numbers of batches on different ranks, which mode 'sequential' does not "
                        "support"
                    )
                    action = "Set shards_by_rank = False on the dataset, so that roomier shards it, or use another mode"
                    raise DataError(feed.name, loader, problem, action)

    @property
    def loaders(self) -> Sequence[Any]:
        return [loader for feed in self._feeds for loader in feed.loaders]

    def end(self) -> None:
        for feed in self._feeds:
            feed.end()

    @property
    def mode(self) -> str:
        """Mode of the CombinedLoader."""
        return self._loader.mode

    @property
    def part_lengths(self) -> list[int | float]:
        """For each loader, the number of batches in one pass on this rank; ``inf`` if this number is unknown."""
        return [feed.num_batches for feed in self._feeds]

    def limit_parts(self, limits: Sequence[float]) -> None:
        """Set the maximum number of batches of each loader in mode ``"sequential"``."""
        assert self.mode == "sequential"
        self._limits = limits

    @property
    def num_batches(self) -> int | float:
        lengths = [min(length, limit) for length, limit in zip(self.part_lengths, self._limits, strict=True)]
        return num_joined(lengths, self.mode)

    def _made_parts(self, epoch: int) -> list[JointLoader]:
        parts = []
        for feed, limit in zip(self._feeds, self._limits, strict=True):
            part = JointLoader(partial(_start, feed, epoch), feed.num_batches, feed.name)
            part.limit = limit
            parts.append(part)
        self._parts = parts
        return parts

    def start(self, epoch: int) -> Iterator[Any]:
        for number, part in enumerate(self._parts):
            self._ended_before[number] = self._is_complete(number, part)
        parts = self._made_parts(epoch)
        begin(parts, self.mode)
        return read_on(parts, self._loader)

    def resume(self, position: dict[str, Any]) -> tuple[Iterator[Any], int]:
        self.check(position)
        for part, feed, stored in self._put_back(position):
            if stored["is_at_end"]:
                feed.adopt(stored["position"], is_complete=stored["is_complete"])
                part.continue_from(None, None, stored["num_read"])
            else:
                iterator, num_read = feed.resume(stored["position"])
                part.continue_from(iterator, _reading(feed, iterator), num_read)
        if math.isinf(self.num_batches):
            num_done = position["num_batches"] // self._ranks.world.size
        else:  # count backward from the end, because the loop ends an epoch after num_batches batches
            num_done = int(self.num_batches - num_joined_left(self._parts, self.mode))
        return read_on(self._parts, self._loader), num_done

    def adopt(self, position: dict[str, Any], *, is_complete: bool) -> None:
        for part, feed, stored in self._put_back(position):
            feed.adopt(stored["position"], is_complete=stored["is_complete"])
            part.continue_from(None, None, stored["num_read"])

    def _put_back(self, position: dict[str, Any]) -> Iterator[tuple[JointLoader, Feed, dict[str, Any]]]:
        """Yield each part that was started before ``position`` was saved, with its feed and its saved fields. Restore
        the state of the other feeds."""
        rank, num_ranks = self._ranks.world.rank, self._ranks.world.size
        parts = self._made_parts(position["epoch"])
        for number, (part, feed, of_all) in enumerate(zip(parts, self._feeds, position["parts"], strict=True)):
            stored = of_all
            if "by_rank" in of_all:
                by_rank = of_all["by_rank"]
                own = by_rank[rank if len(by_rank) == num_ranks else 0]
                stored = {**own, "position": {**of_all["position"], "num_batches": own["num_batches"]}}
            if stored["cycle"] < 0:
                if stored["position"]:  # empty if an earlier release saved the position of a loader not yet read
                    self._ended_before[number] = stored["is_complete"]
                    feed.adopt(stored["position"], is_complete=stored["is_complete"])
                    feed.continues = position["epoch"] > 0
                continue
            part.cycle, part.came_to_end = stored["cycle"], stored["came_to_end"]
            epoch = position["epoch"] + stored["cycle"] * PASS
            yield part, feed, {**stored, "position": {**stored["position"], "epoch": epoch}}

    def check(self, position: dict[str, Any]) -> None:
        action = "Resume with the loaders of the saved run, or start a new run from its weights"
        names, stored_names = self._loader.part_names, [stored["name"] for stored in position["parts"]]
        if position["mode"] != self.mode or names != stored_names:
            problem = f"differs from the saved run, which used the loaders {stored_names} in mode {position['mode']!r}"
            raise DataError(self.name, self._loader, problem, action)
        for feed, stored in zip(self._feeds, position["parts"], strict=True):
            if feed.kind != stored["kind"]:
                problem = f"is a loader of kind {feed.kind!r}, but the position was saved for kind {stored['kind']!r}"
                raise DataError(feed.name, self._loader, problem, action)
            if stored["cycle"] >= 0 and not stored["is_at_end"]:
                feed.check(stored["position"])

    def position(self, num_batches: int) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "num_batches": num_batches * self._ranks.world.size,
            "parts": [self._position_of(number, part) for number, part in enumerate(self._parts)],
        }

    def _is_complete(self, number: int, part: JointLoader) -> bool:
        if part.cycle < 0:
            return self._ended_before[number]
        return part.num_left == 0 and (part.num_read >= part.length or part.came_to_end)

    def _position_of(self, number: int, part: JointLoader) -> dict[str, Any]:
        feed, name = self._feeds[number], self._loader.part_names[number]
        position = feed.position(part.num_read)
        if part.cycle < 0:  # store the random states of a loader not yet read, but not its counts
            position = {key: value for key, value in position.items() if key not in ("num_batches", "num_samples")}
        own = {
            "cycle": part.cycle,
            "num_read": part.num_read,
            "came_to_end": part.came_to_end,
            "is_at_end": part.cycle >= 0 and part.num_left == 0,
            "is_complete": self._is_complete(number, part),
        }
        whole = {"name": name, "kind": feed.kind, "position": position, **own}
        if feed.ends_by_rank:
            own["num_batches"] = position["num_batches"]
            whole["by_rank"] = self._ranks.gather(own)
        return whole


def _start(feed: Feed, epoch: int, cycle: int) -> tuple[Iterator[Any], Any]:
    iterator = feed.start(epoch + cycle * PASS)
    return iterator, _reading(feed, iterator)


def _reading(feed: Feed, iterator: Iterator[Any]) -> Any:
    return iterator if feed.reading is None else feed.reading
