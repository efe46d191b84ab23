"""Types that represent Lightning's classes in signatures, including the signatures that the command line reads.

These types are never instantiated, and Lightning is not imported.
"""

from __future__ import annotations

from roomier.api.overrides import PACKAGES


class _KnownByName(type):
    """Metaclass of classes that represent Lightning's class ``lightning_name`` in ``issubclass`` and ``isinstance``."""

    lightning_name: str

    def __subclasscheck__(cls, kind: type) -> bool:
        return any(c.__name__ == cls.lightning_name and c.__module__.startswith(PACKAGES) for c in kind.__mro__)

    def __instancecheck__(cls, obj: object) -> bool:
        return issubclass(type(obj), cls)


class LightningCallback(metaclass=_KnownByName):
    """A ``lightning.pytorch.Callback``."""

    lightning_name = "Callback"


class LightningDataModule(metaclass=_KnownByName):
    """A ``lightning.pytorch.LightningDataModule``."""

    lightning_name = "LightningDataModule"


class LightningLogger(metaclass=_KnownByName):
    """A logger of ``lightning.pytorch.loggers``."""

    lightning_name = "Logger"
