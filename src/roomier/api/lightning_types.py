"""Types that Lightning's own classes pass for where a signature asks for one, and with it the command line.

Nothing is ever made of them, and Lightning is not imported.
"""

from __future__ import annotations

from roomier.api.overrides import PACKAGES


class _KnownByName(type):
    """The class of a type whose subclasses are all classes made of one of Lightning's, ``lightning_name``."""

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
