"""Hyperparameters: the arguments an object was made with, as a dict that also reads as attributes."""

from __future__ import annotations

import copy
import inspect
from argparse import Namespace
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


def init_arguments(frame: FrameType | None, obj: object, ignore: Iterable[str]) -> dict[str, Any] | None:
    """The arguments of the ``__init__`` calls of ``obj`` that are running now, from ``frame`` outwards; None for none.

    A subclass whose ``__init__`` calls its parent's has both in it; the outer one wins. ``frame`` may be that of a
    method which ``__init__`` calls, or of the ``__post_init__`` of a dataclass.
    """
    while frame is not None and not _is_init_of(obj, frame):
        frame = frame.f_back
    if frame is None:
        return None
    found: dict[str, Any] = {}
    while frame is not None and _is_init_of(obj, frame):
        arguments = inspect.getargvalues(frame)
        found.update({name: frame.f_locals[name] for name in arguments.args[1:]})
        if arguments.keywords:
            found.update(frame.f_locals[arguments.keywords])
        frame = frame.f_back
    return {name: value for name, value in found.items() if name not in set(ignore)}


def _is_init_of(obj: object, frame: FrameType) -> bool:
    if frame.f_code.co_name != "__init__":
        return False
    names = inspect.getargvalues(frame).args
    return bool(names) and frame.f_locals.get(names[0]) is obj


class HasHyperParameters:
    """What Module and DataModule share: ``save_hyperparameters`` and ``hparams``."""

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: str | Iterable[str] | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Keep the arguments of ``__init__`` in ``self.hparams``; those of a Module go into checkpoints as well.

        Call it in ``__init__``. Values that are not plain data (a network, say) are kept on ``hparams`` but cannot be
        stored: one line says so.

        Args:
            args: names of arguments, to keep these alone; or one mapping or namespace, to keep what it holds.
            ignore: names to leave out, also where a parent class kept them.
            frame: that of the ``__init__`` whose arguments are meant; by default the caller's.
            logger: False leaves all of them out of the log.

        Raises:
            RoomierError: a name is no argument of ``__init__``, what is passed holds no names, or there is no
                ``__init__`` whose arguments could be meant.
        """
        current = inspect.currentframe()
        assert current is not None
        ignored = (ignore,) if isinstance(ignore, str) else tuple(ignore or ())
        configurations = [each for each in args if not isinstance(each, str)]
        arguments = init_arguments(frame or current.f_back, self, ignored)
        if arguments is None and not configurations:
            problem = "keeps arguments of __init__, and was not called in one"
            action = "Call it in __init__, or pass it what to keep as a dict"
            raise RoomierError("save_hyperparameters", type(self).__name__, problem, action)
        arguments = arguments or {}
        if len(configurations) == 1:
            chosen = {name: value for name, value in _named_values(configurations[0]).items() if name not in ignored}
            passed_as = [name for name, value in arguments.items() if value is configurations[0]]
            self.__dict__["_hparams_name"] = passed_as[0] if passed_as else None
        else:
            chosen = {name: arguments[name] for name in _known(args, arguments)} if args else arguments
        for name, value in chosen.items():
            if not is_plain(value):
                notice(
                    f"hyperparameter {name!r} of {type(self).__name__} is a {type(value).__name__}: "
                    f"it is not stored; pass ignore=[{name!r}] to save_hyperparameters"
                )
        for name in ignored:
            self.hparams.pop(name, None)
        self.hparams.update(chosen)
        self.__dict__["_hparams_initial"] = HyperParameters(
            {name: _kept(value) for name, value in self.hparams.items()}
        )
        self.__dict__["_logs_hyperparameters"] = logger

    @property
    def hparams(self) -> HyperParameters:
        """What :meth:`save_hyperparameters` kept."""
        found: HyperParameters = self.__dict__.setdefault("_hparams", HyperParameters())
        return found

    @hparams.setter
    def hparams(self, values: Any) -> None:
        action = "Write self.save_hyperparameters(values), for a dict or Namespace of them; or give it another name"
        raise RoomierError("hparams", values, "cannot be put in the place of what is kept", action)

    @property
    def hparams_initial(self) -> HyperParameters:
        """:attr:`hparams` as :meth:`save_hyperparameters` left it: a copy, whatever was written there since."""
        initial = self.__dict__.get("_hparams_initial", {})
        return HyperParameters({name: _kept(value) for name, value in initial.items()})

    @property
    def logged_hparams(self) -> dict[str, Any]:
        """Those of :attr:`hparams_initial` that go to the loggers."""
        return dict(self.hparams_initial) if self.__dict__.get("_logs_hyperparameters", True) else {}


def _kept(value: Any) -> Any:
    return copy.deepcopy(value) if is_plain(value) else value  # a network, or a data set, is not there twice


def _named_values(configuration: Any) -> dict[str, Any]:
    if isinstance(configuration, Mapping):
        return dict(configuration)
    if isinstance(configuration, Namespace):
        return vars(configuration)
    action = "Pass names of arguments, or one dict or argparse.Namespace"
    raise RoomierError("save_hyperparameters", configuration, "holds no values by name", action)


def _known(names: Iterable[Any], arguments: Mapping[str, Any]) -> Iterable[str]:
    for name in names:
        if name not in arguments:
            action = f"Use one of: {', '.join(arguments)}"
            raise RoomierError("save_hyperparameters", name, "is no argument of __init__", action)
        yield name
