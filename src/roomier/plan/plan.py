"""The Plan: one frozen value with all settings that affect the computation of a run."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from roomier.core.errors import PlanError
from roomier.plan import rules, text
from roomier.plan.parts import PARTS, PlanParts
from roomier.plan.table import rich_table, table

if TYPE_CHECKING:
    from rich.table import Table


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


@dataclass(frozen=True)
class Plan(PlanParts):
    """All settings that affect the computation of a run, as one frozen value. :class:`PlanParts` lists its parts.

    A Plan is validated when it is created, and is compared and hashed by value. ``Plan()`` describes training in
    float32 on one device without any memory technique. ``dataclasses.replace`` creates a modified copy of a Plan and
    validates it.

    Example:
        >>> plan = Plan(parallel=ParallelPlan("zero2", devices=4), precision=PrecisionPlan("bf16-mixed"))
        >>> print(plan)  # the table that fit prints
        >>> assert Plan.from_yaml(plan.to_yaml()) == plan

    Raises:
        PlanError: a field has an invalid type or value, a feature is not implemented, or fields are incompatible.
            Several errors are raised together as a ``CombinedPlanError``.
    """

    def __post_init__(self) -> None:
        rules.check(self)

    @classmethod
    def of(cls, value: "Plan | Mapping[str, object] | str | PathLike[str]") -> "Plan":
        """Return a Plan from a Plan (unchanged), from nested values, or from the path of a YAML or JSON file.

        Raises:
            PlanError: the value has an unsupported type, the file cannot be read, or the Plan is invalid.
        """
        if isinstance(value, Plan):
            return value
        if isinstance(value, (str, PathLike)):
            return cls._from_file(Path(value))
        return cls.from_dict(value)

    @classmethod
    def _from_file(cls, path: Path) -> "Plan":
        values = text.read_file(path)
        try:
            return cls.from_dict(values)
        except PlanError as error:
            where = f"(in {path})"
            found = [PlanError(e.field, e.received, f"{e.problem} {where}", e.action) for e in rules.each_error(error)]
            raise rules.one_of(found) from error

    @classmethod
    def from_dict(cls, values: object) -> "Plan":
        """Return a Plan from nested values such as ``{"precision": {"mode": "bf16-mixed"}}``.

        Missing keys get their default values.

        Raises:
            PlanError: a key is unknown, or the Plan is invalid.
        """
        parts = text.parts_from_dict(values)
        return cls(**parts)  # type: ignore[arg-type]  # PARTS maps each section to its type

    @classmethod
    def from_yaml(cls, source: str) -> "Plan":
        """Return a Plan from YAML text. :meth:`of` reads a file.

        Raises:
            PlanError: the text is not YAML, a key is unknown, or the Plan is invalid.
        """
        return cls.from_dict(text.load_yaml(source))

    @classmethod
    def from_json(cls, source: str) -> "Plan":
        """Return a Plan from JSON text. :meth:`of` reads a file.

        Raises:
            PlanError: the text is not JSON, a key is unknown, or the Plan is invalid.
        """
        return cls.from_dict(text.load_json(source))

    def to_dict(self) -> dict[str, dict[str, object]]:
        """Return all fields as nested plain values, in the form that YAML, JSON and checkpoints contain."""
        return {section: text.part_to_dict(getattr(self, section)) for section in PARTS}

    def to_yaml(self) -> str:
        """Return the Plan as YAML text, which :meth:`from_yaml` converts to an equal Plan."""
        return text.dump_yaml(self.to_dict())

    def to_json(self) -> str:
        """Return the Plan as JSON text, which :meth:`from_json` converts to an equal Plan."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def diff(self, other: "Plan") -> list[Difference]:
        """Return the fields whose values differ between ``other`` and this Plan, in the order of the Plan.

        Raises:
            PlanError: ``other`` is not a Plan.
        """
        if not isinstance(other, Plan):
            raise PlanError("other", other, "must be a Plan", "Convert it with Plan.of")
        return differences(self.to_dict(), other.to_dict())

    def table(self, facts: Mapping[str, str] | None = None) -> str:
        """Return the table that ``fit`` prints at its start, at most 100 columns wide.

        Args:
            facts: additional lines, which have no label, such as ``{"model": "10.8 M parameters"}``.
        """
        return table(self, facts)

    def __str__(self) -> str:
        return self.table()

    def __rich__(self) -> "Table":
        return rich_table(self)
