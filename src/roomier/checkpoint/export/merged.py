"""Reader of the weights of a checkpoint, with adapters merged into the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from roomier.checkpoint.commit import surviving_path
from roomier.checkpoint.find import naming_alternative
from roomier.checkpoint.reading import Piece, find_pieces
from roomier.checkpoint.record import check_sizes, check_sums, read_record, read_state
from roomier.checkpoint.tensor_file import CHUNK_BYTES, read_box
from roomier.checkpoint.tree import StoredTensor, TensorSpec
from roomier.core.errors import CheckpointError, RoomierError
from roomier.core.untrusted import open_regular
from roomier.plan.parts import AdapterPlan
from roomier.techniques.adapters.layers import decode, product_of


class StoredTensors:
    """Tensors of one top-level entry of a checkpoint, which are read in chunks after all required files are verified.

    Args:
        path: checkpoint folder.
        section: top-level entry.

    Attributes:
        specs: shape and dtype of each tensor by key, in the order in which they were saved.
        tied_to: mapping from each additional key of a tied tensor to the first key of the tensor.
        others: keys of the entry whose values are not tensors.

    Raises:
        CheckpointError: the checkpoint is damaged, or does not contain this entry.
    """

    def __init__(self, path: str | Path, section: str) -> None:
        self._folder = surviving_path(path)
        with naming_alternative(self._folder):
            record = read_record(self._folder)
            check_sizes(self._folder, record)
            entry = read_state(self._folder, record).get(section)
            if not isinstance(entry, dict):
                action = "Pass a checkpoint that Trainer or ModelCheckpoint saved"
                raise CheckpointError("checkpoint", str(self._folder), f"has no entry {section!r}", action)
            files, self._pieces = find_pieces(self._folder, record, entry)
            check_sums(self._folder, files)
        self._stored = {key: value for key, value in entry.items() if isinstance(value, StoredTensor)}
        self.specs = {key: stored.spec for key, stored in self._stored.items()}
        self.others = [key for key in entry if key not in self._stored]
        first_key: dict[str, str] = {}
        firsts = {key: first_key.setdefault(stored.name, key) for key, stored in self._stored.items()}
        self.tied_to = {key: first for key, first in firsts.items() if first != key}

    def chunks(self, key: str) -> Iterator[Tensor]:
        """Yield the elements of the tensor ``key`` in row-major order, as 1-D tensors of about ``CHUNK_BYTES``.

        If the tensor was saved unsharded or sharded by rows, only one chunk is in memory at a time. Otherwise, the full
        tensor is in memory.

        Raises:
            OSError: a file cannot be read.
        """
        spec, pieces = self._stored[key].spec, self._pieces[self._stored[key].name]
        if all(piece.shape[1:] == spec.shape[1:] for piece in pieces):
            for piece in sorted(pieces, key=lambda each: each.offsets):
                yield from _rows_of(self._folder / piece.file, piece)
            return
        whole = torch.empty(spec.shape, dtype=spec.dtype)
        for piece in pieces:
            box = tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.shape, strict=True))
            with open_regular(self._folder / piece.file) as file:
                read_box(file, piece.first, piece.shape, [slice(0, size) for size in piece.shape], whole[box])
        yield from torch.split(whole.reshape(-1), max(1, CHUNK_BYTES // spec.dtype.itemsize))

    def whole(self, key: str) -> Tensor:
        """Return the full tensor ``key``. Raises OSError."""
        return joined(self.chunks(key), self.specs[key])


def joined(chunks: Iterable[Tensor], spec: TensorSpec) -> Tensor:
    """Return a tensor with the shape and dtype of ``spec`` from 1-D chunks of its elements in row-major order.

    The peak memory is twice the size of the tensor.
    """
    pieces = list(chunks)  # this list is empty for a tensor without elements
    return torch.cat(pieces).view(spec.shape) if pieces else torch.empty(spec.shape, dtype=spec.dtype)


def _rows_of(path: Path, piece: Piece) -> Iterator[Tensor]:
    # Read the bytes of consecutive rows as a flat array, regardless of the shape.
    num_elements = torch.Size(piece.shape).numel()
    chunk = max(1, CHUNK_BYTES // piece.dtype.itemsize)
    with open_regular(path) as file:
        for begin in range(0, num_elements, chunk):
            part = torch.empty(min(chunk, num_elements - begin), dtype=piece.dtype)
            read_box(file, piece.first, (num_elements,), [slice(begin, begin + len(part))], part)
            yield part


_OF_AN_ADAPTER = ("lora_A", "lora_B", "weight_codes", "weight_scales")


class MergedTensors(StoredTensors):
    """Reader like :class:`StoredTensors` that reads a frozen weight and its adapter as one merged weight.

    Args:
        path: checkpoint folder.
        section: section of the checkpoint; see :class:`StoredTensors`.
        adapter: adapter settings in the Plan of the training run.

    Attributes:
        specs, tied_to, others: see :class:`StoredTensors`.

    Raises:
        CheckpointError: the checkpoint is damaged or does not contain this section.
        RoomierError: a weight with an adapter is tied to a weight of another layer, or the scale of the adapters is
            unknown.
    """

    def __init__(self, path: str | Path, section: str, adapter: AdapterPlan) -> None:
        super().__init__(path, section)
        self._adapter = adapter
        ends = (key for key in self.specs if key.rpartition(".")[2] == "lora_A")
        self._adapted = {key.removesuffix("lora_A") + "weight" for key in ends}
        if not self._adapted:
            return
        if adapter.lora_rank is None:
            problem = "has adapters, but its plan does not contain their scale"
            action = "Load the checkpoint into the model with its adapters, call merge_lora, and save the result"
            raise RoomierError("checkpoint", str(path), problem, action)
        self.specs = self._specs_of_plain_model()
        shared = sorted(self._adapted & {*self.tied_to, *self.tied_to.values()})
        if shared:
            problem = "has an adapter, but another layer shares this weight and would change as well"
            raise RoomierError("checkpoint", shared[0], problem, "Train with adapters on other layers")

    def chunks(self, key: str) -> Iterator[Tensor]:
        """Yield the elements of a tensor in chunks. A weight with an adapter is assembled in memory."""
        if key not in self._adapted:
            yield from super().chunks(key)
            return
        spec, prefix = self.specs[key], key.removesuffix("weight")
        added = self._added(prefix)
        if key in self._stored:
            weight = self._unmerged(key)
        else:
            codes, scales = (self._unmerged(f"{prefix}{each}") for each in ("weight_codes", "weight_scales"))
            weight = decode(codes, scales, self._adapter.frozen_base, torch.Size(spec.shape), torch.float32)
        merged = (weight.to(added.dtype) + added).to(spec.dtype)
        yield from torch.split(merged.reshape(-1), max(1, CHUNK_BYTES // spec.dtype.itemsize))

    def _unmerged(self, key: str) -> Tensor:
        return joined(super().chunks(key), self._stored[key].spec)

    def _specs_of_plain_model(self) -> dict[str, TensorSpec]:
        specs: dict[str, TensorSpec] = {}
        for key, stored in self._stored.items():
            prefix, dot, name = key.rpartition(".")
            weight = f"{prefix}{dot}weight"
            if weight not in self._adapted or name not in _OF_AN_ADAPTER:
                specs[key] = stored.spec
            elif weight not in self._stored:
                a, b = (self._stored[f"{prefix}{dot}{each}"].spec for each in ("lora_A", "lora_B"))
                shape = (a.shape[0], b.shape[1]) if self._is_in_out(prefix + dot) else (b.shape[0], a.shape[1])
                specs[weight] = TensorSpec(shape, a.dtype)
        return specs

    def _is_in_out(self, prefix: str) -> bool:
        # The rank is less than both dimensions of the weight, so the shape of the adapter shows the layout.
        return self._stored[f"{prefix}lora_A"].spec.shape[0] != self._adapter.lora_rank

    def _added(self, prefix: str) -> Tensor:
        rank = self._adapter.lora_rank
        assert rank is not None
        alpha = rank if self._adapter.lora_alpha is None else self._adapter.lora_alpha
        a, b = self._unmerged(f"{prefix}lora_A"), self._unmerged(f"{prefix}lora_B")
        return product_of(a, b, alpha / rank, is_in_out=self._is_in_out(prefix))
