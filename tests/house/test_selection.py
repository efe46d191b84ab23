"""Each folder of tests has tests in ``make test``, which runs no test marked ``more`` or ``slow``."""

import ast
from pathlib import Path

import pytest

from tests.house.sources import tree_of

TESTS = Path(__file__).parents[1]
MARKS = ("pytest.mark.more", "pytest.mark.slow")
FOLDERS = sorted({path.parent for path in TESTS.glob("*/test_*.py")} - {TESTS / "third_party"})


def is_marked(node: ast.stmt) -> bool:
    """Return True if ``node`` marks a test, or the tests of its file, with ``more`` or ``slow``.

    ``tests/conftest.py`` marks the tests on the simulated accelerator.
    """
    if isinstance(node, ast.FunctionDef):
        names = [ast.unparse(mark) for mark in node.decorator_list]
        return any(name in MARKS for name in names) or "on_simulated" in ast.unparse(node.args)
    return any(mark in ast.unparse(node) for mark in MARKS)


def is_in_make_test(path: Path) -> bool:
    body = tree_of(path).body
    if any(isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node) and is_marked(node) for node in body):
        return False
    functions = [node for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return any(not is_marked(function) for function in functions)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_each_folder_has_a_test_in_make_test(folder: Path) -> None:
    assert any(map(is_in_make_test, folder.glob("test_*.py"))), f"{folder.name}: leave its strongest test unmarked"
