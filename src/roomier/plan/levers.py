"""Levers as data. A lever is a memory technique that one keyword of the Trainer enables.

The planner, the printed plan and the messages read the rows of :data:`LEVERS` and contain no code for individual
levers. ``CONTRIBUTING.md`` describes how to add a lever.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roomier.core.errors import PlanError
from roomier.plan.choices import Choice, Kind, choice_of
from roomier.plan.parts import PARTS, AnyPlan, PlanParts


@dataclass(frozen=True)
class Lever:
    """A memory technique that one keyword of the Trainer enables.

    Attributes:
        keyword: argument of the Trainer. The strategy ``"auto"`` uses a lever that is not exact only if its keyword is
            allowed, as in ``{"name": "auto", "allow": [keyword]}``.
        field: field of the Plan, as ``"section.name"``. The default value of the field disables the lever.
        on: value of the field if the keyword is True.
        words: name of the lever in descriptions of a plan.
        row: text in the first column of the printed plan.
        text: function that returns the second column of the printed plan.
        number: field that is set if the value of the keyword is a number; empty if the keyword accepts no number.
        conflict: function that returns the reason why ``strategy="auto"`` does not add the lever to a plan. The reason
            is empty if the lever can be added.
        changes_output_layer: whether the lever replaces the output layer of a language model. If so, the model must
            have an output layer.
        frees_gradients: whether backward uses and frees the gradients, so no gradients exist after backward.
    """

    keyword: str
    field: str
    on: Any
    words: str
    row: str
    text: Callable[[PlanParts], str]
    number: str = ""
    conflict: Callable[[PlanParts], str] = lambda plan: ""
    changes_output_layer: bool = False
    frees_gradients: bool = False

    @property
    def off(self) -> Any:
        """Value of the field that disables the lever."""
        return _default(self.field)

    @property
    def must_be_allowed(self) -> bool:
        """True if the lever is not exact, so ``strategy="auto"`` may use it only if its keyword is allowed."""
        return self.choice(self.on).kind is not Kind.EXACT

    def choice(self, value: Any) -> Choice:
        """Return the label and the remark of the choice ``value``."""
        return choice_of(self.field, value)

    def value(self, plan: PlanParts) -> Any:
        """Return the value of the field in ``plan``."""
        return read(plan, self.field)

    def is_used(self, plan: PlanParts) -> bool:
        """Return True if ``plan`` uses the lever."""
        return bool(self.value(plan) != self.off)

    def as_keyword(self, plan: PlanParts) -> Any:
        """Return the keyword's value for the settings in ``plan``. The plan must use the lever."""
        number = read(plan, self.number) if self.number else None
        if number is not None:
            return number
        value = self.value(plan)
        return True if value == self.on else value


def _chunks(plan: PlanParts) -> str:
    size = plan.loss.chunk_tokens
    return "chunks of 64 MiB of logits" if size is None else f"chunks of {size} tokens"


LEVERS = (
    Lever(
        keyword="chunked_loss",
        field="loss.chunked",
        on=True,
        words="chunked loss",
        row="loss",
        text=_chunks,
        number="loss.chunk_tokens",
        conflict=lambda plan: (
            "'auto' does not add a chunked loss to compile=True. Set chunked_loss=True to use both"
            if plan.compile.enabled
            else ""
        ),
        changes_output_layer=True,
    ),
    Lever(
        keyword="step_in_backward",
        field="optimizer.step_in_backward",
        on="exact",
        words="step in backward",
        row="update",
        text=lambda plan: f"in backward, {plan.optimizer.step_in_backward}",
        conflict=lambda plan: "16-mixed scales the loss" if plan.precision.mode == "16-mixed" else "",
        frees_gradients=True,
    ),
)
"""Levers in the order in which the printed plan lists them."""

BY_PERMISSION = tuple(lever.keyword for lever in LEVERS if lever.must_be_allowed)
"""Keywords of the levers that ``strategy="auto"`` uses only if the request allows them."""


def used_levers(plan: PlanParts) -> list[Lever]:
    """Return the levers that ``plan`` uses."""
    return [lever for lever in LEVERS if lever.is_used(plan)]


def lever_that_frees_gradients(plan: PlanParts) -> Lever | None:
    """Return the lever of ``plan`` that frees the gradients in backward; None if gradients exist after backward."""
    return next((lever for lever in used_levers(plan) if lever.frees_gradients), None)


def without(plan: AnyPlan, levers: Sequence[Lever] = LEVERS) -> AnyPlan:
    """Return ``plan`` with ``levers`` turned off."""
    for lever in levers:
        fields = [lever.field, lever.number] if lever.number else [lever.field]
        section = lever.field.partition(".")[0]
        defaults = {field.partition(".")[2]: _default(field) for field in fields}
        plan = replace(plan, **{section: replace(getattr(plan, section), **defaults)})
    return plan


def read(plan: PlanParts, field: str) -> Any:
    """Return the value of ``field``, such as ``"loss.chunked"``, in ``plan``."""
    section, _, name = field.partition(".")
    return getattr(getattr(plan, section), name)


def _default(field: str) -> Any:
    section, _, name = field.partition(".")
    return getattr(PARTS[section](), name)


def set_fields(plan: PlanParts, fields: str, problem: str, action: str) -> Iterator[PlanError]:
    """Yield an error for each of ``fields``, separated by spaces, whose value in ``plan`` differs from its default."""
    for field in fields.split():
        value = read(plan, field)
        if value != _default(field):
            yield PlanError(field, value, problem, action)
