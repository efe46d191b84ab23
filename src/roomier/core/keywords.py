"""Errors for unknown keyword arguments: a RoomierError with a suggestion instead of Python's TypeError."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from roomier.core.errors import RoomierError, nearest

_IS_MEANT = 0.75  # similarity above which a known name is suggested; high, to avoid wrong suggestions
_NONE: Mapping[str, str] = {}
_NONE_AT_ALL: Mapping[str, object] = {}
_Init = TypeVar("_Init", bound=Callable[..., None])


def unknown_keyword(
    owner: str, name: str, value: object, known: Iterable[str], former: Mapping[str, str] = _NONE
) -> RoomierError:
    """Return the error for the unknown keyword in ``owner(name=value)``.

    Args:
        owner: name of the called object, without the prefix ``roomier.``.
        known: keywords that ``owner`` accepts.
        former: mapping from former names, or names in another library, to the action that the error recommends.
    """
    return RoomierError(name, value, f"{owner} has no such keyword", advice_for_name(owner, name, known, former))


def advice_for_name(
    owner: str, name: str, known: Iterable[str], former: Mapping[str, str] = _NONE, *, prefix: str = ""
) -> str:
    """Return the recommended replacement for the keyword named ``name``, as an imperative sentence.

    Args:
        prefix: text that precedes the keyword in the user's input.
    """
    if name in former:
        return former[name]
    near = nearest(name, known, _IS_MEANT)
    return f"See help(roomier.{owner})" if near is None else f"Did you mean {prefix + near!r}?"


def refuse_keywords(
    method: Callable[..., object], unknown: Mapping[str, object], former: Mapping[str, str] = _NONE
) -> None:
    """Raise an error if ``method`` received keywords that are not among its parameters.

    Call this function first in the body of ``method``. A decorator would add a stack frame to every traceback.

    Raises:
        RoomierError: ``unknown`` is not empty.
    """
    for name, value in unknown.items():
        raise unknown_keyword(method.__qualname__, name, value, names_of(method), former)


def explain_unknown_keywords(
    owner: str,
    former: Mapping[str, str] = _NONE,
    *,
    harmless: Mapping[str, object] = _NONE_AT_ALL,
    translate: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]] | None = None,
) -> Callable[[_Init], _Init]:
    """Decorate ``__init__`` of the ``owner`` class, so that an unknown keyword raises an error with a suggestion.

    Args:
        former: mapping from former names, or names in another library, to the action that the error recommends.
        harmless: mapping from each unsupported keyword to the value that requests the behavior of roomier. A keyword
            with this value is ignored.
        translate: function that receives all keywords and the default values of ``owner``, and returns the keywords to
            use. This function is called before any other check.
    """

    def decorate(init: _Init) -> _Init:
        known = names_of(init)
        defaults = {name: each.default for name, each in inspect.signature(init).parameters.items()}
        kinds = {each.kind for name, each in inspect.signature(init).parameters.items() if name != "self"}
        takes_names_only = kinds == {inspect.Parameter.KEYWORD_ONLY}

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            if args and takes_names_only:
                action = f"Pass keywords: {known[0]}=..."
                raise RoomierError(owner, args[0], "accepts keyword arguments only", action)
            if translate is not None:
                kwargs = translate(kwargs, defaults)
            for name, value in list(kwargs.items()):
                if name in harmless and type(value) is type(harmless[name]) and value == harmless[name]:
                    del kwargs[name]
                elif name not in known:
                    raise unknown_keyword(owner, name, value, known, former)
            init(self, *args, **kwargs)

        return cast(_Init, checked)

    return decorate


def names_of(function: Callable[..., object]) -> list[str]:
    """Return the names of the parameters of ``function``, except ``self``, ``*args`` and ``**kwargs``."""
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.name != "self" and each.kind not in _COLLECTS]


_COLLECTS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
