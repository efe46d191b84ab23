"""Tensors to and from safetensors files that torch.distributed.checkpoint (DCP) reads. No pickle on any way.

[Note: the files]
Each rank writes files of its own, ``shard-<rank>-model-<file>-of-<files>.safetensors``, in the layout of DCP's
``HuggingFaceStorageWriter``: boxes of tensors under the names of the whole tensors, and in the header where each box
begins. DCP's reader puts them together again for any other layout; here and in any other program.
DCP's writer is not used: it builds the bytes of each file in memory twice, agrees with the other ranks in calls of
its own, and knows no checksum. Here bytes go to the file as they are; what is needed beyond the state is one tensor
that is not contiguous, or 4 MiB of one on a device.
"""

import json
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.futures import Future

from roomier.checkpoint.parts import Part
from roomier.checkpoint.record import TENSOR_SUFFIX, StoredFile
from roomier.checkpoint.tensor_file import TensorFile, bytes_of, read_box, read_header
from roomier.checkpoint.tree import TensorSpec

_FILE_BYTES = 128 * 2**20
_WARNING_FILTERS = threading.Lock()  # they belong to the whole process


def write_parts(folder: Path, parts: Sequence[Part], section_of: Mapping[str, Any], rank: int) -> list[StoredFile]:
    """Write ``parts`` into files of this rank in ``folder``, flushed to the disk; parts of two sections never share
    a file.

    Raises:
        OSError: the disk is full, say.
    """
    groups = _file_groups(parts, section_of)
    return [
        _write_file(folder / f"shard-{rank + 1:05}-model-{index:05}-of-{len(groups):05}{TENSOR_SUFFIX}", group)
        for index, group in enumerate(groups, start=1)
    ]


def _write_file(path: Path, parts: Sequence[Part]) -> StoredFile:
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


def _file_groups(parts: Sequence[Part], section_of: Mapping[str, Any]) -> list[list[Part]]:
    """``parts`` in files: a new one for each section, and when one is full."""
    groups: list[list[Part]] = []
    held_bytes, section = 0, object()
    for part in parts:
        if section_of[part.name] != section or held_bytes + part.tensor.nbytes > _FILE_BYTES:
            groups.append([])
            held_bytes, section = 0, section_of[part.name]
        groups[-1].append(part)
        held_bytes += part.tensor.nbytes
    return groups


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
        # Without DCP's collectives: who reads what depends on nothing but the files and the targets.
        dcp_load(
            dict(targets),
            storage_reader=_InPlaceReader(str(folder)),
            planner=planner,
            no_dist=True,
        )


class _InPlaceReader(HuggingFaceStorageReader):
    """Reads from the files into the memory of the tensors. What it is derived from maps whole files into memory and
    makes a copy of each box."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for path, items in by_file.items():
            stored = read_header(Path(path)).tensors
            with open(path, "rb", buffering=0) as file:
                for item in items:
                    _, shape, first = stored[item.storage_index.fqn]
                    ends = zip(item.storage_offsets, item.lengths, strict=True)
                    box = [slice(begin, begin + length) for begin, length in ends]
                    target = planner.resolve_tensor(item).detach()
                    read_box(file, first, shape, box, target)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


@contextmanager
def _dcp_errors() -> Iterator[None]:
    """Let the error that stopped DCP through as itself: DCP wraps it, even KeyboardInterrupt."""
    try:
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
