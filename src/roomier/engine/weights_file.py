"""Initial weights from safetensors files. Each rank reads only its shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from roomier.checkpoint.commit import at_home
from roomier.checkpoint.tensor_file import read_box, read_header
from roomier.checkpoint.verbs import some_of
from roomier.core.errors import RoomierError
from roomier.core.hugging_face import Conversion, conversions_from_files, find_pretrained
from roomier.core.log import notice
from roomier.core.sharded import local_part, local_rows
from roomier.core.untrusted import open_regular, read_json
from roomier.storage.remote_path import StorageError
from roomier.techniques.adapters.layers import is_adapter

SUFFIX = ".safetensors"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def prepare_nothing(tensor: Tensor) -> None:
    """Do nothing. This function is the default of ``prepare`` in :meth:`WeightsToRead.read_into`."""


class WeightsToRead(Protocol):
    """Source of the initial values of a model."""

    def check(self, network: nn.Module) -> set[str]:
        """Return the names of the tensors of ``network`` that will be read: all tensors, except adapters without stored
        values."""

    def read_into(self, network: nn.Module, prepare: Callable[[Tensor], object] = prepare_nothing) -> None:
        """Read the values into ``network``, which :meth:`check` accepted. Each rank reads its shard of each tensor.

        Args:
            prepare: function that is called with each tensor before it is written.
        """


class WeightsFile:
    """Names and shapes of the tensors in ``path``, without their values.

    Args:
        path: a ``.safetensors`` file, an index ``.safetensors.index.json`` of several files, or a folder that contains
            either of them under Hugging Face's file name (``model.safetensors``).

    Raises:
        RoomierError: ``path`` is not a supported file or folder, a file in an index is missing, or a file is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = at_home(path, "weights", RoomierError)
        self._stored = {name: each for path in _files_of(self.path) for name, each in _stored_in(path).items()}
        self._shapes = {name: each.shape for name, each in self._stored.items()}
        self._conversions: list[Conversion] = []

    def check(self, network: nn.Module) -> set[str]:
        """Compare names and shapes with ``network``. Adapters may be missing from the file.

        If all names in the file match ``network`` with the name of one child module as a prefix, such as ``model.``,
        the values are read into this child. If the names in the file do not match, and ``network`` is or contains a
        Hugging Face model, the tensors are converted by the rules that ``from_pretrained`` uses for this model.

        Returns:
            The names of the tensors that will be read, including all names of tied tensors.

        Raises:
            RoomierError: a name or shape in the file does not match ``network``.
        """
        wanted = _tensors_of(network)
        prefix = self._prefix(network, wanted)
        same = [Conversion((name,), {f"{prefix}{name}": shape}, None) for name, shape in self._shapes.items()]
        problems, self._conversions = self._compared(same, wanted), same
        if problems:
            converted = self._as_pretrained(network, wanted)
            if converted:
                problems, self._conversions = self._compared(converted, wanted), converted
        if problems:
            action = "Pass the weights of this model, or build the model from which the weights were saved"
            raise RoomierError("weights", str(self.path), f"does not match the model: {'; '.join(problems)}", action)
        present = {id(wanted[name]) for each in self._conversions for name in each.targets}
        return {name for name, tensor in wanted.items() if id(tensor) in present}

    def _as_pretrained(self, network: nn.Module, wanted: Mapping[str, Tensor]) -> list[Conversion]:
        """Return the conversions from the tensors in files to the Hugging Face model in ``network``. If ``network``
        contains no such model, the result is empty."""
        found = find_pretrained(network)
        if found is None:
            return []
        prefix, model = found
        shapes = {name[len(prefix) :]: tuple(each.shape) for name, each in wanted.items() if name.startswith(prefix)}
        conversions = conversions_from_files(model, self._shapes, shapes)
        return [
            replace(each, targets={f"{prefix}{name}": shape for name, shape in each.targets.items()})
            for each in conversions
        ]

    def _compared(self, conversions: list[Conversion], wanted: Mapping[str, Tensor]) -> list[str]:
        shapes = {name: (shape, each) for each in conversions for name, shape in each.targets.items()}
        present = {id(wanted[name]) for name in shapes if name in wanted}
        missing = [name for name, tensor in wanted.items() if id(tensor) not in present and not is_adapter(name)]
        unexpected = {name: None for key, (_, each) in shapes.items() if key not in wanted for name in each.sources}
        different = [
            f"{each.sources[0]} {list(shape)} for {list(wanted[name].shape)}"
            for name, (shape, each) in shapes.items()
            if name in wanted and tuple(wanted[name].shape) != shape
        ]
        return [
            *some_of("missing", missing),  # adapters have their own initial values
            *some_of("unexpected", list(unexpected)),
            *some_of("different shapes", different),
        ]

    @torch.no_grad()
    def read_into(self, network: nn.Module, prepare: Callable[[Tensor], object] = prepare_nothing) -> None:
        """Read the values into ``network``, which :meth:`check` accepted. Each rank reads its shard of each tensor.

        Args:
            prepare: function that is called with each tensor before it is written.

        Raises:
            RoomierError: a file is damaged.
        """
        wanted = _tensors_of(network)
        converted: dict[str, None] = {}
        for each in self._conversions:
            sources = {name: self._stored[name] for name in each.sources}
            made: Iterable[_FileTensor | Tensor] = sources.values()
            if each.run is not None:
                made = each.run({name: stored.whole() for name, stored in sources.items()}).values()
            for name, values in zip(each.targets, made, strict=True):
                target = wanted[name]
                if target.is_meta:  # another stage of a pipeline stores it
                    continue
                prepare(target)
                rows = [local_rows(target)] if target.dim() else []
                if isinstance(values, Tensor):
                    local_part(target).copy_(values[tuple(rows)])
                else:
                    values.read_into(local_part(target), rows)
                if values.dtype != target.dtype:
                    converted[f"{values.dtype} to {target.dtype}".replace("torch.", "")] = None
        if converted:
            notice(f"weights={str(self.path)!r}: converted from {', '.join(converted)}, the dtype of the model")

    def _prefix(self, network: nn.Module, wanted: Mapping[str, Tensor]) -> str:
        if not wanted.keys().isdisjoint(self._stored):
            return ""
        for child, _ in network.named_children():
            if all(f"{child}.{name}" in wanted for name in self._stored):
                return f"{child}."
        return ""


