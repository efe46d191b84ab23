"""Tensors to and from safetensors files, through torch.distributed.checkpoint (DCP). No pickle on any way.

[Note: memory while saving]
DCP builds the bytes of a whole file in memory before it writes them, and safetensors holds them twice for a
moment. So the tensors are spread over files of about ``_FILE_BYTES``: saving takes twice such a file (or twice
the largest tensor) beyond the state itself, and once more for those of its tensors that must be copied first: on a
device, not contiguous, tied, or a view of something larger. Measured, a state of 1 GiB: 256 MiB in 64 tensors,
417 MiB when all of them are transposed, 1 GiB in two tensors of 512 MiB.
"""

import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from roomier.checkpoint.record import TENSOR_SUFFIX, StoredFile, crc32_of
from roomier.checkpoint.tree import TensorSpec

_FILE_BYTES = 128 * 2**20
_WARNING_FILTERS = threading.Lock()  # they belong to the whole process


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], section_of: Mapping[str, Any]) -> None:
    """Write ``tensors`` into ``folder``, flushed to the disk; tensors of two sections never share a file.

    Raises:
        OSError: the disk is full, say.
    """
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=_file_indices(tensors, section_of), save_distributed=True
    )
    with _dcp_errors():
        dcp_save(dict(tensors), storage_writer=writer, planner=_SavePlanner(), no_dist=_is_alone())


def stored_files(folder: Path) -> tuple[StoredFile, ...]:
    """What the tensor files in ``folder`` are, by name. Reads each once. Raises OSError."""
    files = []
    for path in sorted(folder.glob(f"*{TENSOR_SUFFIX}")):
        with safe_open(path, framework="pt") as file:
            names = tuple(file.keys())
        files.append(StoredFile(path.name, path.stat().st_size, crc32_of(path), names))
    return tuple(files)


def stored_specs(folder: Path) -> dict[str, TensorSpec]:
    """Global shape and dtype of every tensor in the files of ``folder``, from their headers alone."""
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
    return {
        name: TensorSpec(tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_tensors(folder: Path, targets: Mapping[str, Tensor]) -> None:
    """Fill each of ``targets`` in place with the tensor of its name; a sharded one reads only its own part.

    Raises:
        OSError: a file cannot be read; targets may then be filled in part.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _dcp_errors():
        dcp_load(
            dict(targets),
            storage_reader=HuggingFaceStorageReader(str(folder)),
            planner=planner,
            no_dist=_is_alone(),
        )


def _file_indices(tensors: Mapping[str, Tensor], section_of: Mapping[str, Any]) -> dict[str, int] | None:
    """File number (from 1) of each tensor: a new file for each section, and when one is full."""
    indices: dict[str, int] = {}
    index, held_bytes, section = 0, 0, object()
    for name, tensor in tensors.items():
        if section_of[name] != section or held_bytes + tensor.nbytes > _FILE_BYTES:
            index, held_bytes, section = index + 1, 0, section_of[name]
        indices[name] = index
        held_bytes += tensor.nbytes
    return indices or None


class _SavePlanner(DefaultSavePlanner):
    """Hands each tensor to the writer in the form safetensors takes: contiguous, with memory of its own.

    It is asked for a tensor when that tensor's file is due, so at most one file's tensors are copied at a time.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._storages_seen: set[int] = set()

    def transform_object(self, write_item: WriteItem, object: Tensor) -> Tensor:
        tensor = object.detach()
        packed = tensor.resolve_conj().resolve_neg().contiguous()
        if packed.data_ptr() != tensor.data_ptr() or not tensor.is_cpu:
            return packed
        # Tied weights: the same memory under several names. The state keeps it alive, so a pointer is an identity.
        storage = tensor.untyped_storage().data_ptr()
        if storage in self._storages_seen:
            return packed.clone()
        self._storages_seen.add(storage)
        return packed


def _is_alone() -> bool:
    return not (dist.is_available() and dist.is_initialized())


@contextmanager
def _dcp_errors() -> Iterator[None]:
    """Let the error that stopped DCP through as itself: DCP wraps it, even KeyboardInterrupt."""
    try:
        if not _is_alone():
            yield
            return
        with _WARNING_FILTERS, warnings.catch_warnings():
            # It warns that there is one process; that is what was asked for.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        _raise_first_cause(error)


def _raise_first_cause(error: CheckpointException) -> NoReturn:
    for cause, _trace in error.failures.values():
        raise cause from None
    raise RuntimeError(str(error)) from None
