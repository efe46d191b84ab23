"""Detection of optimizers that require a closure, although the ``closure`` argument of their ``step`` defaults to None.

Sharpness-aware minimization (SAM) is an example. The ``step`` of SAM asserts that a closure was passed, or calls the
closure without a check. The source code of ``step`` shows whether a closure is required, before the first step runs.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from typing import Any


@cache
def assumes_closure(kind: type) -> bool:
    """Return True if ``kind.step`` fails without a closure. Return False if the source code is not available."""
    step: Any = kind.step  # type: ignore[attr-defined]
    try:
        [function] = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(step)))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return False
    return _assumes(function.body) is True if isinstance(function, ast.FunctionDef) else False


def _assumes(statements: list[ast.stmt]) -> bool | None:
    """Return True if the statements require a closure, False if they return early without one, and None otherwise."""
    for each in statements:
        if isinstance(each, ast.Assert) and _mentions(each.test):
            return True
        if isinstance(each, ast.If) and _mentions(each.test):
            if _is_missing(each.test) and isinstance(each.body[-1], (ast.Raise, ast.Return)):
                return isinstance(each.body[-1], ast.Raise)
            continue  # the closure is called only if it was passed
        if isinstance(each, (ast.With, ast.For, ast.Try)):
            inner = _assumes(each.body)
            if inner is not None:
                return inner
        elif _calls(each):
            return True
    return None


def _mentions(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "closure" for each in ast.walk(node))


def _is_missing(test: ast.expr) -> bool:
    """Return True if ``test`` is the expression ``closure is None`` or ``not closure``."""
    if isinstance(test, ast.Compare):
        return len(test.ops) == 1 and isinstance(test.ops[0], (ast.Is, ast.Eq))
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)


def _calls(node: ast.AST) -> bool:
    """Return True if ``node`` calls the closure without a condition such as ``closure() if closure else None``."""
    if isinstance(node, (ast.IfExp, ast.BoolOp)) and _mentions(node):
        return False
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "closure":
        return True
    return any(_calls(each) for each in ast.iter_child_nodes(node))
