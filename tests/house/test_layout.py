"""Rules for the layout of the sources, which no linter checks."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from tests.house.sources import ROOT, tree_of

SOURCES = sorted(path for folder in ("src/roomier", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
TORCH_PRIVATE = {
    ROOT / "src" / "roomier" / name
    for name in ("core/torch_private.py", "core/torch_fake.py", "core/torch_offload.py", "data/torch_loaders.py")
}

MAX_LINES_OF_A_FILE = 800
MAX_LINES_OF_A_FUNCTION = 60
NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "helper", "misc", "common"}


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_sources_are_found() -> None:
    assert len(SOURCES) > 10


def test_files_and_functions_stay_small() -> None:
    for path in SOURCES:
        text = path.read_text()
        assert len(text.splitlines()) <= MAX_LINES_OF_A_FILE, f"{shown(path)} is too long: split it"
        long = [
            f"{shown(path)}:{node.lineno} {node.name}"
            for node in ast.walk(tree_of(path))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and num_code_lines(node) > MAX_LINES_OF_A_FUNCTION
        ]
        assert not long


def num_code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of the body, without the docstring and the arguments."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_names_of_files_and_folders_are_specific() -> None:
    vague = [shown(p) for p in SOURCES if {p.stem, p.parent.name} & NAMES_THAT_SAY_NOTHING]
    assert not vague


def test_private_names_of_torch_are_used_in_four_files_only() -> None:
    for path in set(SOURCES) - TORCH_PRIVATE:
        used = sorted(private_torch_names(tree_of(path)))
        assert not used, f"{shown(path)} uses {used}: move them to core/torch_private.py"


def test_search_for_private_names_finds_every_form() -> None:
    code = """
import torch, torch._dynamo
import torch.nn.functional as F
from torch import _C, distributed as dist
from torch.distributed._tensor import DTensor
torch._foreach_norm([]); F._pad(1); dist.fsdp._x; torch.__version__; self._mine
"""
    assert private_torch_names(ast.parse(code)) == {
        "torch._dynamo",
        "torch._C",
        "torch.distributed._tensor",
        "torch._foreach_norm",
        "torch.nn.functional._pad",
        "torch.distributed.fsdp._x",
    }


def private_torch_names(tree: ast.Module) -> set[str]:
    """Return the imported or accessed dotted names below ``torch`` that have a component with a leading underscore."""
    imported, bound = names_from_torch(tree)
    looked_up = {name for node in ast.walk(tree) if (name := dotted(node, bound)) is not None}
    return {shortest_private(name) for name in imported | looked_up if is_private(name)}


def names_from_torch(tree: ast.Module) -> tuple[set[str], dict[str, str]]:
    """Return the dotted names that are imported from torch, and for each local name the name to which it refers."""
    imported: set[str] = set()
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    imported.add(alias.name)
                    bound[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            for alias in node.names:
                imported.add(f"{node.module}.{alias.name}")
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return imported, bound


def dotted(node: ast.AST, bound: dict[str, str]) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not parts or not isinstance(node, ast.Name) or node.id not in bound:
        return None
    return ".".join([bound[node.id], *reversed(parts)])


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def shortest_private(name: str) -> str:
    """Return the part of ``name`` up to its first private component: ``torch._C._x.y`` -> ``torch._C``."""
    parts = name.split(".")
    first = next(i for i, part in enumerate(parts) if is_private(part))
    return ".".join(parts[: first + 1])


def test_import_time_over_torch_is_limited() -> None:
    assert any(import_time_over_torch_s() <= 0.5 for _ in range(3))


def import_time_over_torch_s() -> float:
    code = "import time, torch; begin = time.perf_counter(); import roomier; print(time.perf_counter() - begin)"
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def test_installed_version_equals_the_sources() -> None:
    assert importlib.metadata.version("roomier") == project_table()["version"]


def test_constraints_pin_every_direct_dependency() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    groups = [project_table()["dependencies"], *project_table()["optional-dependencies"].values()]
    wanted = {normal_name(entry) for group in groups for entry in group}
    assert wanted - {normal_name(pin) for pin in pins} == {"roomier"}  # dev requires roomier with extras


def project_table() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def normal_name(requirement: str) -> str:
    return re.split(r"[\[<>=~!]", requirement)[0].lower().replace("_", "-")


def test_the_reading_order_is_short() -> None:
    text = (ROOT / "docs" / "design" / "overview.md").read_text().split("## Reading order")[1].split("These files")[0]
    files = [ROOT / "src" / "roomier" / name for name in re.findall(r"`([a-z_/]+\.py)`", text)]
    assert 10 < len(files) <= 20
    assert sum(len(path.read_text().splitlines()) for path in files) <= 4000
