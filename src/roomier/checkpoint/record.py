"""Record of a checkpoint, ``run.json``: the list of the tensor files, and every value that is not a tensor.

The file is ``{"crc32": "<8 hex digits>", "content": {...}}``. The checksum covers the bytes of the content, so it
detects every flipped bit, but it does not authenticate the file. A reader must therefore handle arbitrary bytes. Only
:func:`read_record` parses a record; it checks types, ranges, sizes and nesting, and reads regular files only.

[Note: commit numbers]
The clock of a machine can be set back, so checkpoints are not ordered by save time. Instead, a new checkpoint has a
commit number that is larger than the number of every checkpoint with which it can be compared
(:func:`roomier.checkpoint.find.find_last`). Checkpoints that two processes commit at the same moment, and copies of a
folder, have equal numbers and are ordered by step. Checkpoints of format 2 have no commit number, which counts as 0.
"""

import errno
import json
import os
import re
import stat
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roomier.checkpoint.tensor_file import SummedFile
from roomier.checkpoint.tree import Json, StoredTensor, join, leaves
from roomier.core.errors import CheckpointError, RoomierError
from roomier.core.forms import FormError, anything, count, fields, integer, list_of, mapping_of, place_of, text
from roomier.core.untrusted import open_regular, parse_json, read_regular
from roomier.storage.remote_path import RemotePath

RECORD_NAME = "run.json"
TENSOR_SUFFIX = ".safetensors"
RECORD_OF_DCP = ".metadata"
README_NAME = "README.txt"
README_START = "This folder is a checkpoint of roomier."
FORMAT_VERSION = 3
READ_VERSIONS = (2, 3)
MAX_COMMIT_NUMBER = 2**48
MAX_RECORD_BYTES = 2**30

_HEAD = b'{"crc32": "%08x", "content": '
_HEAD_BYTES = len(_HEAD % 0)
_MARK = _HEAD[:11]
_TAIL = b"}\n"
_NUMBER_BYTES = 256  # the first bytes of a record, which contain its commit number
_NUMBER = re.compile(rb'\{"crc32": "[0-9a-f]{8}", "content": \{"format_version":\d{1,4},"commit_number":(\d{1,15}),')
_FOREIGN_BYTES = 2**20
_FILE_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,200}}{re.escape(TENSOR_SUFFIX)}")

_FILE_FORM = fields({"name": text, "size_bytes": count, "crc32": integer(at_most=2**32 - 1), "tensors": list_of(text)})
_CONTENT_FORM = fields(
    {
        "format_version": count,
        "roomier_version": text,
        "torch_version": text,
        "saved_at_ns": integer(at_most=2**63 - 1),
        "files": list_of(_FILE_FORM),
        "tree": mapping_of(anything),
    },
    others={"commit_number": integer(at_most=MAX_COMMIT_NUMBER), "write_ms": count},
)


class NotACheckpointError(CheckpointError):
    """Error for a path that has never been a checkpoint."""


class DamagedCheckpointError(CheckpointError):
    """Error for a checkpoint with missing, truncated or changed files."""


@dataclass(frozen=True)
class StoredFile:
    """File of tensors.

    Attributes:
        name: file name without a folder.
        size_bytes: size of the file.
        crc32: CRC-32 of the bytes of the file.
        tensors: names of the tensors that the file contains completely or in part.
    """

    name: str
    size_bytes: int
    crc32: int
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class Record:
    """The content of ``run.json``.

    Attributes:
        format_version: version of the checkpoint format.
        commit_number: number that orders checkpoints; see [Note: commit numbers].
        roomier_version: version of roomier that wrote the checkpoint.
        torch_version: version of torch that wrote the checkpoint.
        saved_at_ns: time shortly before the commit in nanoseconds since the Unix epoch, by the clock of the machine.
        files: names, sizes and checksums of the tensor files, with the tensors that they contain.
        tree: the state without its tensors, as returned by :func:`roomier.checkpoint.tree.split`.
        write_ms: duration of writing the files, in milliseconds; 0 if it is not known.
    """

    format_version: int
    commit_number: int
    roomier_version: str
    torch_version: str
    saved_at_ns: int
    files: tuple[StoredFile, ...]
    tree: Json
    write_ms: int = 0

    @property
    def global_step(self) -> int:
        """Number of optimizer steps of the run; -1 if the state has no progress."""
        progress = self.tree.get("progress")
        step = progress.get("global_step") if isinstance(progress, dict) else None
        return step if type(step) is int else -1


