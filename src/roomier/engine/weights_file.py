"""Weights from safetensors files, of which each rank reads what it keeps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from roomier.adapters.layers import is_adapter
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.models.hugging_face import Conversion, conversions_from_files, find_pretrained
from roomier.parallel.pages import local_part, local_rows

SUFFIX = ".safetensors"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_NUM_NAMES_SHOWN = 3


class WeightsToRead(Protocol):
    """Where the values are that a model begins with."""

    def check(self, network: nn.Module) -> set[str]:
        """The names of the tensors of ``network`` that will be filled: all, but for adapters."""
        ...

    def read_into(self, network: nn.Module) -> None:
        """Fill ``network``, which :meth:`check` has seen, in place; of a sharded tensor, this rank's part."""
        ...


class WeightsFile:
    """The tensors of ``path`` by name, none of them read.

    Args:
        path: a ``.safetensors`` file; an index ``.safetensors.index.json`` of several; or a folder that holds either
            under the name Hugging Face gives it (``model.safetensors``).

    Raises:
        RoomierError: it is none of these, a file of an index is missing, or a file is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._conversions: list[Conversion] = []
        for file_path in _files_of(self.path):
            with _opened(file_path) as file:
                for name in file.keys():  # noqa: SIM118  it is no mapping
                    self._file_of[name] = file_path
                    self._shapes[name] = tuple(file.get_slice(name).get_shape())

    def check(self, network: nn.Module) -> set[str]:
        """Compare names and shapes with those of ``network``; the names there that will be filled, tied ones included.
        Adapters may be missing in the file.

        Where all names of the file are those of one part of ``network`` (``model.`` and the name), that part is meant.
        Where they are no names of ``network``, and it is or holds a Hugging Face model, the rules of its
        ``from_pretrained`` say which tensors they make.

        Raises:
            RoomierError: names that the file has and ``network`` has not, or the other way round, or other shapes.
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
            action = "Give the weights of this model, or build the model they were saved from"
            raise RoomierError("weights", str(self.path), f"does not fit the model: {'; '.join(problems)}", action)
        present = {id(wanted[name]) for each in self._conversions for name in each.targets}
        return {name for name, tensor in wanted.items() if id(tensor) in present}

    def _as_pretrained(self, network: nn.Module, wanted: Mapping[str, Tensor]) -> list[Conversion]:
        """How the files of the Hugging Face model that ``network`` is or holds become its tensors; empty for none."""
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
            *_some("it lacks", missing),  # adapters begin with values of their own
            *_some("it has what the model has not", list(unexpected)),
            *_some("other shapes", different),
        ]

    @torch.no_grad()
    def read_into(self, network: nn.Module) -> None:
        """Fill ``network``, which :meth:`check` has seen, in place; of a sharded tensor, this rank's part.

        Raises:
            RoomierError: a file is damaged.
        """
        wanted = _tensors_of(network)
        converted: dict[str, None] = {}
        by_file: dict[Path, list[tuple[str, str]]] = {}
        for each in self._conversions:
            if each.run is None:
                [stored], [name] = each.sources, each.targets
                by_file.setdefault(self._file_of[stored], []).append((stored, name))
        for path, names in by_file.items():
            with _opened(path) as file:
                for stored, name in names:
                    _note(converted, _read(file, stored, wanted[name]), wanted[name])
        for each in self._conversions:
            if each.run is not None:
                made = each.run({name: self._whole(name) for name in each.sources})
                for name, tensor in zip(each.targets, made.values(), strict=True):
                    target = wanted[name]
                    local_part(target).copy_(tensor[local_rows(target)] if target.dim() else tensor)
                    _note(converted, tensor.dtype, target)
        if converted:
            notice(f"weights={str(self.path)!r}: converted from {', '.join(converted)}, as the model has them")

    def _whole(self, stored: str) -> Tensor:
        with _opened(self._file_of[stored]) as file:
            tensor: Tensor = file.get_tensor(stored)
            return tensor

    def _prefix(self, network: nn.Module, wanted: Mapping[str, Tensor]) -> str:
        if not wanted.keys().isdisjoint(self._file_of):
            return ""
        for child, _ in network.named_children():
            if all(f"{child}.{name}" in wanted for name in self._file_of):
                return f"{child}."
        return ""


def _tensors_of(network: nn.Module) -> dict[str, Tensor]:
    # All parameters, tied ones under each of their names, and the buffers that are stored.
    tensors = {name: each for name, each in network.state_dict(keep_vars=True).items() if isinstance(each, Tensor)}
    return {**dict(network.named_parameters(remove_duplicate=False)), **tensors}


def _read(file: Any, stored: str, target: Tensor) -> torch.dtype:
    local = local_part(target)
    if not target.dim():
        values: Tensor = file.get_tensor(stored)
    else:
        rows = local_rows(target)
        values = file.get_slice(stored)[rows.start : rows.stop]
    local.copy_(values)
    return values.dtype


def _note(converted: dict[str, None], stored: torch.dtype, target: Tensor) -> None:
    if stored != target.dtype:
        converted[f"{stored} to {target.dtype}".replace("torch.", "")] = None


def _files_of(path: Path) -> list[Path]:
    action = f"Pass a {SUFFIX} file, or a folder that holds {_SINGLE} or {_INDEX}"
    if path.is_dir():
        within = [path / name for name in (_INDEX, _SINGLE) if (path / name).is_file()]
        if not within:
            raise RoomierError("weights", str(path), f"holds neither {_SINGLE} nor {_INDEX}", action)
        return _files_of(within[0])
    if not path.is_file():
        raise RoomierError("weights", str(path), "there is no such file or folder", action)
    if path.name.endswith(SUFFIX):
        return [path]
    if not path.name.endswith(".index.json"):
        raise RoomierError("weights", str(path), f"is no {SUFFIX} file", action)
    try:
        names = sorted(set(json.loads(path.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        action = "Copy the folder again"
        raise RoomierError("weights", str(path), f"is no index of files ({error})", action) from error
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        action = "Copy the folder again, with all of its files"
        raise RoomierError("weights", str(path), f"names files that are not there: {', '.join(missing)}", action)
    return [path.parent / name for name in names]


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise RoomierError("weights", str(path), f"cannot be read ({error})", "Copy the file again") from error


def _some(title: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _NUM_NAMES_SHOWN} more" if len(names) > _NUM_NAMES_SHOWN else ""
    return [f"{title}: {', '.join(names[:_NUM_NAMES_SHOWN])}{more}"]
