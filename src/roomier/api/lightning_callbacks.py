"""Recognition of Lightning's built-in callbacks by class name, as in ``lightning.py``."""

from __future__ import annotations

from roomier.api.callback import Callback
from roomier.api.overrides import PACKAGES

_FOLDERS = tuple(f"{package}callbacks." for package in PACKAGES)
_BASES = ("Callback", "Checkpoint", "BasePredictionWriter")  # base classes for users


def builtin_class(obj: object) -> type | None:
    """Return the built-in Lightning callback class that ``obj`` is an instance of; None for any other object."""
    for cls in type(obj).__mro__:
        if cls.__module__.startswith(_FOLDERS):
            return None if cls.__name__ in _BASES else cls
    return None


def is_builtin(obj: object, name: str) -> bool:
    """Return True if ``obj`` is an instance of Lightning's class ``name`` (a callback or a base class of callbacks)."""
    return any(cls.__name__ == name and cls.__module__.startswith(_FOLDERS) for cls in type(obj).__mro__)


def added_names(obj: object, builtin: type) -> list[str]:
    """Return the names of the public methods of ``builtin`` that the class of ``obj`` overrides. roomier's replacement
    of ``builtin`` does not call the overrides."""
    own = type(obj).__mro__[: type(obj).__mro__.index(builtin)]
    names = {name for cls in own for name, value in vars(cls).items() if callable(value) and not name.startswith("_")}
    return sorted(name for name in names if hasattr(builtin, name))


def watches_metric(callback: object) -> bool:
    """Return True if ``callback`` monitors a logged metric. ``on_train_epoch_end`` of such callbacks runs last."""
    if isinstance(callback, Callback):
        return callback.monitors
    return is_builtin(callback, "EarlyStopping") or is_builtin(callback, "Checkpoint")
