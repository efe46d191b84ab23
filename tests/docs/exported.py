"""The public names of roomier, found without an import of roomier."""

import ast
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src"


def exported_names(sources: Path = SOURCES) -> dict[str, list[str]]:
    """Return the names in the ``__all__`` of each module of roomier."""
    found = {}
    for path in sorted((sources / "roomier").rglob("*.py")):
        names = _all_of(ast.parse(path.read_text()))
        if names:
            parts = path.relative_to(sources).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = sorted(names)
    return found


def _all_of(module: ast.Module) -> set[str]:
    """Return the names in ``__all__``, which may contain the keys of a dict of the module."""
    values = {
        target.id: node.value
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    names: set[str] = set()
    for node in ast.walk(values.get("__all__", ast.Tuple([]))):
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Name):
            names |= set(ast.literal_eval(values[node.value.id]))
        elif isinstance(node, ast.Constant):
            names.add(node.value)
    return names
