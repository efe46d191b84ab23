"""Which of Lightning's own callbacks an object is, or is made of: known by their classes, as in ``lightning.py``."""

from __future__ import annotations

from roomier.api.callback import Callback
from roomier.api.overrides import PACKAGES

_FOLDERS = tuple(f"{package}callbacks." for package in PACKAGES)
_BASES = ("Callback", "Checkpoint", "BasePredictionWriter")  # made to be written on


def builtin_class(obj: object) -> type | None:
    """Lightning's class that the class of ``obj`` is, or was made from; None where that is a base for everyone's."""
    for cls in type(obj).__mro__:
        if cls.__module__.startswith(_FOLDERS):
            return None if cls.__name__ in _BASES else cls
    return None


def is_builtin(obj: object, name: str) -> bool:
    """Whether ``obj`` is one of Lightning's callbacks or bases of this ``name``, or of a class made from it."""
    return any(cls.__name__ == name and cls.__module__.startswith(_FOLDERS) for cls in type(obj).__mro__)


def added_names(obj: object, builtin: type) -> list[str]:
    """Public methods of ``builtin`` that classes made from it define anew, and so want to be called."""
    own = type(obj).__mro__[: type(obj).__mro__.index(builtin)]
    names = {name for cls in own for name, value in vars(cls).items() if callable(value) and not name.startswith("_")}
    return sorted(name for name in names if hasattr(builtin, name))


def watches_metric(callback: object) -> bool:
    """Whether it looks at what others log, and so comes after them at the end of an epoch."""
    if isinstance(callback, Callback):
        return callback.monitors
    return is_builtin(callback, "EarlyStopping") or is_builtin(callback, "Checkpoint")
