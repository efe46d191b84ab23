"""An argument that does not exist, told in the one shape of an error instead of a bare TypeError."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from roomier.core.errors import RoomierError, nearest

_IS_MEANT = 0.75  # how alike a known name must be: a wrong guess costs its reader more than none
_NONE: Mapping[str, str] = {}
_NONE_AT_ALL: Mapping[str, object] = {}
_Init = TypeVar("_Init", bound=Callable[..., None])


def unknown_keyword(
    owner: str, name: str, value: object, known: Iterable[str], former: Mapping[str, str] = _NONE
) -> RoomierError:
    """The error for ``owner(name=value)``.

    Args:
        owner: what was called, as it is spelled below ``roomier``.
        known: the names it does take.
        former: names of its past, or of others' interfaces, and for each what to write now.
    """
    return RoomierError(name, value, f"{owner} has no such keyword", what_to_write(owner, name, known, former))


def what_to_write(
    owner: str, name: str, known: Iterable[str], former: Mapping[str, str] = _NONE, *, prefix: str = ""
) -> str:
    """What to write instead of the keyword ``name``, as an imperative sentence.

    Args:
        prefix: what stands before a known name where the user writes it.
    """
    if name in former:
        return former[name]
    near = nearest(name, known, _IS_MEANT)
    return f"help(roomier.{owner}) lists them" if near is None else f"Did you mean {prefix + near!r}?"


def refuse_keywords(
    method: Callable[..., object], unknown: Mapping[str, object], former: Mapping[str, str] = _NONE
) -> None:
    """Raise for what ``method`` received beyond its parameters; called first in its body, as a decorator would
    stand on the stack of everything below.

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
    check: Callable[[Mapping[str, object]], None] | None = None,
) -> Callable[[_Init], _Init]:
    """A decorator for the ``__init__`` of the class ``owner``: an unknown keyword is told with what to write.

    Args:
        former: names of its past, or of others' interfaces, and for each what to write now.
        harmless: of these names, the value that asks for what is done anyway: it is taken.
        check: looks at all keywords before.
    """

    def decorate(init: _Init) -> _Init:
        known = names_of(init)
        kinds = {each.kind for name, each in inspect.signature(init).parameters.items() if name != "self"}
        takes_names_only = kinds == {inspect.Parameter.KEYWORD_ONLY}

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            if args and takes_names_only:
                action = f"Write keywords: {known[0]}=..."
                raise RoomierError(owner, args[0], "takes no arguments without a name", action)
            if check is not None:
                check(kwargs)
            kwargs = {name: value for name, value in kwargs.items() if not _is_harmless(name, value, harmless)}
            for name, value in kwargs.items():
                if name not in known:
                    raise unknown_keyword(owner, name, value, known, former)
            init(self, *args, **kwargs)

        return cast(_Init, checked)

    return decorate


def _is_harmless(name: str, value: object, harmless: Mapping[str, object]) -> bool:
    return name in harmless and type(value) is type(harmless[name]) and value == harmless[name]


def names_of(function: Callable[..., object]) -> list[str]:
    """The parameters of ``function`` that have a name of their own."""
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.name != "self" and each.kind not in _COLLECTS]


_COLLECTS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
