"""Conversion of a nested state to named tensors and a tree that JSON can represent, and back.

In the tree, a dict whose only key begins with ``~`` is a tag for a value that JSON cannot represent:

=====================================  =========================================================
``{"~tensor": [name, dtype, shape]}``   a tensor, stored elsewhere under ``name``; tied tensors have the same name
``{"~tuple": [...]}``                   a tuple
``{"~dict": [[key, value], ...]}``      a dict with a key that is not a string, or begins with ``~``
``{"~float": "inf"}``                   ``inf``, ``-inf`` or ``nan``
``{"~int": "0x..."}``                   an integer of more than 64 bits
=====================================  =========================================================

For readability, the name of a tensor is its path joined by dots. When the tensor is loaded, however, the position of
its tag determines its path, and names are never split, so keys can contain dots.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from roomier.checkpoint.tensor_file import CODES
from roomier.core.errors import CheckpointError
from roomier.core.forms import Form, FormError, anything, count, items, list_of, one_of, place_of, text
from roomier.core.forms import fields as form_of_fields
from roomier.core.sharded import is_sharded, local_part
from roomier.core.untrusted import MAX_DEPTH, check_depth

Path: TypeAlias = tuple[Any, ...]
Json: TypeAlias = Any

# Dtypes that safetensors can write and torch can read, except complex128 and float8_e8m0fnu.
DTYPES: dict[str, torch.dtype] = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}

_MIN_INTEGER, _MAX_INTEGER = -(2**63), 2**64 - 1
_HEADER_KEY = "__metadata__"  # reserved by safetensors


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor that was not loaded.

    Attributes:
        shape: shape of the full (global) tensor.
        dtype: dtype of the tensor.

    Example:
        >>> spec = roomier.checkpoint.peek("runs/version_0/checkpoints/last")["module"]["layer.weight"]
        >>> print(spec)  # float32[1, 1]
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class StoredTensor:
    """Placeholder for a tensor in the result of :func:`join`.

    Attributes:
        name: name of the tensor in the files.
        spec: shape and dtype of the tensor.
    """

    name: str
    spec: TensorSpec


def split(state: Mapping[Any, Any]) -> tuple[dict[str, Tensor], Json]:
    """Return the named tensors of ``state``, in the order of the state, and the tree of all other values.

    No tensor is copied. Tied tensors are returned once. Mappings of any class are stored as dicts. Every other value
    must have exactly one of the types dict, list, tuple, str, int, float, bool, None and Tensor, or be a scalar of
    NumPy, which is stored as a Python value. The loaded state is equal to the saved state.

    Raises:
        CheckpointError: ``state`` contains another type. The error names the path and the type of an unsupported value.
    """
    if not isinstance(state, Mapping):
        raise _refusal((), state, "is not a mapping", "Pass a dict of the values to save")
    splitter = _Splitter()
    try:
        tree = splitter.encode(state, ())
        check_depth([tree])
    except CheckpointError:
        raise
    except (RecursionError, ValueError):
        problem = f"is nested more than {MAX_DEPTH} levels deep, or contains itself"
        raise CheckpointError("state", type(state), problem, "Pass a less deeply nested state") from None
    return splitter.tensors, tree


class _Splitter:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._name_of_memory: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: Path) -> Json:
        if isinstance(value, Tensor):
            return self._encode_tensor(value, path)
        if isinstance(value, Mapping):
            return self._encode_mapping(value, path)
        if type(value) is list:
            return [self.encode(item, (*path, i)) for i, item in enumerate(value)]
        if type(value) is tuple:
            return {"~tuple": [self.encode(item, (*path, i)) for i, item in enumerate(value)]}
        return _encode_scalar(value, path)

    def _encode_mapping(self, value: Mapping[Any, Any], path: Path) -> Json:
        if all(type(key) is str and not key.startswith("~") for key in value):
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        return {
            "~dict": [[_encode_key(key, (*path, key)), self.encode(item, (*path, key))] for key, item in value.items()]
        }

    def _encode_tensor(self, tensor: Tensor, path: Path) -> Json:
        _refuse_unstorable(tensor, path)
        memory = _memory_of(tensor)
        name = None if memory is None else self._name_of_memory.get(memory)
        if name is None:
            name = self._free_name(path)
            self.tensors[name] = tensor
            if memory is not None:
                self._name_of_memory[memory] = name
        return {"~tensor": [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]}

    def _free_name(self, path: Path) -> str:
        # A key can contain a lone surrogate, which cannot be encoded in UTF-8.
        base = ".".join(str(part) for part in path).encode("utf-8", "backslashreplace").decode("utf-8")
        name, count = base, 1
        while name in self.tensors or name == _HEADER_KEY:
            count += 1
            name = f"{base}#{count}"
        return name


def _memory_of(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return a value that is equal only for tied tensors; None if the tensor has no elements."""
    local = local_part(tensor)
    if not local.numel():
        return (id(tensor),) if tensor.numel() else None
    # The state keeps all its tensors in memory, so a data pointer identifies a tensor.
    place = (local.device, local.data_ptr(), local.stride(), tuple(local.shape), tuple(tensor.shape))
    return (*place, local.dtype, local.is_conj(), local.is_neg())


