"""The pages of the reference that are written by hand contain all environment variables and errors of the code."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.docs.code import ROOT
from tests.house.sources import trees

REFERENCE = ROOT / "docs" / "reference"


def environment_variables(tree: ast.Module) -> Iterator[str]:
    """Yield the names in ``environ.get(NAME)``, ``environ[NAME]``, ``NAME in environ``, ``number_in(environ, NAME)``.

    A name is a string or a constant of the same module.
    """
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=environ), args=[name, *_]) if is_environ(environ):
                names = [name]
            case ast.Call(func=ast.Name(id="number_in"), args=[_, name, *_]):
                names = [name]
            case ast.Subscript(value=environ, slice=name) if is_environ(environ):
                names = [name]
            case ast.Compare(left=name, ops=[ast.In() | ast.NotIn()], comparators=[environ]) if is_environ(environ):
                names = [name]
            case _:
                continue
        for each in names:
            value = constants.get(each.id) if isinstance(each, ast.Name) else getattr(each, "value", None)
            if isinstance(value, str):
                yield value


def is_environ(node: ast.expr) -> bool:
    return ast.unparse(node) in ("environ", "os.environ")


def test_environment_variables_are_described() -> None:
    page = (REFERENCE / "environment.md").read_text()
    found = {name for tree in trees().values() for name in environment_variables(tree)}
    assert {"ROOMIER_MAX_DEVICES", "RANK", "SLURM_JOB_ID", "WANDB_PROJECT"} <= found
    assert sorted(name for name in found if f"`{name}`" not in page) == []


def test_described_environment_variables_occur_in_the_code() -> None:
    page = (REFERENCE / "environment.md").read_text()
    code = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    described = {word for word in page.split("`")[1::2] if word.isupper() and "=" not in word}
    composed = {name for name in described if name.startswith("ACCELERATE_")}
    assert len(described) > 50
    assert sorted(name for name in described - composed if name not in code) == []


def test_errors_are_described() -> None:
    page = (REFERENCE / "errors.md").read_text()
    classes = [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    errors = {"RoomierError"}
    for _ in range(4):  # subclasses of subclasses
        errors |= {node.name for node in classes if {ast.unparse(base) for base in node.bases} & errors}
    public = {name for name in errors if not name.startswith("_")}
    assert len(public) > 10
    assert sorted(name for name in public if f"{name}`" not in page) == []
    assert Path(ROOT / "docs" / "code" / "errors" / "1_error.out").read_text().startswith("strategy=")
