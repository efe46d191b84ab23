"""Find the synchronizations of a program, and remove one of them.

A synchronization is a call that orders the work of different streams, or the work of a stream and the host. ``removed``
compiles the function that contains the call again, without the call, and replaces the function's code. The module and
its objects remain the same.

| call | without the synchronization |
|---|---|
| ``wait_stream``, ``wait_event``, ``record_stream``, ``synchronize``, ``record``, ``wait`` | not called |
| ``record_event`` | an event that was not recorded |
| ``wait_tensor`` | the argument |
| ``cpu()``, ``to("cpu")`` | a copy with ``non_blocking=True`` |
| ``pin_memory()``, ``pin_memory=...`` | memory that is not pinned |

Copies to the device are not in the list, because ``non_blocking`` changes no order for them. A copy from pinned memory
runs in the order of its stream. A copy from other host memory has read its source when the call returns. Calls that
return a Python number, such as ``item``, always wait.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

_NOT_CALLED = {"wait_stream", "wait_event", "record_stream", "synchronize", "record", "wait"}


@cache
def synchronizations(module: str) -> list[str]:
    """Return the synchronizations in the functions of ``module``, as ``"module:Class.method | call"``.

    The second call with the same text in a function ends with ``#2``.
    """
    transformer = _Sites(module, lambda text, call: None)
    transformer.visit(_tree(module))
    return transformer.found


@contextmanager
def removed(key: str) -> Iterator[None]:
    """Remove a synchronization from this process."""
    with _changed(_module_of(key), [key], lambda text, call: _without(call) if text == key else None):
        yield


@contextmanager
def recorded(keys: Iterable[str]) -> Iterator[set[str]]:
    """Return a set, to which each synchronization of ``keys`` is added when it is called."""
    found: set[str] = set()
    with ExitStack() as stack:
        for module in sorted({_module_of(each) for each in keys}):
            own = [each for each in keys if _module_of(each) == module]
            sys.modules[_RECORDER] = _Recorder(_RECORDER, found)
            stack.enter_context(_changed(module, own, lambda text, call: _recording(text, call)))
        yield found


_RECORDER = "roomier_tests_synchronizations"


class _Recorder(ModuleType):
    """Module that the changed code imports, because its functions cannot have other global variables."""

    def __init__(self, name: str, found: set[str]) -> None:
        super().__init__(name)
        self.add = found.add


def _recording(key: str, call: ast.Call) -> ast.expr:
    recorder = ast.Call(ast.Name("__import__", ast.Load()), [ast.Constant(_RECORDER)], [])
    add = ast.Call(ast.Attribute(recorder, "add", ast.Load()), [ast.Constant(key)], [])
    return ast.Subscript(ast.Tuple([add, call], ast.Load()), ast.Constant(1), ast.Load())


@contextmanager
def _changed(name: str, keys: Sequence[str], change: Callable[[str, ast.Call], ast.expr | None]) -> Iterator[None]:
    """Replace the code of the functions that contain ``keys``."""
    module = importlib.import_module(name)
    transformer = _Sites(name, change)
    tree = ast.fix_missing_locations(transformer.visit(_tree(name)))
    missing = set(keys) - set(transformer.found)
    assert not missing, f"{missing} do not exist"
    code = compile(tree, str(module.__file__), "exec", dont_inherit=True)
    paths = {each.split(" | ")[0].split(":")[1] for each in keys}
    functions = {path: _function(module, path) for path in paths}
    before = {path: function.__code__ for path, function in functions.items()}
    for path, function in functions.items():
        function.__code__ = _nested(code, path)
    try:
        yield
    finally:
        for path, function in functions.items():
            function.__code__ = before[path]


def _module_of(key: str) -> str:
    return key.split(":")[0]


def _tree(module: str) -> ast.Module:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).read_text())


def _function(module: ModuleType, path: str) -> FunctionType:
    found: Any = module
    for name in path.split("."):
        found = found.__dict__[name]
    found = getattr(found, "fget", found)  # a property
    found = inspect.unwrap(getattr(found, "__func__", found))
    assert isinstance(found, FunctionType)
    return found


def _nested(code: CodeType, path: str) -> CodeType:
    for name in path.split("."):
        *_, code = (each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == name)  # overloads
    return code


class _Sites(ast.NodeTransformer):
    """Transformer that lists the synchronizations of a module, and replaces those for which ``change`` returns an
    expression."""

    def __init__(self, module: str, change: Callable[[str, ast.Call], ast.expr | None]) -> None:
        self.found: list[str] = []
        self._module = module
        self._change = change
        self._path: list[str] = []
        self._is_in_function = False
        self._counts: Counter[str] = Counter()

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._enter(node, is_function=False)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._enter(node, is_function=True)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        text = ast.unparse(node)
        self.generic_visit(node)
        if _without(node) is None:
            return node
        return self._change(self._key(text), node) or node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """``changes["pin_memory"] = True`` is an argument of a DataLoader."""
        text = ast.unparse(node)
        self.generic_visit(node)
        if text.endswith("['pin_memory'] = True"):
            call = ast.Call(ast.Attribute(node.value, "to", ast.Load()), [], [ast.keyword("pin_memory", node.value)])
            if self._change(self._key(text), call) is not None:
                node.value = ast.Constant(False)
        return node

    def _enter(self, node: ast.ClassDef | ast.FunctionDef, *, is_function: bool) -> ast.AST:
        if self._is_in_function:  # the code of a nested function belongs to the outer function
            return self.generic_visit(node)
        self._path.append(node.name)
        self._is_in_function = is_function
        self.generic_visit(node)
        self._is_in_function = False
        self._path.pop()
        return node

    def _key(self, text: str) -> str:
        key = f"{self._module}:{'.'.join(self._path)} | {text}"
        self._counts[key] += 1
        if self._counts[key] > 1:
            key = f"{key} #{self._counts[key]}"
        self.found.append(key)
        return key


def _without(call: ast.Call) -> ast.expr | None:
    """Return an expression that replaces ``call``, or None if the call is not a synchronization.

    The operands remain in the expression, so that the function keeps its free variables.
    """
    name = _name_of(call)
    receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
    if name in _NOT_CALLED and (receiver is not None or name == "synchronize"):
        return _first_of([*([] if receiver is None else [receiver]), *call.args])
    if name == "wait_tensor":
        return _first_of(call.args)
    if receiver is None:
        return None
    if name == "record_event":
        torch = ast.Call(ast.Name("__import__", ast.Load()), [ast.Constant("torch")], [])
        device = ast.Attribute(receiver, "device", ast.Load())
        return ast.Call(ast.Attribute(torch, "Event", ast.Load()), [device], [])
    if name == "cpu" or (name == "to" and call.args and _is_cpu(call.args[0])):
        copies = [each for each in call.keywords if each.arg != "non_blocking"]
        asynchronous = ast.keyword("non_blocking", ast.Constant(True))
        return ast.Call(ast.Attribute(receiver, "to", ast.Load()), [ast.Constant("cpu")], [*copies, asynchronous])
    if name == "pin_memory":
        return receiver
    if any(each.arg == "pin_memory" and _is_decision(each.value) for each in call.keywords):
        kept = [each for each in call.keywords if each.arg != "pin_memory"]
        return ast.Call(call.func, call.args, [*kept, ast.keyword("pin_memory", ast.Constant(False))])
    return None


def _name_of(call: ast.Call) -> str | None:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else None


def _first_of(values: list[ast.expr]) -> ast.expr:
    return ast.Subscript(ast.Tuple(values, ast.Load()), ast.Constant(0), ast.Load())


def _is_cpu(value: ast.expr) -> bool:
    return "cpu" in [each.value for each in ast.walk(value) if isinstance(each, ast.Constant)]


def _is_decision(value: ast.expr) -> bool:
    """Return False for ``pin_memory=False``, and for an argument that the function passes on."""
    return not (isinstance(value, ast.Constant) and value.value is False) and ast.unparse(value) != "pin_memory"