def write_record(folder: Path, record: Record) -> None:
    """Write ``record`` into ``folder`` and flush it to the disk.

    Raises:
        OSError: the record cannot be written, or is larger than :func:`read_record` accepts.
    """
    values = {**vars(record), "files": [vars(file) for file in record.files]}
    content = json.dumps(values, allow_nan=False, separators=(",", ":")).encode("ascii")
    if _HEAD_BYTES + len(content) + len(_TAIL) > MAX_RECORD_BYTES:
        raise OSError(errno.EFBIG, f"{RECORD_NAME} would be larger than {MAX_RECORD_BYTES} bytes")
    with open(folder / RECORD_NAME, "wb") as file:
        file.write(_HEAD % zlib.crc32(content))
        file.write(content)
        file.write(_TAIL)
        file.flush()
        os.fsync(file.fileno())


def read_record(folder: Path) -> Record:
    """Return the record of the checkpoint ``folder``. Other files are not read.

    Raises:
        NotACheckpointError: ``folder`` does not exist, or was never a checkpoint.
        CheckpointError: the record is missing, malformed, or written by a newer version.
    """
    path = folder / RECORD_NAME
    try:
        with open_regular(path) as file:
            is_own = file.read(len(_MARK)) == _MARK
        data = read_regular(path, MAX_RECORD_BYTES if is_own else _FOREIGN_BYTES)
    except RoomierError:  # remote storage cannot be reached
        raise
    # A ValueError is raised if the path contains a null character.
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise _without_record(folder) from None
    except OSError as error:
        raise damage(folder, f"{RECORD_NAME} cannot be read: {error.strerror}") from error
    if len(data) < _HEAD_BYTES or not data.startswith(_MARK):
        if _is_foreign_json(data):
            problem = f"has a {RECORD_NAME} of another program"
            raise NotACheckpointError("checkpoint", str(folder), problem, "Pass the path of a checkpoint folder")
        raise damage(folder, f"{RECORD_NAME} is truncated or overwritten")
    content = data[_HEAD_BYTES : -len(_TAIL)]
    if data != (_HEAD % zlib.crc32(content)) + content + _TAIL:
        raise damage(folder, f"{RECORD_NAME} is damaged, because its checksum does not match its content")
    with malformed(folder):
        return _parse(folder, parse_json(content))


def read_commit_number(folder: Path) -> int:
    """Return the commit number of the checkpoint ``folder``, from the first bytes of its record.

    Returns 0 if the record has no number or cannot be read. The checksum is not verified.
    """
    try:
        with open_regular(folder / RECORD_NAME) as file:
            found = _NUMBER.match(file.read(_NUMBER_BYTES))
    except RoomierError:  # remote storage cannot be reached
        raise
    except (OSError, ValueError):
        return 0
    return min(int(found[1]), MAX_COMMIT_NUMBER) if found else 0


def read_state(folder: Path, record: Record) -> dict[str, Any]:
    """Return the state of ``record`` with a :class:`StoredTensor` for each tensor.

    Raises:
        CheckpointError: a value is malformed, or a tensor is larger than the files that list it.
    """
    with malformed(folder):
        state = join(record.tree)
        mapping_of(anything, keys=anything)(state, "tree")
        held_bytes: dict[str, int] = {}
        for file in record.files:
            for name in file.tensors:
                held_bytes[name] = held_bytes.get(name, 0) + file.size_bytes
        for path, stored in leaves(state, StoredTensor):
            if stored.spec.num_bytes > held_bytes.get(stored.name, -1):
                raise FormError(place_of(("tree", *path)), stored.spec, "a tensor that fits into its files")
    return state  # type: ignore[no-any-return]


@contextmanager
def malformed(folder: Path, file: str = RECORD_NAME) -> Iterator[None]:
    """Convert a ValueError in the ``with`` block to a DamagedCheckpointError that names ``file``."""
    try:
        yield
    except RoomierError:  # this error already names its field
        raise
    except ValueError as error:
        raise damage(folder, f"{file} is malformed: {error}") from error


def _without_record(folder: Path) -> CheckpointError:
    if not folder.is_dir():
        return NotACheckpointError(
            "checkpoint", str(folder), "is not an existing folder", "Pass the path of a checkpoint folder"
        )
    if has_lost_record(folder):
        return damage(folder, f"{RECORD_NAME} is missing")
    if (folder / RECORD_OF_DCP).is_file():  # the record of DCP is a pickle file, which is never read
        program = "python -m lightning.pytorch.utilities.consolidate_checkpoint"
        return NotACheckpointError(
            "checkpoint",
            str(folder),
            "is a sharded torch.distributed.checkpoint folder, such as Lightning saves with FSDP",
            f"Run `{program} {folder}` in the environment that saved the checkpoint, and pass {folder}.consolidated",
        )
    problem = f"is not a checkpoint: it has no {RECORD_NAME}"
    if isinstance(folder, RemotePath):
        problem += ", which is uploaded last"
    return NotACheckpointError("checkpoint", str(folder), problem, "Pass the path of a checkpoint folder")


