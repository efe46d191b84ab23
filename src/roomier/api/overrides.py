"""Find the methods that a user class overrides, and the Lightning class from which the user class is derived."""

from __future__ import annotations

from types import MethodType

from roomier.api.callback import Callback
from roomier.api.datamodule import DataModule
from roomier.api.module import Module

PACKAGES = ("lightning.pytorch.", "pytorch_lightning.")
COUNTERPARTS: dict[type, str] = {Module: "LightningModule", DataModule: "LightningDataModule", Callback: "Callback"}


def lightning_base(kind: type, counterpart: type) -> type | None:
    """Return the Lightning class among ``kind`` and its base classes; None if there is none.

    Args:
        counterpart: the corresponding class of roomier: Module, DataModule or Callback.
    """
    name = COUNTERPARTS[counterpart]
    return next((c for c in kind.__mro__ if c.__name__ == name and c.__module__.startswith(PACKAGES)), None)


def overrides(obj: object, name: str, base: type) -> bool:
    """Return True if ``obj`` or its class overrides the method ``name`` of ``base`` or of the corresponding Lightning
    class.

    As in Lightning, a method that is set to None is not an override.
    """
    defaults = [getattr(each, name, None) for each in (lightning_base(type(obj), base), base) if each is not None]
    if name in vars(obj):
        own = vars(obj)[name]
        return own is not None and getattr(own, "__func__", own) not in defaults
    own = getattr(type(obj), name, None)
    return own is not None and own is not defaults[0]


def replace_none(obj: object, base: type) -> None:
    """Replace methods of ``obj`` that are set to None with the methods of ``base``."""
    for owner in (obj, *type(obj).__mro__):
        for name, value in list(vars(owner).items()):
            if value is None and getattr(obj, name, None) is None and callable(getattr(base, name, None)):
                vars(obj)[name] = MethodType(getattr(base, name), obj)


def is_one(obj: object, counterpart: type) -> bool:
    """Return True if ``obj`` is a Module, DataModule or Callback from roomier or Lightning."""
    return isinstance(obj, counterpart) or lightning_base(type(obj), counterpart) is not None
