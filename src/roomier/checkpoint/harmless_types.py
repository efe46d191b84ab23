"""Classes that a Lightning checkpoint holds beside tensors and plain values, read without importing any of them.

torch's reader for ``weights_only=True`` refuses every class it was not told of. It is told of these under their names,
with functions and classes of this file in their place: what comes out is a plain value. The list is what Lightning, and
those who call its ``save_hyperparameters`` with what a parser gave them, write into the files of ordinary runs:

- ``AttributeDict``: what ``hparams`` is in Lightning, where it is nested in another value; a dict;
- ``argparse.Namespace``: the arguments of a script, kept as one hyperparameter; a dict;
- paths of ``pathlib``: folders among the hyperparameters; a string;
- NumPy scalars and their dtypes: scores and learning rates that NumPy computed; a number, made of the bytes in the
  file for boolean, integer and floating dtypes alone;
- ``EarlyStoppingReason``: an enum of Lightning's EarlyStopping, which its state held in some versions; its number.

None of them can run code: they take strings, numbers and dicts, and keep them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import torch

_ATTRIBUTE_DICTS = (
    "lightning.fabric.utilities.data.AttributeDict",
    "lightning_fabric.utilities.data.AttributeDict",
    "lightning.pytorch.utilities.parsing.AttributeDict",
    "pytorch_lightning.utilities.parsing.AttributeDict",
)
_PATH_MODULES = ("pathlib", "pathlib._local")
_STOPPING_REASONS = (
    "lightning.pytorch.callbacks.early_stopping.EarlyStoppingReason",
    "pytorch_lightning.callbacks.early_stopping.EarlyStoppingReason",
)
_NUMPY_CORES = ("numpy.core.multiarray", "numpy._core.multiarray")
_KINDS_OF_NUMBERS = "biuf"


class _Namespace:
    """In the place of ``argparse.Namespace``."""


class _NumpyDtype:
    """In the place of ``numpy.dtype``: its name and byte order, as the file has them."""

    def __init__(self, name: str, *_: Any) -> None:
        self.name = str(name)
        self.byte_order = "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.byte_order = str(state[1])

    def numpy(self) -> np.dtype[Any]:
        found = np.dtype(self.name)
        if found.kind not in _KINDS_OF_NUMBERS:
            raise ValueError(f"a NumPy scalar of dtype {self.name}")
        return found.newbyteorder(">") if self.byte_order == ">" else found.newbyteorder("<")


def _numpy_scalar(dtype: _NumpyDtype, data: bytes) -> bool | int | float:
    value: bool | int | float = np.frombuffer(data, dtype.numpy(), count=1)[0].item()
    return value


def _posix_path(*parts: str) -> str:
    return str(PurePosixPath(*parts))


def _windows_path(*parts: str) -> str:
    return str(PureWindowsPath(*parts))


def _number(value: int) -> int:
    return int(value)


def _by_name() -> list[Any]:
    listed: list[tuple[Any, str]] = [(OrderedDict, name) for name in _ATTRIBUTE_DICTS]
    listed += [(_Namespace, "argparse.Namespace"), (_NumpyDtype, "numpy.dtype")]
    listed += [(_number, name) for name in _STOPPING_REASONS]
    listed += [(_numpy_scalar, f"{module}.scalar") for module in _NUMPY_CORES]
    for module in _PATH_MODULES:
        listed += [(_posix_path, f"{module}.{name}") for name in ("PosixPath", "PurePosixPath")]
        listed += [(_windows_path, f"{module}.{name}") for name in ("WindowsPath", "PureWindowsPath")]
    return listed


def harmless_types() -> AbstractContextManager[Any]:
    """Within it, ``torch.load(weights_only=True)`` reads them; :func:`as_plain` makes plain values of what it gave."""
    context: AbstractContextManager[Any] = torch.serialization.safe_globals(_by_name())
    return context


def as_plain(value: Any) -> Any:
    """``value`` with dicts in the place of what was read as a namespace or a dict of another class."""
    if isinstance(value, _Namespace):
        return as_plain(vars(value))
    if isinstance(value, Mapping):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_plain(item) for item in value]
    if type(value) is tuple:
        return tuple(as_plain(item) for item in value)
    return value
