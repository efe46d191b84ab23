"""A row of the tables in this folder: arguments of another library, and the answer of roomier."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

import roomier
from roomier.core.errors import RoomierError

QUIET = {"logger": False, "enable_checkpointing": False}


@dataclass(frozen=True)
class Spelling:
    """Arguments and their answer.

    Attributes:
        keywords: arguments of the Trainer. A value that is a function without arguments creates an object.
        plan: resulting fields of the Plan. All other fields must have their defaults. Empty for the default Plan.
        ignored: names of the settings that are reported to have no effect. All other settings must have an effect.
        remarks: fragments of other notices.
        error: fragment of the error message. Empty if the arguments are accepted.
        options: resulting settings of the loops, such as ``hang_timeout_s``.
    """

    keywords: Mapping[str, Any]
    plan: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    error: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return ",".join(f"{name}={_name(value)}" for name, value in self.keywords.items())[:70]


def _name(value: Any) -> str:
    return getattr(value, "label", None) or str(value)


@dataclass(frozen=True)
class Made:
    """A function that creates an argument, because objects are created when the test runs."""

    label: str
    make: Any

    def __call__(self) -> Any:
        return self.make()


def check(row: Spelling, capsys: pytest.CaptureFixture[str]) -> None:
    """Create a Trainer with the arguments of ``row``, and compare the result with the row."""
    keywords = {name: value() if isinstance(value, Made) else value for name, value in row.keywords.items()}
    capsys.readouterr()
    if row.error:
        with pytest.raises(RoomierError) as caught:
            roomier.Trainer(**{**QUIET, **keywords})
        assert row.error in str(caught.value)
        return
    trainer = roomier.Trainer(**{**QUIET, **keywords})
    printed = capsys.readouterr().err
    assert changed_fields(trainer.plan) == row.plan
    assert tuple(re.findall(r"([\w.]+)=[^\n]*?: no effect: ", printed)) == row.ignored
    for remark in row.remarks:
        assert remark in printed
    for name, value in row.options.items():
        assert getattr(trainer.options, name) == value


def changed_fields(plan: roomier.Plan) -> dict[str, Any]:
    """Return the fields of ``plan`` that differ from the default Plan."""
    return {each.field: each.after for each in _default().diff(plan)}


@cache
def _default() -> roomier.Plan:
    return roomier.Plan()
