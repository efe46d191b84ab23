"""Weights in the layout of the Hugging Face hub: whole tensors in safetensors files, and an index of several.

[Note: memory of an export]
A tensor is read from the files of the ranks that wrote it, converted, and written, 4 MiB at a time: a safetensors file
begins with all names and shapes, and these are known. Only a tensor that was cut otherwise than into rows, or has an
adapter, is put together first. So the size of the model does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from roomier import checkpoint
from roomier.checkpoint.commit import absolute, committed_folder
from roomier.core.errors import RoomierError, did_you_mean
from roomier.core.log import notice
from roomier.export.merged import MergedTensors
from roomier.export.shards import ToWrite, write_json, write_tensors
from roomier.plan.parts import AdapterPlan

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
    """What was written.

    Attributes:
        folder: where it stands. files: the names of the files of tensors in it.
        num_bytes: of the tensors.
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
    """Write the weights of the checkpoint ``path`` as the folder ``output``, whole or not at all.

    One file is ``model.safetensors``; several are ``model-00001-of-0000N.safetensors`` with
    ``model.safetensors.index.json``. Of tied weights the first is written, as Hugging Face expects it; the others are
    named in the file's metadata, where ``safetensors.torch.load_model`` finds them. The ``config.json`` of a Hugging
    Face model goes with it. Adapters are added to the weights they belong to, which have the names of the plain model.

    Args:
        max_shard_bytes: of tensors in a file, unless one alone is larger.
        dtype: of all floating-point tensors; one of ``DTYPES``; None leaves each as it is.
        prefix: only tensors under it, without it: the name of a part of the module, or how names begin; None is the
            place of the Hugging Face model in the module that was trained, if there is one; ``""`` is all of them.

    Raises:
        RoomierError: ``dtype`` or ``prefix`` is unknown, or ``output`` is there already.
        CheckpointError: the checkpoint is damaged, or the disk is full.
    """
    target = new_folder(output, dtype)
    described = checkpoint.peek(path)
    stored = MergedTensors(path, "module", AdapterPlan(**described.get("plan", {}).get("adapter", {})))
    found_prefix, config = _pretrained(described)
    prefix = found_prefix if prefix is None else _of_part(prefix, stored)
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
            notice(f"no {_CONFIG}: the checkpoint holds no configuration of a Hugging Face model under {prefix!r}")
    return Exported(target, files, num_bytes)


def _pretrained(described: Mapping[str, Any]) -> tuple[str, dict[str, Any] | None]:
    """Where the Hugging Face model stands in the module, with a dot behind, and its configuration."""
    found = described.get("pretrained")
    if found:
        return found["prefix"], found["config"]
    for value in described.get("hyperparameters", {}).values():
        if isinstance(value, dict) and "model_type" in value:
            return "", value
    return "", None


def _of_part(prefix: str, stored: MergedTensors) -> str:
    """``prefix``; with a dot behind, where it is the name of a part of the model: no name begins with one."""
    is_part = bool(prefix) and any(key.startswith(f"{prefix}.") for key in stored.specs)
    return f"{prefix}." if is_part else prefix


def new_folder(output: str | Path, dtype: str | None) -> Path:
    """The path of ``output``.

    Raises:
        RoomierError: there is something already, or ``dtype`` is unknown.
    """
    if dtype is not None and dtype not in DTYPES:
        raise RoomierError("dtype", dtype, "is unknown", did_you_mean(dtype, DTYPES))
    target = absolute(output)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RoomierError("output", str(output), "is there already and not empty", "Choose another folder")
    return target


def names_in_files(stored: MergedTensors, prefix: str) -> dict[str, str]:
    """Key in the checkpoint -> name in the files; of tied ones the first alone."""
    under = [key for key in stored.specs if key.startswith(prefix)]
    if not under:
        nearest = did_you_mean(prefix, {key.partition(".")[0] + "." for key in stored.specs})
        raise RoomierError("prefix", prefix, "no weight begins with it", nearest)
    left_out = [key for key in (*stored.specs, *stored.others) if key not in under]
    if left_out:
        notice(f"{len(left_out)} entries are left out: not tensors under {prefix!r} (the first: {left_out[0]!r})")
    first: dict[str, str] = {}
    for key in under:
        first.setdefault(stored.tied_to.get(key, key), key)
    return {key: key[len(prefix) :] for key in first.values()}


def dtype_in_file(stored: torch.dtype, wanted: str | None) -> torch.dtype:
    return stored if wanted is None or not stored.is_floating_point else DTYPES[wanted]


def _tied_names(stored: MergedTensors, name: str, key: str) -> tuple[str, ...]:
    """Names of the same tensor as ``key``, which is written as ``name``."""
    root, prefix = stored.tied_to.get(key, key), key[: len(key) - len(name)]
    same = (each for each in stored.specs if each != key and stored.tied_to.get(each, each) == root)
    return tuple(each[len(prefix) :] for each in same if each.startswith(prefix))


def _with_dtype(config: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    if dtype is None:
        return config
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    return {**config, key: str(DTYPES[dtype]).removeprefix("torch.")}
