"""Pickles of user objects for the ranks of a notebook, and of their results for the notebook.

The notebook sends its classes and functions by value (cloudpickle), because the ranks cannot import them. A rank
returns objects of these classes by reference, so that the notebook receives objects of its own classes. Tensors are
written to the pipe one at a time, so that neither side holds a second copy of a model.
"""

from __future__ import annotations

import inspect
import io
import os
import pickle
import sys
from collections.abc import Iterator, Mapping
from functools import partial, reduce
from importlib import import_module
from typing import IO, Any

import torch
from torch import Tensor, nn

from roomier.core.errors import RoomierError

_MAX_DEPTH = 12
_SHARES = "Create it in a hook such as setup(), which each rank calls, or return None for it from __getstate__"


class _Tensors:
    """Reduction of tensors to their storages, for picklers.

    Attributes:
        has_values: False to leave out the values of tensors, if the pickle is only a check.
    """

    has_values = True

    def __init__(self) -> None:
        self._storages: dict[int, Any] = {}  # tensors that share a storage also share it after the transfer

    def reduced(self, value: Any) -> Any:
        """Return the reduction of ``value`` if it is a dense tensor or its storage; otherwise, NotImplemented."""
        if isinstance(value, torch.UntypedStorage):
            content: Any = torch.empty(0, dtype=torch.uint8, device=value.device).set_(value).cpu().numpy()
            return _storage, (pickle.PickleBuffer(content if self.has_values else b""),)
        is_dense = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and value.is_leaf
        if not is_dense or value.device.type == "meta" or value.is_quantized or value.is_conj() or value.is_neg():
            return NotImplemented
        storage = value.untyped_storage()
        storage = self._storages.setdefault(storage.data_ptr() or id(storage), storage)
        place = value.storage_offset(), tuple(value.shape), value.stride()
        kind = type(value) if type(value) is nn.Parameter else None
        return _tensor, (storage, value.dtype, place, value.requires_grad, kind), vars(value) or None


def _storage(content: Any) -> torch.UntypedStorage:
    received = torch.frombuffer(content, dtype=torch.uint8) if len(content) else torch.empty(0, dtype=torch.uint8)
    return received.clone().untyped_storage()  # torch aligns its memory, and the kernels depend on the alignment


def _tensor(storage: torch.UntypedStorage, dtype: torch.dtype, place: Any, requires_grad: bool, kind: Any) -> Tensor:
    with torch.no_grad():
        made = torch.empty(0, dtype=dtype).set_(storage, *place)
    return made.requires_grad_(requires_grad) if kind is None else kind(made, requires_grad=requires_grad)


def write_by_value(value: Any, file: Any, *, has_values: bool = True) -> None:
    """Pickle ``value`` to ``file``. Classes and functions of ``__main__`` are written by value.

    Args:
        has_values: False to leave out the values of tensors, for a check.
    """
    pickler = _by_value()(file)
    pickler.tensors.has_values = has_values
    pickler.dump(value)


def _by_value() -> Any:
    try:
        cloudpickle: Any = import_module("cloudpickle")  # late import: optional, and only notebooks need it
    except ImportError as error:
        action = "Run `pip install 'roomier[notebooks]'`, or use devices=1"
        raise RoomierError(
            "cloudpickle", None, "is not installed, and a notebook needs it for ranks", action
        ) from error

    class ByValue(cloudpickle.CloudPickler):  # type: ignore[misc]  # Any
        def __init__(self, file: Any) -> None:
            super().__init__(file, protocol=5)
            self.tensors = _Tensors()

        def reducer_override(self, obj: Any) -> Any:
            reduced = self.tensors.reduced(obj)
            return super().reducer_override(obj) if reduced is NotImplemented else reduced

    return ByValue


class ByReference(pickle.Pickler):
    """Pickler of the results of a rank. Classes and functions of ``__main__`` are written by name."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=5)
        self._tensors = _Tensors()

    def reducer_override(self, obj: Any) -> Any:
        if getattr(obj, "__module__", None) == "__main__" and hasattr(obj, "__qualname__"):
            return _of_main, (obj.__qualname__,)
        return self._tensors.reduced(obj)


def _of_main(name: str) -> Any:
    return reduce(getattr, name.split("."), sys.modules["__main__"])


def by_reference(value: Any) -> bytes | None:
    """Return the pickle of ``value`` by reference; None if it cannot be pickled."""
    file = io.BytesIO()
    try:
        ByReference(file).dump(value)
    except Exception:  # __reduce__ of any class can raise any error
        return None
    return file.getvalue()


def check(values: Mapping[str, Any]) -> None:
    """Check that :func:`write_by_value` can pickle each of ``values``.

    Raises:
        RoomierError: a value cannot be pickled. The error names the innermost attribute that causes this.
    """
    for name, value in values.items():
        if (error := _error_of(value)) is not None:
            path, found, cause = _innermost(name, value, error, set())
            problem = f"cannot be sent to the ranks: {type(cause).__name__}: {cause}"
            raise RoomierError(path, found, problem, _SHARES) from cause


def _error_of(value: Any) -> Exception | None:
    try:
        with open(os.devnull, "wb") as file:
            write_by_value(value, file, has_values=False)
    except RoomierError:
        raise
    except Exception as error:  # __reduce__ of any class can raise any error
        return error
    return None


def _innermost(name: str, value: Any, error: Exception, seen: set[int]) -> tuple[str, Any, Exception]:
    seen.add(id(value))
    if len(seen) > _MAX_DEPTH:
        return name, value, error
    for part_name, part in _parts(name, value):
        if id(part) not in seen and (of_part := _error_of(part)) is not None:
            return _innermost(part_name, part, of_part, seen)
    return name, value, error


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that ``value`` refers to, with names for errors."""
    if isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", each) for key, each in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{name}[{index}]", each) for index, each in enumerate(value))
    elif isinstance(value, partial):
        yield from ((f"{name}.{part}", getattr(value, part)) for part in ("func", "args", "keywords"))
    elif inspect.ismethod(value):
        yield f"{name}.__self__", value.__self__
    elif inspect.isfunction(value):
        variables = inspect.getclosurevars(value)
        both = {**variables.nonlocals, **variables.globals}
        yield from ((f"{each} (a variable that {name} uses)", found) for each, found in both.items())
    elif hasattr(value, "__dict__"):
        if isinstance(value, nn.Module):
            yield from ((f"{name}.{key}", each) for key, each in value.named_children())
        if not isinstance(value, type):
            yield from ((f"{name}.{key}", each) for key, each in vars(value).items())
        kind = value if isinstance(value, type) else type(value)
        if kind.__module__ == "__main__":
            yield from (
                (f"{kind.__name__}.{key}", each) for key, each in vars(kind).items() if inspect.isfunction(each)
            )


def read(file: IO[bytes]) -> Any:
    """Read one value that a pickler of this file wrote."""
    return pickle.load(file)
