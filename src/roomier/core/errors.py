"""Errors of roomier. Each error names the field, the received value, the problem and the next action."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


class RoomierError(ValueError):
    """Invalid input. The text of the error is ``field=received: problem. action``.

    Args:
        field: name of the argument or setting, as the user writes it.
        received: value that was passed. The text of the error contains ``repr(received)``, shortened if it is long.
        problem: violated constraint, which follows ``field=received: `` in the text.
        action: next action of the user, as an imperative sentence.

    Example:
        >>> str(RoomierError("max_steps", -7, "must be at least 1", "Set max_steps=1 or higher"))
        'max_steps=-7: must be at least 1. Set max_steps=1 or higher.'
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
    """Text that replaces the received value of an error if the value, such as a generator, cannot be sent to another
    process.
    """

    text: str

    def __repr__(self) -> str:
        return self.text


class CombinedError(RoomierError):
    """Several errors of one input, which are reported together.

    ``field``, ``received``, ``problem`` and ``action`` are copied from the first error.

    Args:
        errors: the errors, at least two.
        subject: name of the input, such as ``"run.yaml"``.
    """

    def __init__(self, errors: Sequence[RoomierError], subject: str = "The plan") -> None:
        first = errors[0]
        super().__init__(first.field, first.received, first.problem, first.action)
        self.subject = subject
        self.errors = tuple(errors)
        self.args = ("\n".join([f"{subject} has {len(errors)} errors", *map(str, errors)]),)

    def __reduce__(self) -> tuple[type["RoomierError"], tuple[object, ...]]:
        return type(self), (self.errors, self.subject)


def combined(errors: Sequence[RoomierError], subject: str) -> RoomierError:
    """Return the only error in ``errors``, or all errors as a :class:`CombinedError`."""
    return errors[0] if len(errors) == 1 else CombinedError(errors, subject)


class PlanError(RoomierError):
    """Error for a Plan that is invalid or that requests an unsupported combination."""


class NoForecastError(RoomierError):
    """Error for a step that the planner cannot run without values, although the model may be trainable."""


class DataError(RoomierError):
    """Error for data that cannot be read or has an unexpected shape."""


class CheckpointError(RoomierError):
    """Error for a checkpoint that is missing or damaged, or that does not match the model. No state was changed."""


class TierError(RoomierError):
    """Error for a folder or file for offloading that cannot be used, or whose content cannot be read or written."""


class TrainingError(RoomierError):
    """Error for a condition in which training cannot continue, such as a loss that is not finite."""


def check_integer(field: str, value: object, at_least: int, action: str) -> None:
    """Check that ``value`` is an integer of at least ``at_least``.

    Raises:
        RoomierError: ``value`` is a bool, not an integer, or too small.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise RoomierError(field, value, f"must be an integer of at least {at_least}", action)


def shorten(value: object, limit: int = 120) -> str:
    """Return ``repr(value)`` with at most ``limit`` characters. The middle is removed: a path is known by its end."""
    try:
        text = repr(value)
    except Exception:  # for example if the __init__ of the object raised an error
        text = f"<{type(value).__name__}>"
    kept = (limit - 3) // 2
    return text if len(text) <= limit else f"{text[: limit - 3 - kept]}...{text[-kept:]}"


def first_few(names: Sequence[str], limit: int = 5) -> str:
    """Return ``"a, b and 3 more"`` for more than ``limit`` names."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{', '.join(names[:limit])}{more}"


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the element of ``known`` that is most similar to ``name``; None if no element is similar.

    If elements of ``known`` begin with ``name``, return the shortest of them.

    Args:
        cutoff: minimum similarity, from 0 to 1 (``difflib.SequenceMatcher.ratio``).
    """
    names = sorted(known)
    longer = [each for each in names if name and each.startswith(name)]
    near = [min(longer, key=len)] if longer else difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return near[0] if near else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"Did you mean 'x'?"`` for the nearest element of ``known``, or a list of all elements."""
    names = sorted(known)
    near = nearest(str(name), names)
    return f"Use one of: {', '.join(names)}" if near is None else f"Did you mean {near!r}?"
