"""Export of weights in the layout of the Hugging Face Hub: safetensors files, and an index if there are several files.

[Note: memory of an export]
The header of a safetensors file contains all names and shapes, which are known in advance. Each tensor can therefore be
read from the files of the ranks, converted and written in chunks of 4 MiB, regardless of the size of the model. Only a
tensor that was sharded along a dimension other than its rows, or that has an adapter, is first assembled in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roomier import checkpoint
from roomier.checkpoint.commit import absolute, committed_folder
from roomier.checkpoint.export.merged import MergedTensors
from roomier.checkpoint.saving import file_groups
from roomier.checkpoint.tensor_file import TensorFile, bytes_of, num_bytes_of
from roomier.core.errors import RoomierError, did_you_mean
from roomier.core.log import notice
from roomier.plan.parts import AdapterPlan

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
    shards = file_groups(tensors, lambda each: each.num_bytes, max_shard_bytes, lambda _: None)
    num_files = len(shards)
    files = tuple(f"model-{index:05}-of-{num_files:05}.safetensors" for index in range(1, num_files + 1))
    files = files if num_files > 1 else ("model.safetensors",)
    for file_name, shard in zip(files, shards, strict=True):
        write_shard(folder / file_name, shard)
    if len(shards) > 1:
        weight_map = {each.name: file for file, shard in zip(files, shards, strict=True) for each in shard}
        total = sum(each.num_bytes for each in tensors)
        write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return files


def write_shard(path: Path, shard: Sequence[ToWrite]) -> None:
    """Write one safetensors file and flush it to the disk. Raises OSError."""
    by_name = {each.name: each for each in shard}
    tied = {other: each.name for each in shard for other in each.other_names}  # as in safetensors' save_model
    specs = {each.name: (each.dtype, each.shape) for each in shard}

    def data_of(name: str) -> Iterator[memoryview]:
        for piece in by_name[name].read():
            yield from bytes_of(piece.to(by_name[name].dtype))

    TensorFile(specs, {**tied, "format": "pt"}).write(path, data_of)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file and flush it to the disk. Raises OSError."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
DEFAULT_SHARD_BYTES = 5 * 10**9
_CONFIG = "config.json"


@dataclass(frozen=True)
class Exported:
    """Result of an export.

    Attributes:
        folder: folder that contains the files.
        files: names of the files that contain tensors.
        num_bytes: size of the tensors in bytes.
    """

    folder: Path
    files: tuple[str, ...]
    num_bytes: int


def export_safetensors(
    path: str | Path,
    output: str | Path,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    dtype: str | None = None,
    prefix: str | None = None,
) -> Exported:
    """Write the weights of the checkpoint ``path`` to the folder ``output``, atomically.

    A single file has the name ``model.safetensors``. Several files have the names ``model-00001-of-0000N.safetensors``,
    with the index ``model.safetensors.index.json``. If weights are tied, only the first of these weights is written, as
    in Hugging Face's files. The names of the other tied weights are in the metadata of the file, from which
    ``safetensors.torch.load_model`` reads them. The ``config.json`` of a Hugging Face model is included. Adapters are
    merged into their weights, which have the names of the plain model.

    Args:
        path: checkpoint folder.
        output: new folder.
        max_shard_bytes: maximum size of the tensors in one file, unless a single tensor is larger.
        dtype: dtype of all floating-point tensors, a key of ``DTYPES``; None preserves their dtypes.
        prefix: name of a submodule, or prefix of weight names. Only tensors whose names begin with this prefix are
            written, and the prefix is removed from the names. None selects the Hugging Face model in the module, if
            there is one. ``""`` writes all tensors.

    Raises:
        RoomierError: ``dtype`` or ``prefix`` is unknown, or ``output`` is a file or a nonempty folder.
        CheckpointError: the checkpoint is damaged, or the disk is full.
    """
    target = new_folder(output, dtype)
    described = checkpoint.peek(path)
    stored = MergedTensors(path, "module", AdapterPlan(**described.get("plan", {}).get("adapter", {})))
    found_prefix, config = _pretrained(described)
    if prefix is None:
        prefix = found_prefix
    elif prefix and any(key.startswith(f"{prefix}.") for key in stored.specs):  # the name of a submodule
        prefix = f"{prefix}."
    names = names_in_files(stored, prefix)
    tensors = [
        ToWrite(
            name,
            dtype_in_file(stored.specs[key].dtype, dtype),
            tuple(stored.specs[key].shape),
            partial(stored.chunks, key),
            _tied_names(stored, name, key),
        )
        for key, name in names.items()
    ]
    num_bytes = sum(each.num_bytes for each in tensors)
    with committed_folder(target, num_bytes) as folder:
        files = write_tensors(folder, tensors, max_shard_bytes)
        if config is not None and prefix == found_prefix:
            write_json(folder / _CONFIG, _with_dtype(config, dtype))
        else:
            notice(
                f"{_CONFIG} was not written, because the checkpoint has no config of a Hugging Face model under "
                f"{prefix!r}"
            )
    return Exported(target, files, num_bytes)


def _pretrained(described: Mapping[str, Any]) -> tuple[str, dict[str, Any] | None]:
    """Return the prefix of the Hugging Face model in the module, with a trailing dot, and its configuration."""
    found = described.get("pretrained")
    if found:
        return found["prefix"], found["config"]
    for value in described.get("hyperparameters", {}).values():
        if isinstance(value, dict) and "model_type" in value:
            return "", value
    return "", None


def new_folder(output: str | Path, dtype: str | None) -> Path:
    """Return the absolute path of ``output``.

    Raises:
        RoomierError: ``output`` is a file or a nonempty folder, or ``dtype`` is unknown.
    """
    if dtype is not None and dtype not in DTYPES:
        raise RoomierError("dtype", dtype, "is unknown", did_you_mean(dtype, DTYPES))
    target = absolute(output)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RoomierError("output", str(output), "already exists and is not empty", "Choose another folder")
    return target


def names_in_files(stored: MergedTensors, prefix: str) -> dict[str, str]:
    """Return a mapping from each key in the checkpoint to its name in the files. If tensors are tied, only the first of
    these tensors is included."""
    under = [key for key in stored.specs if key.startswith(prefix)]
    if not under:
        nearest = did_you_mean(prefix, {key.partition(".")[0] + "." for key in stored.specs})
        raise RoomierError("prefix", prefix, "is not the prefix of any weight", nearest)
    left_out = [key for key in (*stored.specs, *stored.others) if key not in under]
    if left_out:
        notice(
            f"{len(left_out)} entries are omitted, because they are not tensors with the prefix {prefix!r}: "
            f"{left_out[0]!r}, ..."
        )
    first: dict[str, str] = {}
    for key in under:
        first.setdefault(stored.tied_to.get(key, key), key)
    return {key: key[len(prefix) :] for key in first.values()}


def dtype_in_file(stored: torch.dtype, wanted: str | None) -> torch.dtype:
    """Return the dtype of a written tensor: ``wanted`` for floating-point tensors, otherwise the stored dtype."""
    return stored if wanted is None or not stored.is_floating_point else DTYPES[wanted]


def _tied_names(stored: MergedTensors, name: str, key: str) -> tuple[str, ...]:
    """Return the names of the tensors that are tied to ``key``. The tensor ``key`` is written as ``name``."""
    root, prefix = stored.tied_to.get(key, key), key[: len(key) - len(name)]
    same = (each for each in stored.specs if each != key and stored.tied_to.get(each, each) == root)
    return tuple(each[len(prefix) :] for each in same if each.startswith(prefix))


def _with_dtype(config: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    if dtype is None:
        return config
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    return {**config, key: str(DTYPES[dtype]).removeprefix("torch.")}
