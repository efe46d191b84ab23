"""``run.json``: everything of a checkpoint that is not a tensor, and the list of the files that are.

The file is ``{"crc32": "<8 hex digits>", "content": {...}}``. The sum is taken over the bytes of the content as
they stand, so a flipped bit anywhere in them shows.
"""

import json
import os
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roomier.checkpoint.tree import Json
from roomier.core.errors import CheckpointError

RECORD_NAME = "run.json"
TENSOR_SUFFIX = ".safetensors"
RECORD_OF_DCP = ".metadata"
FORMAT_VERSION = 2

_HEAD = b'{"crc32": "%08x", "content": '
_HEAD_BYTES = len(_HEAD % 0)
_TAIL = b"}\n"
_READ_BYTES = 2**20


class NotACheckpointError(CheckpointError):
    """The folder is not a damaged checkpoint: it is none at all."""


class DamagedCheckpointError(CheckpointError):
    """The folder once was a good checkpoint: something is missing, cut off or changed."""


@dataclass(frozen=True)
class StoredFile:
    """One file of tensors: its bare name, its size, the CRC-32 of its bytes, and the tensors (or parts) in it."""

    name: str
    size_bytes: int
    crc32: int
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class Record:
    """The content of ``run.json``. ``saved_at_ns`` is the time since the epoch just before the commit."""

    format_version: int
    roomier_version: str
    torch_version: str
    saved_at_ns: int
    files: tuple[StoredFile, ...]
    tree: Json

    @property
    def age_key(self) -> tuple[int, int]:
        """Orders checkpoints from old to new: commit time, then the run's own step count."""
        progress = self.tree.get("progress") if isinstance(self.tree, dict) else None
        step = progress.get("global_step") if isinstance(progress, dict) else None
        return self.saved_at_ns, step if isinstance(step, int) else -1


def write_record(folder: Path, record: Record) -> None:
    """Write ``record`` into ``folder`` and flush it to the disk. Raises OSError."""
    fields = {**vars(record), "files": [vars(file) for file in record.files]}
    content = json.dumps(fields, allow_nan=False, separators=(",", ":")).encode("ascii")
    with open(folder / RECORD_NAME, "wb") as file:
        file.write(_HEAD % zlib.crc32(content))
        file.write(content)
        file.write(_TAIL)
        file.flush()
        os.fsync(file.fileno())


def read_record(folder: Path) -> Record:
    """The record of the checkpoint ``folder``; no other file is looked at.

    Raises:
        NotACheckpointError: ``folder`` does not exist, or nothing says that it ever was a checkpoint.
        CheckpointError: the record is missing, damaged, or written by a newer version.
    """
    try:
        data = (folder / RECORD_NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise _without_record(folder) from None
    except OSError as error:
        raise damage(folder, f"{RECORD_NAME} cannot be read: {error.strerror}") from error
    if len(data) < _HEAD_BYTES or not data.startswith(_HEAD[:11]):
        if _is_foreign_json(data):
            raise NotACheckpointError(
                "checkpoint", str(folder), f"its {RECORD_NAME} is not roomier's", "Give the path of a checkpoint folder"
            )
        raise damage(folder, f"{RECORD_NAME} is truncated or overwritten")
    content = data[_HEAD_BYTES : -len(_TAIL)]
    if data != (_HEAD % zlib.crc32(content)) + content + _TAIL:
        raise damage(folder, f"{RECORD_NAME} is damaged: its checksum does not fit its content")
    return _parse(folder, json.loads(content))


def _without_record(folder: Path) -> CheckpointError:
    if not folder.is_dir():
        return NotACheckpointError(
            "checkpoint", str(folder), "is not an existing folder", "Give the path of a checkpoint folder"
        )
    if any(folder.glob(f"shard-*{TENSOR_SUFFIX}")):
        return damage(folder, f"{RECORD_NAME} is missing")
    if (folder / RECORD_OF_DCP).is_file():  # a pickle, which is not read
        program = "python -m lightning.pytorch.utilities.consolidate_checkpoint"
        return NotACheckpointError(
            "checkpoint",
            str(folder),
            "is a sharded checkpoint of torch.distributed.checkpoint, as Lightning writes it with FSDP",
            f"Make one file of it where it was written, `{program} {folder}`, and pass that: {folder}.consolidated",
        )
    return NotACheckpointError(
        "checkpoint",
        str(folder),
        f"is not a checkpoint: it has no {RECORD_NAME}",
        "Give the path of a checkpoint folder",
    )


def _is_foreign_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except ValueError:
        return False
    return True


def _parse(folder: Path, content: dict[str, Any]) -> Record:
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            "checkpoint",
            str(folder),
            f"has format version {version}, this version of roomier reads {FORMAT_VERSION}",
            f"Load it with roomier {content.get('roomier_version')}, which wrote it",
        )
    try:
        files = tuple(StoredFile(**{**file, "tensors": tuple(file["tensors"])}) for file in content["files"])
        record = Record(**{**content, "files": files})
    except (KeyError, TypeError) as error:
        raise damage(folder, f"{RECORD_NAME} lacks an entry or has one too many: {error}") from error
    for file in files:
        # A name that leads out of the folder is never one that we wrote.
        if Path(file.name).name != file.name or not file.name.endswith(TENSOR_SUFFIX):
            raise damage(folder, f"{RECORD_NAME} lists {file.name!r}, which is not the name of a tensor file")
    return record


def damage(folder: Path, problem: str) -> DamagedCheckpointError:
    """The error for a checkpoint that once was good."""
    return DamagedCheckpointError("checkpoint", str(folder), problem, "Use another checkpoint")


def check_sizes(folder: Path, record: Record) -> None:
    """Every tensor file of ``record`` is in ``folder`` with its full size, and no other tensor file is.

    Raises:
        CheckpointError: it names the first file that is missing, cut off, or not listed.
    """
    for file in record.files:
        try:
            size_bytes = (folder / file.name).stat().st_size
        except FileNotFoundError:
            raise damage(folder, f"file {file.name!r} is missing") from None
        if size_bytes != file.size_bytes:
            raise damage(
                folder, f"file {file.name!r} has {size_bytes} bytes instead of {file.size_bytes}: it is damaged"
            )
    strangers = {path.name for path in folder.glob(f"*{TENSOR_SUFFIX}")} - {file.name for file in record.files}
    if strangers:
        raise damage(folder, f"file {min(strangers)!r} is not part of it: {RECORD_NAME} does not list it")


def check_sums(folder: Path, files: Collection[StoredFile]) -> None:
    """The bytes of each of ``files`` are those that were written. Reads them once, a MiB at a time.

    Raises:
        CheckpointError: it names the first file whose bytes changed.
    """
    for file in files:
        try:
            crc32 = crc32_of(folder / file.name)
        except OSError as error:
            raise damage(folder, f"file {file.name!r} cannot be read: {error.strerror}") from error
        if crc32 != file.crc32:
            raise damage(folder, f"file {file.name!r} is damaged: its bytes are not those that were written")


def crc32_of(path: Path) -> int:
    """The CRC-32 of a file's bytes, in constant memory. Raises OSError."""
    crc32 = 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_READ_BYTES):
            crc32 = zlib.crc32(chunk, crc32)
    return crc32
