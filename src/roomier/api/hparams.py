"""Hyperparameters: the arguments of ``__init__`` of an object, as a dict with attribute access."""

from __future__ import annotations

import copy
import inspect
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

from roomier.core.errors import RoomierError
from roomier.core.log import notice


class HyperParameters(dict[str, Any]):
    """Dict whose items are also attributes: ``hparams["lr"]`` equals ``hparams.lr``."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no hyperparameter {name!r}, only: {', '.join(self) or 'none'}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def with_attributes(value: Any) -> Any:
    """Return ``value`` with all dicts, including dicts in lists and tuples, as :class:`HyperParameters`."""
    if isinstance(value, dict):
        return HyperParameters({name: with_attributes(item) for name, item in value.items()})
    return type(value)(map(with_attributes, value)) if type(value) in (list, tuple) else value


def without_configs(value: Any) -> Any:
    """Return ``value`` with OmegaConf containers as dicts and lists, and with the values of their interpolations. A
    container with a value that is missing or cannot be resolved becomes ``NotImplemented``, which is not plain.
    """
    omegaconf: Any = sys.modules.get("omegaconf")
    if not hasattr(omegaconf, "OmegaConf"):
        return value
    if omegaconf.OmegaConf.is_config(value):
        try:
            return omegaconf.OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        except omegaconf.errors.OmegaConfBaseException:
            return NotImplemented
    if isinstance(value, dict):
        return {name: without_configs(item) for name, item in value.items()}
    return type(value)(map(without_configs, value)) if type(value) in (list, tuple) else value


def plain_items(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters that are plain data, without OmegaConf containers."""
    found = {name: without_configs(value) for name, value in hparams.items()}
    return {name: value for name, value in found.items() if is_plain(value)}


def is_plain(value: object) -> bool:
    """Return True if ``value`` consists only of numbers, strings, None, lists, tuples and dicts."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def init_arguments(frame: FrameType | None, obj: object, ignore: Iterable[str]) -> dict[str, Any] | None:
    """Return the arguments of the ``__init__`` calls of ``obj`` in ``frame`` and its callers; None without such a call.

    If a subclass calls the ``__init__`` of its base class, the result contains the arguments of both methods, and the
    arguments of the subclass take precedence. ``frame`` may belong to a method that ``__init__`` calls, or to
    ``__post_init__`` of a dataclass.
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
    """Mixin that provides ``save_hyperparameters`` and ``hparams`` for Module and DataModule."""

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: str | Iterable[str] | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Store the arguments of ``__init__`` in ``self.hparams``. Checkpoints contain the stored arguments.

        Call this method in ``__init__``. Values that are not plain data, such as a network, are available in
        ``hparams``, but are not saved in checkpoints. A notice reports such values. OmegaConf containers are saved as
        dicts and lists. ``load_from_checkpoint`` passes dicts whose items are also attributes.

        Args:
            args: names of the arguments to store, or one mapping or namespace whose items are stored. Default: all
                arguments.
            ignore: names to exclude, even if a base class stored them.
            frame: frame of the ``__init__`` whose arguments are stored. Default: the frame of the caller.
            logger: if True, send the hyperparameters to the loggers.

        Raises:
            RoomierError: a name is not an argument of ``__init__``, an element of ``args`` is neither a name nor a
                mapping or namespace, or this method was not called in ``__init__``.

        Example:
            >>> class Net(roomier.Module):
            ...     def __init__(self, width=64, lr=1e-3):
            ...         super().__init__()
            ...         self.save_hyperparameters()
            >>> Net(width=128).hparams.width
            128
        """
        current = inspect.currentframe()
        assert current is not None
        ignored = (ignore,) if isinstance(ignore, str) else tuple(ignore or ())
        configurations = [each for each in args if not isinstance(each, str)]
        arguments = init_arguments(frame or current.f_back, self, ignored)
        if arguments is None and not configurations:
            problem = "must be called in __init__, whose arguments it stores"
            action = "Call it in __init__, or pass a dict of hyperparameters"
            raise RoomierError("save_hyperparameters", type(self).__name__, problem, action)
        arguments = arguments or {}
        if len(configurations) == 1:
            chosen = {name: value for name, value in _named_values(configurations[0]).items() if name not in ignored}
            passed_as = [name for name, value in arguments.items() if value is configurations[0]]
            self.__dict__["_hparams_name"] = passed_as[0] if passed_as else None
        else:
            chosen = {name: arguments[name] for name in _known(args, arguments)} if args else arguments
        plain = plain_items(chosen)
        for name, value in chosen.items():
            if name not in plain:
                notice(
                    f"hyperparameter {name!r} of {type(self).__name__} is a {type(value).__name__}, so checkpoints do "
                    f"not contain it. Pass ignore=[{name!r}] to save_hyperparameters"
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
        """The hyperparameters that :meth:`save_hyperparameters` stored."""
        found: HyperParameters = self.__dict__.setdefault("_hparams", HyperParameters())
        return found

    @hparams.setter
    def hparams(self, values: Any) -> None:
        action = "Call self.save_hyperparameters(values) with a dict or Namespace, or use a different attribute name"
        raise RoomierError("hparams", values, "cannot be assigned", action)

    @property
    def hparams_initial(self) -> HyperParameters:
        """A copy of :attr:`hparams` as :meth:`save_hyperparameters` stored it, without later changes."""
        initial = self.__dict__.get("_hparams_initial", {})
        return HyperParameters({name: _kept(value) for name, value in initial.items()})

    @property
    def logged_hparams(self) -> dict[str, Any]:
        """The items of :attr:`hparams_initial` to log; empty after ``save_hyperparameters(logger=False)``."""
        return dict(self.hparams_initial) if self.__dict__.get("_logs_hyperparameters", True) else {}


def _kept(value: Any) -> Any:
    return copy.deepcopy(value) if plain_items({"": value}) else value  # networks and datasets are not copied


def _named_values(configuration: Any) -> dict[str, Any]:
    if isinstance(configuration, Mapping):
        return dict(configuration)
    if isinstance(configuration, Namespace):
        return vars(configuration)
    action = "Pass names of arguments, or one dict or argparse.Namespace"
    raise RoomierError("save_hyperparameters", configuration, "must contain named values", action)


def _known(names: Iterable[Any], arguments: Mapping[str, Any]) -> Iterable[str]:
    for name in names:
        if name not in arguments:
            action = f"Use one of: {', '.join(arguments)}"
            raise RoomierError("save_hyperparameters", name, "must be an argument of __init__", action)
        yield name
