"""Conversion of values to bytes for other ranks: a JSON header, followed by the bytes of tensors.

Without pickles, decoding does not execute code from the sender. A message contains numbers, strings, containers,
tensors, paths, and objects of roomier's own classes. If the receiver allows pickles, a message can also contain pickles
of other objects, which can execute arbitrary code.
"""

from __future__ import annotations

import builtins
import json
import pickle
import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from roomier.core.errors import RoomierError, Shown, shorten

_CONTAINERS: dict[str, type] = {each.__name__: each for each in (list, tuple, set, frozenset, torch.Size)}
_HEADER = struct.Struct("<Q")


def encode(value: Any, *, allows_pickle: bool = False) -> bytes:
    """Convert ``value`` to bytes.

    A NumPy scalar becomes a Python number. Without pickles, a mapping of a class outside roomier becomes a dict.

    Args:
        allows_pickle: if True, pickle objects of other types. The receiver must pass the same value to :func:`decode`.

    Raises:
        RoomierError: ``value`` contains an object that cannot be sent. The error names its type.
    """
    encoder = _Encoder(allows_pickle)
    head = json.dumps(encoder.node(value)).encode()
    return b"".join([_HEADER.pack(len(head)), head, *encoder.blobs])


def decode(data: bytes | bytearray, *, allows_pickle: bool = False) -> Any:
    """Convert the result of :func:`encode` back to the value. Each tensor is on a device of the same type as the
    sender's tensor.

    Raises:
        ValueError: ``data`` contains a pickle although ``allows_pickle`` is False, or a class that is not allowed.
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
        """Return ``value`` as a JSON scalar, or as a list that contains the name of its kind and its parts."""
        kind = type(value)
        if isinstance(value, Enum):
            return ["enum", _name_of(kind), value.name] if _is_own(kind) else self._pickled(value)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if kind in _CONTAINERS.values():
            return [kind.__name__, self._nodes(value)]
        if kind is dict or (isinstance(value, Mapping) and not self._allows_pickle and not _is_own(kind)):
            return ["dict", self._nodes(value.keys()), self._nodes(value.values())]
        if kind in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
            flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
            blob = self._blob(flat.view(torch.uint8).numpy().tobytes())
            return ["tensor", str(value.dtype), list(value.shape), value.device.type, *blob]
        if isinstance(value, (bytes, bytearray)):
            return ["bytes", *self._blob(bytes(value))]
        if isinstance(value, np.generic):
            return self.node(value.item())
        if isinstance(value, torch.dtype):
            return ["dtype", str(value)]
        if isinstance(value, PurePath):
            return ["path", str(value)]
        if isinstance(value, type) and _is_own(value):
            return ["class", _name_of(value)]
        return self._object(value)

    def _object(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, RoomierError) and _is_own(kind):
            parts = (value.field, self._received(value.received), value.problem, value.action, str(value))
            return ["error", _name_of(kind), *parts]
        if _is_own(kind):
            if _is_named_tuple(kind):
                return ["call", _name_of(kind), self._nodes(value)]
            if _reduces_itself(kind):
                return ["call", _name_of(kind), self._nodes(value.__reduce__()[1])]
            if is_dataclass(kind):
                return ["dataclass", _name_of(kind), self._nodes(getattr(value, each.name) for each in fields(kind))]
        if isinstance(value, Exception) and kind.__module__ == "builtins":
            return ["exception", kind.__name__, self._nodes(value.__reduce__()[1])]
        return self._pickled(value)

    def _received(self, value: object) -> Any:
        """Encode ``value`` if it is plain data without tensors. Otherwise, encode its shortened text."""
        own = _Encoder(allows_pickle=False)
        with suppress(RoomierError, RecursionError):
            node = own.node(value)
            if not own.blobs:
                return node
        return self.node(Shown(shorten(value)))

    def _nodes(self, values: Iterable[Any]) -> list[Any]:
        return [self.node(each) for each in values]

    def _pickled(self, value: Any) -> Any:
        problem = "objects of this type are not sent to other ranks"
        if self._allows_pickle:
            try:
                return ["pickle", *self._blob(pickle.dumps(value))]
            except Exception as error:  # pickle calls methods of the object, which can raise any error
                problem = f"cannot be pickled for other ranks ({type(error).__name__}: {error})"
        action = "Use numbers, strings, tensors, or lists, tuples and dicts of these values"
        raise RoomierError("value", type(value), problem, action)

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
            "call": self._call,
            "dataclass": self._dataclass,
            "error": self._error,
            "exception": self._exception,
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
        if not size:
            return torch.empty(shape, dtype=_dtype(dtype), device=device)
        flat = torch.frombuffer(bytearray(self._blob(start, size)), dtype=torch.uint8)
        return flat.view(_dtype(dtype)).view(shape).to(device)

    def _call(self, name: str, values: list[Any]) -> Any:
        kind = _own_class(name, lambda kind: _is_named_tuple(kind) or _reduces_itself(kind))
        return kind(*self._values(values))

    def _dataclass(self, name: str, values: list[Any]) -> Any:
        kind: Any = _own_class(name, is_dataclass)
        made = object.__new__(kind)  # without __init__, like copy.copy
        for each, value in zip(fields(kind), self._values(values), strict=True):
            object.__setattr__(made, each.name, value)
        return made

    def _error(self, name: str, field: str, received: Any, problem: str, action: str, text: str) -> RoomierError:
        kind = _own_class(name, lambda kind: issubclass(kind, RoomierError))
        error: RoomierError = kind.__new__(kind)
        RoomierError.__init__(error, field, self.value(received), problem, action)
        error.args = (text,)  # the text of a subclass can differ
        return error

    def _exception(self, name: str, values: list[Any]) -> Exception:
        kind = getattr(builtins, name)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise ValueError(f"{name} is not an exception")
        error: Exception = kind(*self._values(values))
        return error

    def _unpickled(self, start: int, size: int) -> Any:
        if not self._allows_pickle:
            raise ValueError("a rank sent a pickle, but this call does not allow pickles")
        return pickle.loads(self._blobs[start : start + size])


def _is_own(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "roomier" and "<locals>" not in kind.__qualname__


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _reduces_itself(kind: type) -> bool:
    return any("__reduce__" in vars(each) for each in kind.__mro__ if _is_own(each))


def _name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _own_class(name: str, is_allowed: Callable[[type], bool]) -> Any:
    """Return roomier's class ``name``.

    Raises:
        ValueError: ``name`` is not a class of roomier, or ``is_allowed`` returns False for the class.
    """
    module, _, path = name.partition(":")
    if module.split(".")[0] != "roomier" or "__" in name:
        raise ValueError(f"{name} is not a class of roomier")
    found: Any = import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    if not (isinstance(found, type) and _is_own(found) and is_allowed(found)):
        raise ValueError(f"{name} is not a class that ranks can send")
    return found


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is not a dtype")
    return found
