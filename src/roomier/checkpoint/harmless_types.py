"""Classes that a Lightning checkpoint holds beside tensors and plain values, read without importing any of them.

torch's reader for ``weights_only=True`` refuses every class it was not told of. It is told of these under their names,
with functions and classes of this file in their place: what comes out is a plain value. The list is what Lightning, and
those who call its ``save_hyperparameters`` with what a parser gave them, write into the files of ordinary runs:

- ``AttributeDict``: what ``hparams`` is in Lightning, where it is nested in another value; a dict;
- ``argparse.Namespace``: the arguments of a script, kept as one hyperparameter; a dict;
- paths of ``pathlib``: folders among the hyperparameters; a string;
- NumPy scalars and their dtypes: scores and learning rates that NumPy computed; a number, made of the bytes in the
  file for boolean, integer and floating dtypes alone;
- ``DictConfig`` and ``ListConfig`` of OmegaConf, which Hydra hands over: a dict that reads as attributes, and a list.
  What refers to another value (``"${a.b}"``), or is to be given (``"???"``), stays that text, as :class:`Unresolved`;
- ``collections.defaultdict``: a dict;
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

from roomier.api.hparams import HyperParameters

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
_CONFIGS = ("omegaconf.dictconfig.DictConfig", "omegaconf.listconfig.ListConfig")
_NODES = tuple(f"omegaconf.nodes.{kind}Node" for kind in ("Any", "String", "Integer", "Float", "Boolean", "Path"))
_FACTS = ("omegaconf.base.ContainerMetadata", "omegaconf.base.Metadata")
_TYPES_NAMED_THERE = ("typing.Any", *(f"builtins.{name}" for name in ("int", "float", "bool", "str", "list", "dict")))


class _Namespace:
    """In the place of ``argparse.Namespace``."""


class Unresolved(str):
    """The text of a value of OmegaConf that is worked out, or missing, when it is read."""


class _Config:
    """In the place of a container of OmegaConf: its ``_content`` is a dict or list of nodes, None, or an
    :class:`Unresolved`."""


class _Node:
    """In the place of a value in one: ``_val``."""


class _Facts:
    """In the place of what OmegaConf notes of each of them, which is not looked at."""


class _Type:
    """In the place of every type that is named in such notes. It stands for none of them, so it is nobody's value."""


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


def _empty(*_: Any) -> dict[Any, Any]:
    return {}


def _by_name() -> list[Any]:
    listed: list[tuple[Any, str]] = [(OrderedDict, name) for name in _ATTRIBUTE_DICTS]
    listed += [(_Namespace, "argparse.Namespace"), (_NumpyDtype, "numpy.dtype")]
    listed += [(_number, name) for name in _STOPPING_REASONS]
    listed += [(_numpy_scalar, f"{module}.scalar") for module in _NUMPY_CORES]
    listed += [(_Config, name) for name in _CONFIGS] + [(_Node, name) for name in _NODES]
    listed += [(_Facts, name) for name in _FACTS] + [(_Type, name) for name in _TYPES_NAMED_THERE]
    listed += [(_empty, "collections.defaultdict")]
    for module in _PATH_MODULES:
        listed += [(_posix_path, f"{module}.{name}") for name in ("PosixPath", "PurePosixPath")]
        listed += [(_windows_path, f"{module}.{name}") for name in ("WindowsPath", "PureWindowsPath")]
    return listed


def harmless_types() -> AbstractContextManager[Any]:
    """Within it, ``torch.load(weights_only=True)`` reads them; :func:`as_plain` makes plain values of what it gave."""
    context: AbstractContextManager[Any] = torch.serialization.safe_globals(_by_name())
    return context


def as_plain(value: Any) -> Any:
    """``value`` with dicts in the place of what was read as a namespace or a dict of another class, and with what
    OmegaConf's containers hold in theirs.

    Raises:
        ValueError: it holds a type, or a container in a form that is not known.
    """
    if isinstance(value, _Namespace):
        return as_plain(vars(value))
    if isinstance(value, _Config):
        return _content_of(value)
    if isinstance(value, (type, _Type, _Node, _Facts)):
        raise ValueError("it holds a type, such as int, as a value")
    if isinstance(value, Mapping):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_plain(item) for item in value]
    if type(value) is tuple:
        return tuple(as_plain(item) for item in value)
    return value


def _content_of(config: _Config) -> Any:
    content = vars(config).get("_content", config)
    if content is None:
        return None
    if isinstance(content, str):
        return Unresolved(content)
    if isinstance(content, dict):
        return HyperParameters({key: _value_of(each) for key, each in content.items()})
    if isinstance(content, list):
        return [_value_of(each) for each in content]
    raise ValueError("it holds a container of OmegaConf in a form that is not known")


def _value_of(node: Any) -> Any:
    if not isinstance(node, _Node):
        return as_plain(node)
    value = vars(node).get("_val", node)
    return Unresolved(value) if isinstance(value, str) and ("${" in value or value == "???") else as_plain(value)


def unresolved_in(value: Any, place: str = "") -> list[str]:
    """Where an :class:`Unresolved` stands in what :func:`as_plain` gave: ``"['cfg']['lr'] = '${base.lr}'"``."""
    if isinstance(value, Unresolved):
        return [f"{place} = {str(value)!r}"]
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, each in items for found in unresolved_in(each, f"{place}[{key!r}]")]
