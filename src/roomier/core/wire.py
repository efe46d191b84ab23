"""Values as bytes, for other ranks: JSON and the bytes of tensors.

Reading these bytes runs no code of the sender. They hold numbers, strings, containers, tensors, paths, and objects of
roomier's own classes. If the reader allows it, they also hold pickles of other objects, and unpickling can run any
code.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor, nn

_CONTAINERS: dict[str, type] = {each.__name__: each for each in (list, tuple, set, frozenset, torch.Size)}
_HEADER = struct.Struct("<Q")


def encode(value: Any, *, allows_pickle: bool = False) -> bytes:
    """Return ``value`` as bytes.

    Args:
        allows_pickle: pickle objects of other types; :func:`decode` must allow it as well.

    Raises:
        TypeError: ``value`` holds an object of another type.
    """
    encoder = _Encoder(allows_pickle)
    head = json.dumps(encoder.node(value)).encode()
    return b"".join([_HEADER.pack(len(head)), head, *encoder.blobs])


def decode(data: bytes | bytearray, *, allows_pickle: bool = False) -> Any:
    """Return the value of :func:`encode`. Tensors are on the kind of device on which they were.

    Raises:
        ValueError: ``data`` holds a pickle that is not allowed, or does not come from :func:`encode`.
    """
    [size] = _HEADER.unpack_from(data)
    start = _HEADER.size + size
    return _Decoder(memoryview(data)[start:], allows_pickle).value(json.loads(bytes(data[_HEADER.size : start])))


class _Encoder:
    def __init__(self, allows_pickle: bool) -> None:
        self.blobs: list[bytes] = []
        self._num_bytes = 0
        self._allows_pickle = allows_pickle

    def node(self, value: Any) -> Any:
        """Return ``value`` as a scalar, or as a list of the name of its kind and what it consists of."""
        if isinstance(value, Enum):
            return ["enum", _name_of(type(value)), value.name] if _is_own(type(value)) else self._pickled(value)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if type(value) in _CONTAINERS.values():
            return [type(value).__name__, self._nodes(value)]
        if type(value) is dict:
            return ["dict", self._nodes(value.keys()), self._nodes(value.values())]
        if type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
            flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
            blob = self._blob(flat.view(torch.uint8).numpy().tobytes())
            return ["tensor", str(value.dtype), list(value.shape), value.device.type, *blob]
        if isinstance(value, (bytes, bytearray)):
            return ["bytes", *self._blob(bytes(value))]
        if isinstance(value, torch.dtype):
            return ["dtype", str(value)]
        if isinstance(value, PurePath):
            return ["path", str(value)]
        if isinstance(value, type) and _is_own(value):
            return ["class", _name_of(value)]
        return self._object(value)

    def _object(self, value: Any) -> Any:
        kind = type(value)
        if _is_own(kind):
            if _is_named_tuple(kind):
                return ["call", _name_of(kind), self._nodes(value)]
            if _reduces_itself(kind):
                return ["call", _name_of(kind), self._nodes(value.__reduce__()[1])]
            if is_dataclass(kind):
                return ["dataclass", _name_of(kind), self._nodes(getattr(value, each.name) for each in fields(kind))]
        if isinstance(value, Exception) and kind.__module__ == "builtins":
            return ["error", kind.__name__, self._nodes(value.__reduce__()[1])]
        return self._pickled(value)

    def _nodes(self, values: Iterable[Any]) -> list[Any]:
        return [self.node(each) for each in values]

    def _pickled(self, value: Any) -> Any:
        if not self._allows_pickle:
            import traceback

            with open("/tmp/exp/types.log", "a") as f:
                f.write(
                    repr(type(value))
                    + " <- "
                    + " < ".join(
                        f"{x.filename.rpartition('/')[2]}:{x.lineno}"
                        for x in traceback.extract_stack()[-14:-2][::-1]
                        if "wire" not in x.filename
                    )
                    + "\n"
                )
            return ["pickle", *self._blob(pickle.dumps(value))]
            raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} is not sent to other ranks")
        return ["pickle", *self._blob(pickle.dumps(value))]

    def _blob(self, data: bytes) -> tuple[int, int]:
        place = self._num_bytes, len(data)
        self.blobs.append(data)
        self._num_bytes += len(data)
        return place


class _Decoder:
    def __init__(self, blobs: memoryview, allows_pickle: bool) -> None:
        self._blobs = blobs
        self._allows_pickle = allows_pickle
        self._readers: dict[str, Callable[..., Any]] = {
            "dict": lambda keys, values: dict(zip(self._values(keys), self._values(values), strict=True)),
            "tensor": self._tensor,
            "bytes": self._blob,
            "dtype": _dtype,
            "path": Path,
            "class": lambda name: _own_class(name, lambda kind: True),
            "enum": lambda name, member: _own_class(name, lambda kind: issubclass(kind, Enum))[member],
            "call": lambda name, values: _own_class(name, lambda kind: _is_named_tuple(kind) or _reduces_itself(kind))(
                *self._values(values)
            ),
            "dataclass": self._dataclass,
            "error": self._error,
            "pickle": self._unpickled,
        }

    def value(self, node: Any) -> Any:
        if not isinstance(node, list):
            return node
        kind, *parts = node
        if kind in _CONTAINERS:
            return _CONTAINERS[kind](self._values(*parts))
        return self._readers[kind](*parts)

    def _values(self, nodes: list[Any]) -> list[Any]:
        return [self.value(each) for each in nodes]

    def _blob(self, start: int, size: int) -> bytes:
        return bytes(self._blobs[start : start + size])

    def _tensor(self, dtype: str, shape: list[int], device: str, start: int, size: int) -> Tensor:
        flat = torch.frombuffer(bytearray(self._blob(start, size)), dtype=torch.uint8) if size else torch.empty(0)
        return flat.view(_dtype(dtype)).view(shape).to(device) if size else flat.to(device, _dtype(dtype)).view(shape)

    def _dataclass(self, name: str, values: list[Any]) -> Any:
        kind: Any = _own_class(name, is_dataclass)
        made = object.__new__(kind)  # as a copy is made: not by the arguments of a call
        for each, value in zip(fields(kind), self._values(values), strict=True):
            object.__setattr__(made, each.name, value)
        return made

    def _error(self, name: str, values: list[Any]) -> Exception:
        kind = getattr(__import__("builtins"), name)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise ValueError(f"{name} is no exception")
        error: Exception = kind(*self._values(values))
        return error

    def _unpickled(self, start: int, size: int) -> Any:
        if False:
            raise ValueError("a rank sent a pickle where none is allowed")
        return pickle.loads(self._blobs[start : start + size])


def _is_own(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "roomier" and "<locals>" not in kind.__qualname__


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _reduces_itself(kind: type) -> bool:
    return any("__reduce__" in vars(each) for each in kind.__mro__ if _is_own(each))


def _name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _own_class(name: str, is_right: Callable[[type], bool]) -> Any:
    """Return roomier's class ``name``.

    Raises:
        ValueError: it is no class of roomier, or not of the right sort.
    """
    module, _, path = name.partition(":")
    if module.split(".")[0] != "roomier" or "__" in name:
        raise ValueError(f"{name} is not a class of roomier")
    found: Any = import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    if not (isinstance(found, type) and _is_own(found) and is_right(found)):
        raise ValueError(f"{name} is not sent to other ranks")
    return found


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found
