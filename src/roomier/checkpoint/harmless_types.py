"""Classes in Lightning checkpoints that are read as plain values, without importing the classes.

torch's reader for ``weights_only=True`` rejects every class that is not registered. This module registers replacements
under the names of the original classes, so the reader returns plain values. It covers the classes that Lightning writes
into the files of ordinary runs, and the classes that users often pass to ``save_hyperparameters``:

- ``AttributeDict``, the class of nested ``hparams`` in Lightning: read as a dict.
- ``argparse.Namespace``, the arguments of a script in one hyperparameter: read as a dict.
- Paths of ``pathlib``, for example folders: read as strings.
- NumPy scalars and their dtypes, for example scores and learning rates: read as numbers. The bytes in the file are
  decoded for boolean, integer and floating-point dtypes only.
- ``DictConfig`` and ``ListConfig`` of OmegaConf, which Hydra passes: read as a dict with attribute access, and as a
  list. Values that refer to another value (``"${a.b}"``), and missing values (``"???"``), are read as text of class
  :class:`Unresolved`.
- ``collections.defaultdict``: read as a dict.
- ``EarlyStoppingReason``, an enum that the state of Lightning's EarlyStopping contains in some versions: read as its
  number.

The replacements only store strings, numbers and dicts, so none of them can execute code from the file.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import PurePath, PurePosixPath, PureWindowsPath
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
    """Substitute for ``argparse.Namespace``."""


class Unresolved(str):
    """Text of an OmegaConf value that is an interpolation or is missing."""


class _Config:
    """Substitute for a container of OmegaConf. The ``_content`` of a container is a dict or list of nodes, None, or a
    string."""


class _Node:
    """Substitute for the node of a value in an OmegaConf container. The node stores the value in ``_val``."""


class _OmegaConfMetadata:
    """Substitute for the metadata of OmegaConf containers and values. The metadata is ignored."""


class _Type:
    """Substitute for every type that the metadata of OmegaConf contains. This substitute is not a valid value in a
    checkpoint.
    """


class _NumpyDtype:
    """Substitute for ``numpy.dtype``, with the name and the byte order in the file."""

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


def _path(kind: type[PurePath], *parts: str) -> str:
    return str(kind(*parts))


def _by_name() -> list[Any]:
    listed: list[tuple[Any, str]] = [(OrderedDict, name) for name in _ATTRIBUTE_DICTS]
    listed += [(_Namespace, "argparse.Namespace"), (_NumpyDtype, "numpy.dtype")]
    listed += [(int, name) for name in _STOPPING_REASONS]
    listed += [(_numpy_scalar, f"{module}.scalar") for module in _NUMPY_CORES]
    listed += [(_Config, name) for name in _CONFIGS] + [(_Node, name) for name in _NODES]
    listed += [(_OmegaConfMetadata, name) for name in _FACTS] + [(_Type, name) for name in _TYPES_NAMED_THERE]
    listed += [(lambda *_: {}, "collections.defaultdict")]
    for module in _PATH_MODULES:
        for kind in (PurePosixPath, PureWindowsPath):
            names = (f"{module}.{kind.__name__}", f"{module}.{kind.__name__.removeprefix('Pure')}")
            listed += [(partial(_path, kind), name) for name in names]
    return listed


def harmless_types() -> AbstractContextManager[Any]:
    """Return a context in which ``torch.load(weights_only=True)`` reads the registered classes.

    Convert the result of ``torch.load`` with :func:`as_plain`.
    """
    context: AbstractContextManager[Any] = torch.serialization.safe_globals(_by_name())
    return context


def as_plain(value: Any) -> Any:
    """Return ``value`` with namespaces, other mappings and OmegaConf containers converted to plain values.

    Raises:
        ValueError: ``value`` contains a type, or an OmegaConf container in an unknown form.
    """
    if isinstance(value, _Namespace):
        return as_plain(vars(value))
    if isinstance(value, _Config):
        return _content_of(value)
    if isinstance(value, (type, _Type, _Node, _OmegaConfMetadata)):
        raise ValueError("it contains a type, such as int, as a value")
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
    raise ValueError("it contains an OmegaConf container in an unknown form")


def _value_of(node: Any) -> Any:
    if not isinstance(node, _Node):
        return as_plain(node)
    value = vars(node).get("_val", node)
    return Unresolved(value) if isinstance(value, str) and ("${" in value or value == "???") else as_plain(value)


def unresolved_in(value: Any, place: str = "") -> list[str]:
    """Return the path and text of each :class:`Unresolved` in ``value``, such as ``"['cfg']['lr'] = '${base.lr}'"``.

    Args:
        value: result of :func:`as_plain`.
        place: path of ``value``; each path in the result begins with this path.
    """
    if isinstance(value, Unresolved):
        return [f"{place} = {str(value)!r}"]
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, each in items for found in unresolved_in(each, f"{place}[{key!r}]")]
