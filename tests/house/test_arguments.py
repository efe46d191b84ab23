"""Each argument of the Trainer is described in full in one place, and each description belongs to an existing
argument."""

import inspect
import re
from dataclasses import fields

import pytest

from roomier.plan import plan_from_flags
from roomier.plan.levers import LEVERS
from roomier.plan.parts import FIELDS, PARTS, Part
from roomier.run.options import LoopOptions
from roomier.trainer import Trainer

ARGUMENTS = inspect.signature(Trainer).parameters
FLAGS = inspect.signature(plan_from_flags).parameters
CLASSES = {part.__name__ for part in PARTS.values()}


def described(docstring: str | None, section: str) -> dict[str, str]:
    """Return the descriptions in ``section`` of a docstring, by name."""
    text = inspect.cleandoc(docstring or "").partition(f"\n{section}:\n")[2]
    text = re.split(r"\n(?=\S)", text)[0]
    entries = re.split(r"(?:^|\n) {4}(?=\w[\w, ]*: )", text)[1:]
    named = (entry.partition(": ") for entry in entries)
    return {name: " ".join(words.split()) for names, _, words in named for name in names.split(", ")}


def test_the_search_finds_names_and_texts() -> None:
    found = described(
        "A class.\n\nArgs:\n    a: one\n        line.\n    b, c: two: three.\n\nRaises:\n    d: e", "Args"
    )
    assert found == {"a": "one line.", "b": "two: three.", "c": "two: three."}


def test_the_trainer_describes_its_arguments_in_their_order() -> None:
    found = described(Trainer.__doc__, "Args")
    assert list(found) == list(ARGUMENTS)
    assert all(text.endswith(".") for text in found.values())


def test_arguments_of_the_plan_refer_to_the_class_that_describes_their_values() -> None:
    for name, text in described(Trainer.__doc__, "Args").items():
        named = {word for word in re.findall(r"``(\w+)``", text) if word.endswith("Plan")}
        assert named <= CLASSES
        assert bool(named) == (name in FLAGS), name


@pytest.mark.parametrize("part", PARTS.values())
def test_parts_of_the_plan_describe_their_fields(part: type[Part]) -> None:
    names, fields = list(described(part.__doc__, "Attributes")), list(FIELDS[part.SECTION])
    assert names == fields, f"describe each field of {part.__name__} in the order of the class"


def test_no_other_docstring_describes_the_arguments() -> None:
    assert "Args:" not in inspect.getdoc(plan_from_flags)  # type: ignore[operator]
    assert "Trainer" in inspect.getdoc(plan_from_flags)  # type: ignore[operator]
    assert not described(LoopOptions.__doc__, "Args")


def test_defaults_are_the_same_where_an_argument_appears_again() -> None:
    differ = {name for name, flag in FLAGS.items() if flag.default != ARGUMENTS[name].default}
    assert differ == {
        "num_nodes",
        "gradient_clip_algorithm",
    }  # "auto" needs a launcher; None is "norm", as in Lightning
    options = {each.name: each.default for each in fields(LoopOptions)}
    assert {name for name, default in options.items() if default != ARGUMENTS[name].default} == set()


def test_levers_have_an_argument_and_fields() -> None:
    for lever in LEVERS:
        assert lever.keyword in FLAGS
        for field in filter(None, (lever.field, lever.number)):
            section, _, name = field.partition(".")
            assert name in FIELDS[section]