def _tensors_of(network: nn.Module) -> dict[str, Tensor]:
    # The result contains all parameters, with each name of a tied parameter, and the persistent buffers.
    tensors = {name: each for name, each in network.state_dict(keep_vars=True).items() if isinstance(each, Tensor)}
    return {**dict(network.named_parameters(remove_duplicate=False)), **tensors}


def _files_of(path: Path) -> list[Path]:
    action = f"Pass a {SUFFIX} file, or a folder that contains {_SINGLE} or {_INDEX}"
    if path.is_dir():
        within = [path / name for name in (_INDEX, _SINGLE) if (path / name).is_file()]
        if not within:
            raise RoomierError("weights", str(path), f"contains neither {_SINGLE} nor {_INDEX}", action)
        return _files_of(within[0])
    if not path.is_file():
        raise RoomierError("weights", str(path), "does not exist", action)
    if path.name.endswith(SUFFIX):
        return [path]
    if not path.name.endswith(".index.json"):
        raise RoomierError("weights", str(path), f"is not a {SUFFIX} file", action)
    try:
        names = sorted(set(read_json(path)["weight_map"].values()))
    except StorageError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        action = "Copy the folder again"
        raise RoomierError("weights", str(path), f"is not a valid index of files ({error})", action) from error
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        action = "Copy the folder again, with all of its files"
        raise RoomierError("weights", str(path), f"lists files that do not exist: {', '.join(missing)}", action)
    return [path.parent / name for name in names]


@dataclass(frozen=True)
class _FileTensor:
    """Tensor in the file ``path``, whose values start at the byte ``first``."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int

    def whole(self) -> Tensor:
        values = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(values, [])
        return values

    def read_into(self, target: Tensor, rows: list[slice]) -> None:
        box = [*rows, *(slice(0, size) for size in self.shape[len(rows) :])]
        values = target if target.dtype == self.dtype else torch.empty_like(target, dtype=self.dtype, device="cpu")
        with _readable(self.path), open_regular(self.path) as file:
            read_box(file, self.first, self.shape, box, values)
        if values is not target:
            target.copy_(values)


def _stored_in(path: Path) -> dict[str, _FileTensor]:
    with _readable(path):
        return {name: _FileTensor(path, *entry) for name, entry in sorted(read_header(path).tensors.items())}


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except (OSError, ValueError) as error:
        raise RoomierError("weights", str(path), f"cannot be read ({error})", "Copy the file again") from error
