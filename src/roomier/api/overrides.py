"""Functions that return which methods a user class overrides, and to which base class it corresponds."""

from __future__ import annotations

from roomier.api.callback import Callback
from roomier.api.datamodule import DataModule
from roomier.api.module import Module

PACKAGES = ("lightning.pytorch.", "pytorch_lightning.")
COUNTERPARTS: dict[type, str] = {Module: "LightningModule", DataModule: "LightningDataModule", Callback: "Callback"}


def lightning_base(kind: type, counterpart: type) -> type | None:
    """Return Lightning's own class among the base classes of ``kind``. Return None if ``kind`` is not a class of
    Lightning.

    Args:
        counterpart: Module, DataModule or Callback, for LightningModule, LightningDataModule or Callback of Lightning.
    """
    name = COUNTERPARTS[counterpart]
    return next((c for c in kind.__mro__ if c.__name__ == name and c.__module__.startswith(PACKAGES)), None)


def overrides(obj: object, name: str, base: type) -> bool:
    """Return True if ``obj`` or its class overrides the method ``name`` of ``base``, or of Lightning's counterpart."""
    base = lightning_base(type(obj), base) or base
    return name in vars(obj) or getattr(type(obj), name, None) is not getattr(base, name, None)


def is_one(obj: object, counterpart: type) -> bool:
    """Return True if ``obj`` is a Module, DataModule or Callback from roomier or Lightning."""
    return isinstance(obj, counterpart) or lightning_base(type(obj), counterpart) is not None
