"""Hyperparameters: the arguments a module was made with, as a dict that also reads as attributes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any


class HyperParameters(dict[str, Any]):
    """``hparams["lr"]`` and ``hparams.lr`` are the same."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no hyperparameter {name!r}; there are: {', '.join(self) or 'none'}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def is_plain(value: object) -> bool:
    """Whether ``value`` is made of numbers, strings, None, lists, tuples and dicts alone."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def init_arguments(frame: FrameType | None, obj: object, ignore: Iterable[str]) -> dict[str, Any]:
    """The arguments of the ``__init__`` calls of ``obj`` that are running now, from ``frame`` outwards.

    A subclass whose ``__init__`` calls its parent's has both in it; the outer one wins.
    """
    found: dict[str, Any] = {}
    while frame is not None and frame.f_code.co_name == "__init__":
        arguments = inspect.getargvalues(frame)
        if not arguments.args or frame.f_locals.get(arguments.args[0]) is not obj:
            break
        found.update({name: frame.f_locals[name] for name in arguments.args[1:]})
        if arguments.keywords:
            found.update(frame.f_locals[arguments.keywords])
        frame = frame.f_back
    return {name: value for name, value in found.items() if name not in set(ignore)}
