"""The syntax trees of the sources, which the tests of this folder share because parsing all files takes seconds."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "roomier"


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file. Callers must not change it."""
    return ast.parse(path.read_text())


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of each file of the package, by its path in the package."""
    return {path.relative_to(PACKAGE).as_posix(): tree_of(path) for path in sorted(PACKAGE.rglob("*.py"))}