def _encode_scalar(value: Any, path: Path) -> Json:
    if isinstance(value, np.generic):  # for example a learning rate from np.logspace
        value = value.item()
    if value is None or type(value) in (str, bool):
        return value
    if type(value) is int:
        return value if _MIN_INTEGER <= value <= _MAX_INTEGER else {"~int": hex(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"~float": str(value)}
    raise _refusal(
        path,
        value,
        "cannot be saved, because a checkpoint can contain only tensors and plain Python values",
        "Convert it to tensors, dict, list, tuple, str, int, float, bool or None, for example with float(x) or list(x)",
    )


def _encode_key(key: Any, path: Path) -> Json:
    if type(key) is tuple:
        return {"~tuple": [_encode_key(part, path) for part in key]}
    return _encode_scalar(key, path)


def _refuse_unstorable(tensor: Tensor, path: Path) -> None:
    def refuse(problem: str, action: str) -> None:
        raise _refusal(path, tensor, problem, action)

    if not _is_plain(tensor):
        refuse("is a tensor subclass whose data cannot be accessed", "Save its components as plain tensors")
    if is_sharded(tensor) and any(placement.is_partial() for placement in tensor.placements):
        refuse(
            "has a Partial placement, so its values are not yet reduced over the ranks",
            "Redistribute it to Shard or Replicate before saving",
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        refuse(f"is a tensor of layout {tensor.layout}, which is not dense", "Save its components as dense tensors")
    if tensor.is_meta:
        refuse("is on the meta device, so it has no values", "Materialize it before saving")
    if str(tensor.dtype).removeprefix("torch.") not in DTYPES:
        refuse(f"has unsupported dtype {tensor.dtype}", f"Convert it to one of: {', '.join(DTYPES)}")


def _is_plain(tensor: Tensor) -> bool:
    if type(tensor) is Tensor:
        return True
    # isinstance() would also accept a tensor subclass that is only marked as a parameter.
    if issubclass(type(tensor), torch.nn.Parameter):
        return not torch.nn.parameter.is_lazy(tensor)
    return is_sharded(tensor)


def _refusal(path: Path, value: object, problem: str, action: str) -> CheckpointError:
    return CheckpointError(show_path(path), type(value), problem, action)


def show_path(path: Path) -> str:
    """Return the text of a path: ``("module", "a.b")`` becomes ``"state['module']['a.b']"``."""
    return "state" + "".join(f"[{part!r}]" for part in path)


def join(tree: Json, place: Path = ("tree",)) -> Any:
    """Return the nested state of ``tree`` with a :class:`StoredTensor` for each tensor.

    Args:
        tree: tree from :func:`split`.
        place: path of ``tree`` in its file, for the error message: a name, and the keys that lead to ``tree``.

    Raises:
        FormError: ``tree`` contains a tag that this version does not support, or a tag with an invalid value.
    """
    if isinstance(tree, list):
        return [join(item, (*place, index)) for index, item in enumerate(tree)]
    if not isinstance(tree, dict):
        if type(tree) is int and not _MIN_INTEGER <= tree <= _MAX_INTEGER:
            raise FormError(place_of(place), tree, "an integer of at most 64 bits")
        if type(tree) is float and math.isinf(tree):
            raise FormError(place_of(place), tree, "a number that a float64 can hold")
        return tree
    tag = next(iter(tree), "")
    if not tag.startswith("~"):
        return {key: join(item, (*place, key)) for key, item in tree.items()}
    if len(tree) > 1 or tag not in _READERS:
        raise FormError(place_of(place), tree, f"a mapping without tags, or with one of the tags {', '.join(_READERS)}")
    form, read = _READERS[tag]
    try:
        form(tree[tag], tag)
    except FormError as error:
        raise error.within(place_of(place)) from None
    return read(tree[tag], place)


def _read_tensor(fields: Json, place: Path) -> StoredTensor:
    name, dtype, shape = fields
    return StoredTensor(name, TensorSpec(tuple(shape), DTYPES[dtype]))


def _read_dict(pairs: Json, place: Path) -> dict[Any, Any]:
    joined = ((join(key, (*place, number)), item) for number, (key, item) in enumerate(pairs))
    return {key: join(item, (*place, key)) for key, item in joined}


def _is_key(value: Any, place: str) -> None:
    """Check that a stored key has a form that :func:`_encode_key` writes."""
    if isinstance(value, dict) and len(value) == 1:
        form_of_fields({}, others={"~float": anything, "~int": anything, "~tuple": list_of(_is_key)})(value, place)
    elif isinstance(value, (dict, list)):
        raise FormError(place, value, "a key: a string, a number or a tuple of these")


def _is_hexadecimal(value: Any, place: str) -> None:
    text(value, place)
    if re.fullmatch("-?0x[0-9a-f]{1,100000}", value) is None:
        raise FormError(place, value, "a hexadecimal integer")


_READERS: dict[str, tuple[Form, Callable[[Json, Path], Any]]] = {
    "~tensor": (items(text, one_of(*DTYPES), list_of(count)), _read_tensor),
    "~tuple": (
        list_of(anything),
        lambda values, place: tuple(join(item, (*place, index)) for index, item in enumerate(values)),
    ),
    "~dict": (list_of(items(_is_key, anything)), _read_dict),
    "~float": (one_of("inf", "-inf", "nan"), lambda value, place: float(value)),
    "~int": (_is_hexadecimal, lambda value, place: int(value, 16)),
}


def leaves(node: Any, kind: type, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield ``(path, leaf)`` for every leaf of class ``kind``, depth first, in iteration order."""
    if isinstance(node, kind):
        yield path, node
    elif isinstance(node, Mapping):
        for key, item in node.items():
            yield from leaves(item, kind, (*path, key))
    elif isinstance(node, (list, tuple)):
        for index, item in enumerate(node):
            yield from leaves(item, kind, (*path, index))


def fill(node: Any, value_of: Callable[[Path, StoredTensor], Any], path: Path = ()) -> Any:
    """Return a copy of a result of :func:`join` in which each stored tensor is replaced by ``value_of(path,
    stored)``."""
    if isinstance(node, StoredTensor):
        return value_of(path, node)
    if isinstance(node, dict):
        return {key: fill(item, value_of, (*path, key)) for key, item in node.items()}
    if isinstance(node, (list, tuple)):
        return type(node)(fill(item, value_of, (*path, index)) for index, item in enumerate(node))
    return node
