"""Hyperparameters: the arguments an object was made with, as a dict that also reads as attributes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

from roomier.core.errors import RoomierError
from roomier.core.log import notice


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


class HasHyperParameters:
    """What Module and DataModule share: ``save_hyperparameters`` and ``hparams``."""

    def save_hyperparameters(self, *names: str, ignore: str | Iterable[str] = (), logger: bool = True) -> None:
        """Keep the arguments of ``__init__`` in ``self.hparams``; those of a Module go into checkpoints as well.

        Call it in ``__init__``. ``names`` restricts it to some arguments; ``ignore`` leaves some out. Values that
        are not plain data (a network, say) are kept on ``hparams`` but cannot be stored: one line says so.
        ``logger=False`` leaves all of them out of the log.
        """
        current = inspect.currentframe()
        assert current is not None
        ignored = (ignore,) if isinstance(ignore, str) else tuple(ignore)
        arguments = init_arguments(current.f_back, self, ignored)
        for name in names:
            if name not in arguments:
                raise RoomierError(
                    "save_hyperparameters",
                    name,
                    "is no argument of __init__",
                    f"Use one of: {', '.join(arguments)}",
                )
        chosen = {name: arguments[name] for name in names} if names else arguments
        for name, value in chosen.items():
            if not is_plain(value):
                notice(
                    f"hyperparameter {name!r} of {type(self).__name__} is a {type(value).__name__}: "
                    f"it is not stored; pass ignore=[{name!r}] to save_hyperparameters"
                )
        self.hparams.update(chosen)
        self.__dict__["_logs_hyperparameters"] = logger

    @property
    def hparams(self) -> HyperParameters:
        """What :meth:`save_hyperparameters` kept."""
        found: HyperParameters = self.__dict__.setdefault("_hparams", HyperParameters())
        return found

    @property
    def logged_hparams(self) -> dict[str, Any]:
        """Those of :attr:`hparams` that go to the loggers."""
        return dict(self.hparams) if self.__dict__.get("_logs_hyperparameters", True) else {}
