"""Write safetensors files of limited size, with an index if there are several files, as on the Hugging Face hub."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roomier.checkpoint.tensor_file import TensorFile, bytes_of, num_bytes_of

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class ToWrite:
    """Tensor that is computed while it is written.

    Attributes:
        name: name in the file.
        dtype: dtype in the file.
        shape: shape of the tensor.
        read: function that yields the elements of the tensor in row-major order, in pieces, in any dtype.
        other_names: names of tied tensors, which are not written.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Iterable[Tensor]]
    other_names: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in the file, in bytes."""
        return num_bytes_of(self.dtype, self.shape)


def write_tensors(folder: Path, tensors: Sequence[ToWrite], max_shard_bytes: int) -> tuple[str, ...]:
    """Write ``tensors`` to ``folder``, in files of at most ``max_shard_bytes``, unless a single tensor is larger.

    Returns:
        The names of the files.

    Raises:
        OSError: a file cannot be written.
    """
    shards: list[list[ToWrite]] = [[]]
    held_bytes = 0
    for each in tensors:
        if shards[-1] and held_bytes + each.num_bytes > max_shard_bytes:
            shards.append([])
            held_bytes = 0
        shards[-1].append(each)
        held_bytes += each.num_bytes
    files = _file_names(len(shards))
    for file_name, shard in zip(files, shards, strict=True):
        write_shard(folder / file_name, shard)
    if len(shards) > 1:
        weight_map = {each.name: file for file, shard in zip(files, shards, strict=True) for each in shard}
        total = sum(each.num_bytes for each in tensors)
        write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return files


def _file_names(num_files: int) -> tuple[str, ...]:
    if num_files == 1:
        return ("model.safetensors",)
    return tuple(f"model-{index:05}-of-{num_files:05}.safetensors" for index in range(1, num_files + 1))


def write_shard(path: Path, shard: Sequence[ToWrite]) -> None:
    """Write one safetensors file and flush it to the disk. Raises OSError."""
    by_name = {each.name: each for each in shard}
    tied = {other: each.name for each in shard for other in each.other_names}  # as in safetensors' save_model
    specs = {each.name: (each.dtype, each.shape) for each in shard}
    with TensorFile(path, specs, {**tied, "format": "pt"}) as file:
        for name in file.names:
            for piece in by_name[name].read():
                for data in bytes_of(piece.to(by_name[name].dtype)):
                    file.append(data)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file and flush it to the disk. Raises OSError."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
