"""Differences between two Plans."""

from collections.abc import Mapping
from dataclasses import dataclass

UNSET = "(unset)"


@dataclass(frozen=True)
class Difference:
    """A field whose value differs between two Plans.

    Attributes:
        field: section and name, such as ``"precision.mode"`` or ``"optimizer.options.betas"``.
        before: value in the first Plan; ``"(unset)"`` for an option that exists only in the second Plan.
        after: value in the second Plan; ``"(unset)"`` for an option that exists only in the first Plan.
    """

    field: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"{self.field}: {_show(self.before)} -> {_show(self.after)}"


def differences(before: Mapping[str, object], after: Mapping[str, object], path: str = "") -> list[Difference]:
    """Return the fields that differ between two nested mappings, in the order of ``before``."""
    found: list[Difference] = []
    for name in [*before, *(name for name in after if name not in before)]:
        field = f"{path}{name}"
        left, right = before.get(name, UNSET), after.get(name, UNSET)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found += differences(left, right, f"{field}.")
        elif left != right:
            found.append(Difference(field, left, right))
    return found


def _show(value: object) -> str:
    return UNSET if value == UNSET else repr(value)
