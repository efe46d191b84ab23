"""Reader of the weights of a checkpoint, with adapters merged into the weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from roomier.checkpoint.stored_tensors import StoredTensors, joined
from roomier.checkpoint.tensor_file import CHUNK_BYTES
from roomier.checkpoint.tree import TensorSpec
from roomier.core.errors import RoomierError
from roomier.plan.parts import AdapterPlan
from roomier.techniques.adapters.layers import decode, product_of

_OF_AN_ADAPTER = ("lora_A", "lora_B", "weight_codes", "weight_scales")


class MergedTensors:
    """Reader like :class:`StoredTensors` that reads a frozen weight and its adapter as one merged weight.

    Args:
        path: checkpoint folder.
        section: section of the checkpoint; see :class:`StoredTensors`.
        adapter: adapter settings in the Plan of the training run.

    Attributes:
        specs: see :class:`StoredTensors`.
        tied_to: see :class:`StoredTensors`.
        others: see :class:`StoredTensors`.

    Raises:
        CheckpointError: the checkpoint is damaged or does not contain this section.
        RoomierError: a weight with an adapter is tied to a weight of another layer, or the scale of the adapters is
            unknown.
    """

    def __init__(self, path: str | Path, section: str, adapter: AdapterPlan) -> None:
        self._stored = StoredTensors(path, section)
        self._adapter = adapter
        self.specs = self._stored.specs
        self.tied_to, self.others = self._stored.tied_to, self._stored.others
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
            yield from self._stored.chunks(key)
            return
        spec, prefix = self.specs[key], key.removesuffix("weight")
        added = self._added(prefix)
        if key in self._stored.specs:
            weight = self._stored.whole(key)
        else:
            codes, scales = (self._stored.whole(f"{prefix}{each}") for each in ("weight_codes", "weight_scales"))
            weight = decode(codes, scales, self._adapter.frozen_base, torch.Size(spec.shape), torch.float32)
        merged = (weight.to(added.dtype) + added).to(spec.dtype)
        yield from torch.split(merged.reshape(-1), max(1, CHUNK_BYTES // spec.dtype.itemsize))

    def whole(self, key: str) -> Tensor:
        """Return the full tensor ``key``."""
        return joined(self.chunks(key), self.specs[key])

    def _specs_of_plain_model(self) -> dict[str, TensorSpec]:
        specs: dict[str, TensorSpec] = {}
        for key, spec in self._stored.specs.items():
            prefix, dot, name = key.rpartition(".")
            weight = f"{prefix}{dot}weight"
            if weight not in self._adapted or name not in _OF_AN_ADAPTER:
                specs[key] = spec
            elif weight not in self._stored.specs:
                a, b = (self._stored.specs[f"{prefix}{dot}{each}"] for each in ("lora_A", "lora_B"))
                shape = (a.shape[0], b.shape[1]) if self._is_in_out(prefix + dot) else (b.shape[0], a.shape[1])
                specs[weight] = TensorSpec(shape, a.dtype)
        return specs

    def _is_in_out(self, prefix: str) -> bool:
        # The rank is less than both dimensions of the weight, so the shape of the adapter shows the layout.
        a = self._stored.specs[f"{prefix}lora_A"]
        return bool(a.shape[0] != self._adapter.lora_rank)

    def _added(self, prefix: str) -> Tensor:
        rank = self._adapter.lora_rank
        assert rank is not None
        alpha = rank if self._adapter.lora_alpha is None else self._adapter.lora_alpha
        a, b = self._stored.whole(f"{prefix}lora_A"), self._stored.whole(f"{prefix}lora_B")
        return product_of(a, b, alpha / rank, is_in_out=self._is_in_out(prefix))
