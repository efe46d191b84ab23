"""Prints the code lines of each folder, without blank lines, comments and docstrings:
``python -m tests.house.code_lines [FOLDER]``.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def num_code_lines(text: str) -> int:
    """Return the number of lines of a Python file that contain code."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {line for token in tokens if token.type not in _NO_CODE for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def by_folder(root: Path) -> Counter[str]:
    """Return the number of code lines in each folder of ``root``; the files of ``root`` have the key ``"."``."""
    found: Counter[str] = Counter()
    for path in root.rglob("*.py"):
        inner = path.relative_to(root).parts[:-1]
        found[inner[0] if inner else "."] += num_code_lines(path.read_text())
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1] if sys.argv[1:] else "src/roomier")
    counts = by_folder(folder)
    for name, count in counts.most_common():
        print(f"{count:7,} {name}")
    print(f"{counts.total():7,} {folder}")
