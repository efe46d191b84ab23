"""Write tensors to safetensors files, which torch.distributed.checkpoint (DCP) can also read.

[Note: the files]
Each rank writes its own files, ``shard-<rank>-model-<file>-of-<files>.safetensors``, in the layout of DCP's
``HuggingFaceStorageWriter``: boxes of tensors under the names of the full tensors, and the offsets of each box in the
header. ``reading.py``, and DCP's reader in other programs, can assemble these boxes for any other sharding layout.
DCP's writer is not used, because it stores the bytes of each file in memory twice, communicates with the other ranks in
additional calls, and does not compute checksums. This module writes the bytes directly to the file. In addition to the
state, saving requires memory for a copy of one non-contiguous tensor, or for 4 MiB of a tensor on a device. DCP's
reader is not used, because it does not check the headers.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roomier.checkpoint.boxes import TensorBox
from roomier.checkpoint.record import TENSOR_SUFFIX, StoredFile
from roomier.checkpoint.tensor_file import TensorFile, bytes_of

_FILE_BYTES = 128 * 2**20


def write_parts(folder: Path, parts: Sequence[TensorBox], section_of: Mapping[str, Any], rank: int) -> list[StoredFile]:
    """Write ``parts`` to files of this rank in ``folder`` and flush the files to the disk.

    Parts of different sections (top-level keys of the state) are never in the same file.

    Args:
        folder: folder of the checkpoint that is being written.
        parts: parts of tensors that this rank writes.
        section_of: mapping from the name of each tensor to its top-level key.
        rank: rank of this process.

    Raises:
        OSError: a file cannot be written, for example because the disk is full.
    """
    groups = _file_groups(parts, section_of)
    return [
        _write_file(folder / f"shard-{rank + 1:05}-model-{index:05}-of-{len(groups):05}{TENSOR_SUFFIX}", group)
        for index, group in enumerate(groups, start=1)
    ]


def _write_file(path: Path, parts: Sequence[TensorBox]) -> StoredFile:
    by_name = {part.name: part for part in parts}
    metadata = {
        "DCP_SHARDING_INFO": json.dumps({part.name: {"saved_offsets": part.offsets} for part in parts}),
        "DCP_VERSION": "1.0",
        "format": "pt",
    }
    specs = {part.name: (part.tensor.dtype, tuple(part.tensor.shape)) for part in parts}
    with TensorFile(path, specs, metadata) as file:
        for name in file.names:
            for data in bytes_of(by_name[name].tensor):
                file.append(data)
    return StoredFile(path.name, file.size_bytes, file.crc32, tuple(file.names))


def _file_groups(parts: Sequence[TensorBox], section_of: Mapping[str, Any]) -> list[list[TensorBox]]:
    """Group ``parts`` by file. A new file is started for each section, and whenever a file is full."""
    groups: list[list[TensorBox]] = []
    held_bytes, section = 0, object()
    for part in parts:
        if section_of[part.name] != section or held_bytes + part.tensor.nbytes > _FILE_BYTES:
            groups.append([])
            held_bytes, section = 0, section_of[part.name]
        groups[-1].append(part)
        held_bytes += part.tensor.nbytes
    return groups
