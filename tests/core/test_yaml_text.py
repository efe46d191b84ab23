"""Untrusted YAML cannot make the process copy or print millions of values."""

from pathlib import Path

import pytest
import yaml

from roomier.core import yaml_text
from roomier.core.errors import RoomierError
from roomier.core.yaml_text import BoundedLoader, ExpansionError, check_aliases
from roomier.plan import Plan
from roomier.planner.hardware.spec import machine_of_file

LEVELS = [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 8)}]" for level in range(1, 40)]
BOMB = "\n".join(["a0: &a0 [x, x]", *LEVELS])


def machine(text: str, folder: Path) -> object:
    path = folder / "machine.yaml"
    path.write_text(text)
    return machine_of_file(path)


READERS = {"a plan": lambda text, folder: Plan.from_yaml(f"optimizer: {{options: {{{text}}}}}"), "a machine": machine}


@pytest.mark.parametrize("reader", READERS)
def test_aliases_that_expand_too_far_are_rejected(reader: str, tmp_path: Path) -> None:
    text = BOMB.replace("\n", ", ") if reader == "a plan" else BOMB
    with pytest.raises(RoomierError, match=r"aliases expand to [0-9]+ values, but at most 100000 are allowed"):
        READERS[reader](text, tmp_path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("&a [*a]", "an alias contains itself"),
        ("{x: &a {y: [*a]}}", "an alias contains itself"),
        ("[" * 5000, "the nesting is too deep"),
        (BOMB + "\nb: {<<: [*a39]}", "its aliases expand"),
    ],
)
def test_recursive_and_deeply_nested_values_are_rejected(text: str, problem: str) -> None:
    with pytest.raises(ExpansionError, match=problem):
        yaml.load(text, Loader=BoundedLoader)


def test_a_large_text_without_aliases_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_text, "MAX_VALUES_OF_ALIASES", 100)
    values = list(range(150))
    assert yaml.load(str(values), Loader=BoundedLoader) == values


def test_a_few_aliases_are_resolved() -> None:
    text = "a: &a {x: 1, y: [2, 3]}\nb: {<<: *a, x: 4}\nc: [*a, *a]"
    assert yaml.load(text, Loader=BoundedLoader) == yaml.safe_load(text)


@pytest.mark.parametrize("text", ["*.txt & more", "a & b * c", "[*", "R&D *"])
def test_texts_that_are_not_yaml_pass_the_check(text: str) -> None:
    check_aliases(text)
