"""The one shape of an error: which field, what was received, what is wrong, what to do next."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


class RoomierError(ValueError):
    """A wrong input. Its text reads ``field=received: problem. action``.

    Args:
        field: the name the user typed, or would type, to set the value.
        received: the value as it arrived; shown shortened.
        problem: what is wrong with it.
        action: what to do next, as an imperative sentence.
    """

    def __init__(self, field: str, received: object, problem: str, action: str) -> None:
        self.field = field
        self.received = received
        self.problem = problem
        self.action = action
        end = "" if action.endswith("?") else "."
        super().__init__(f"{field}={shorten(received)}: {problem.rstrip('.')}. {action.rstrip('.')}{end}")

    def __reduce__(self) -> tuple[type["RoomierError"], tuple[object, ...]]:
        is_data = self.received is None or isinstance(self.received, _TRAVELS)
        received = self.received if is_data else Shown(shorten(self.received))
        return type(self), (self.field, received, self.problem, self.action)


_TRAVELS = (str, int, float, Path, list, tuple, dict)


@dataclass(frozen=True, repr=False)
class Shown:
    """Text in place of a received object, for another process: a generator cannot be sent, and a dataset should not."""

    text: str

    def __repr__(self) -> str:
        return self.text


class PlanError(RoomierError):
    """A Plan that cannot work, or asks for what is not built yet."""


class DataError(RoomierError):
    """Data that cannot be read, or whose shape does not fit what was asked."""


class CheckpointError(RoomierError):
    """A checkpoint that is missing, damaged, or belongs to something else. Nothing was changed."""


class TrainingError(RoomierError):
    """Training met a value it must not go on with (a loss that is not finite, say)."""


def shorten(value: object, limit: int = 120) -> str:
    """``repr(value)`` in at most ``limit`` characters."""
    try:
        text = repr(value)
    except Exception:  # of an object that is not whole, say; what is told of it matters more
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of ``known`` that ``name`` was most likely meant to be: the shortest that begins with it, else the most
    alike; None where none is alike.

    Args:
        cutoff: how alike at least, from 0 to 1 (``difflib.SequenceMatcher.ratio``).
    """
    names = sorted(known)
    longer = [each for each in names if name and each.startswith(name)]
    near = [min(longer, key=len)] if longer else difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return near[0] if near else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``"Did you mean 'x'?"`` for the nearest of ``known``, else the list of all of them."""
    names = sorted(known)
    near = nearest(str(name), names)
    return f"Use one of: {', '.join(names)}" if near is None else f"Did you mean {near!r}?"