def has_lost_record(folder: Path) -> bool:
    """Return True if ``folder`` has no record, but other files of a checkpoint."""
    # The record is uploaded last, so a remote folder without a record is an upload that is not complete.
    if isinstance(folder, RemotePath) or os.path.lexists(folder / RECORD_NAME):
        return False
    try:
        with open_regular(folder / README_NAME) as file:
            has_readme = file.read(len(README_START)) == README_START.encode()
    except (OSError, ValueError):
        has_readme = False
    return has_readme or any(folder.glob(f"shard-*{TENSOR_SUFFIX}"))


def _is_foreign_json(data: bytes) -> bool:
    try:
        parse_json(data)
    except ValueError:
        return False
    return True


def _parse(folder: Path, content: Any) -> Record:
    version = content.get("format_version") if isinstance(content, dict) else None
    if type(version) is int and version > max(READ_VERSIONS):
        raise CheckpointError(
            "checkpoint",
            str(folder),
            f"has format version {version}, but this version of roomier reads only "
            f"{' and '.join(map(str, READ_VERSIONS))}",
            f"Load it with roomier {content.get('roomier_version')}, which wrote it",
        )
    _CONTENT_FORM(content, "content")
    integer(*READ_VERSIONS)(version, "content.format_version")
    files = tuple(StoredFile(**{**file, "tensors": tuple(file["tensors"])}) for file in content["files"])
    names = [file.name for file in files]
    for index, name in enumerate(names):
        if _FILE_NAME.fullmatch(name) is None:  # the name could be a path outside the folder
            raise FormError(f"content.files[{index}].name", name, "the name of a tensor file")
    if len(set(names)) < len(names):
        raise FormError("content.files", names, "a list of files with distinct names")
    return Record(**{"commit_number": 0, **content, "files": files})


def damage(folder: Path, problem: str) -> DamagedCheckpointError:
    """Return the error for a checkpoint that was damaged after it was saved."""
    return DamagedCheckpointError("checkpoint", str(folder), problem, "Use another checkpoint")


def check_sizes(folder: Path, record: Record) -> None:
    """Check that ``folder`` contains every tensor file of ``record`` with its full size, and no other tensor file.

    Raises:
        CheckpointError: a file is missing, truncated, not a regular file, or not listed. The error names the first such
            file.
    """
    paths = {path.name: path for path in folder.glob(f"*{TENSOR_SUFFIX}")}
    for file in record.files:
        try:
            found = paths.pop(file.name, folder / file.name).stat()
        except FileNotFoundError:
            raise damage(folder, f"file {file.name!r} is missing") from None
        except OSError as error:
            raise damage(folder, f"file {file.name!r} cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(found.st_mode):
            raise damage(folder, f"file {file.name!r} is not a regular file")
        if found.st_size != file.size_bytes:
            raise damage(
                folder,
                f"file {file.name!r} is damaged: the file has {found.st_size} bytes instead of {file.size_bytes}",
            )
    if paths:
        raise damage(
            folder, f"file {min(paths)!r} is not part of the checkpoint, because {RECORD_NAME} does not list it"
        )


def check_sums(folder: Path, files: Iterable[StoredFile]) -> None:
    """Read ``files`` and compare their checksums with the record.

    Raises:
        CheckpointError: the content of a file changed. The error names the first such file.
    """
    for file in files:
        with summed(folder, file):
            pass


@contextmanager
def summed(folder: Path, file: StoredFile) -> Iterator[SummedFile]:
    """Open a tensor file for reading from front to end. At the end of the block, verify the checksum of the full file.

    Raises:
        CheckpointError: the file cannot be read, or its content changed.
    """
    with reading(folder, file.name), open_regular(folder / file.name) as opened:
        found = SummedFile(opened)
        yield found
        found.read_rest()
    if found.crc32 != file.crc32:
        raise damage(folder, f"file {file.name!r} is damaged: its checksum does not match the record")


@contextmanager
def reading(folder: Path, name: str) -> Iterator[None]:
    """Convert an OSError about the file ``name`` to a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise damage(folder, f"file {name!r} cannot be read: {error.strerror}") from error
