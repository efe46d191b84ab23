"""Checkpoints of a custom loop, and full weights of a prepared model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from roomier import checkpoint
from roomier.checkpoint.export.safetensors import ToWrite, write_shard, write_tensors
from roomier.core.device.rng import rng_state, set_rng_state
from roomier.core.errors import RoomierError
from roomier.core.ranks import Ranks
from roomier.core.replacing import replacing_path
from roomier.core.sharded import is_sharded
from roomier.core.tree import to_device
from roomier.core.units import parse_bytes
from roomier.engine.prepared import ModelEngine

_HOST = torch.device("cpu")
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


def save_loop(
    path: str | Path, engines: Sequence[ModelEngine], others: Mapping[str, Sequence[Any]], ranks: Ranks
) -> None:
    """Write the state of a loop as a checkpoint folder. Every rank must call this function.

    Args:
        path: checkpoint folder.
        engines: engines whose models and optimizers are saved.
        others: lists of objects with ``state_dict``, by name.
        ranks: all ranks.

    Raises:
        CheckpointError: a state contains an unsupported type, or the folder cannot be written.
    """
    state: dict[str, Any] = {name: [each.state_dict() for each in objects] for name, objects in others.items()}
    for number, engine in enumerate(engines):
        of_engine = engine.state()
        state[f"module{number}"] = of_engine.pop("module")
        state[f"optimizers{number}"] = of_engine.pop("optimizers")
        state[f"engine{number}"] = of_engine
    checkpoint.save(path, {**state, "random": ranks.gather(rng_state())}, ranks)


def load_loop(
    path: str | Path, engines: Sequence[ModelEngine], others: Mapping[str, Sequence[Any]], ranks: Ranks
) -> None:
    """Restore a checkpoint that :func:`save_loop` wrote. The arguments are the same as for :func:`save_loop`.

    Weights and optimizer states are read directly into the existing tensors. Each rank reads only its shards.

    Raises:
        CheckpointError: the checkpoint is damaged, or belongs to other models, optimizers or objects.
        RoomierError: the checkpoint contains a different number of models or objects.
    """
    stored = checkpoint.peek(path, check_files=True)
    for name, objects in {**others, "module": [None] * len(engines)}.items():
        found = sum(f"module{number}" in stored for number in range(len(stored)))
        num_stored = found if name == "module" else len(stored.get(name, ()))
        if num_stored != len(objects):
            kind = {"module": "models", "registered": "registered objects"}.get(name, name)
            problem = f"contains {num_stored} {kind}, but {len(objects)} were prepared or registered"
            raise RoomierError("load_state", str(path), problem, "Prepare the same objects as the script that saved it")
    into: dict[str, Any] = {}
    for number, engine in enumerate(engines):
        engine.check({"optimizers": stored[f"optimizers{number}"]})
        into[f"module{number}"] = engine.weights()
        into[f"optimizers{number}"] = engine.places(
            stored[f"optimizers{number}"],
            is_spec=lambda value: isinstance(value, checkpoint.TensorSpec),
            unneeded=checkpoint.UNREAD,
        )
    empty = [name for name in into if name.startswith("optimizers")]
    state = checkpoint.load(path, into=into, ranks=ranks, empty=empty)
    for number, engine in enumerate(engines):
        parts = {name: state[f"{name}{number}"] for name in ("module", "optimizers")}
        engine.load({**parts, **state[f"engine{number}"]})
    for name, objects in others.items():
        for each, saved in zip(objects, state[name], strict=True):
            each.load_state_dict(saved)
    if ranks.world.rank < len(state["random"]):
        set_rng_state(state["random"][ranks.world.rank])


def full_weights(network: nn.Module, ranks: Ranks) -> dict[str, Any]:
    """Return the unsharded state of ``network``. Tensors that were sharded are in host memory on rank 0, and are
    omitted on other ranks.

    Every rank must call this function. Tensors are unsharded on the device, one at a time. Tied parameters share one
    tensor in the result.
    """
    tied = {name: id(each) for name, each in network.named_parameters(remove_duplicate=False)}
    unsharded: dict[int, Tensor] = {}
    found: dict[str, Any] = {}
    for name, each in network.state_dict().items():
        if not isinstance(each, Tensor) or not is_sharded(each):
            found[name] = each
            continue
        key = tied.get(name, id(each))
        if key not in unsharded:
            full = each.full_tensor()
            unsharded[key] = to_device(full, _HOST) if ranks.is_zero else each
        if ranks.is_zero:
            found[name] = unsharded[key]
    return found


def write_weights(folder: Path, weights: Mapping[str, Any], max_shard_size: int | str) -> None:
    """Write safetensors files of at most ``max_shard_size``, and remove the files that an earlier call wrote.

    A tensor that is larger than ``max_shard_size`` is written to a separate file. Tied weights are written once.

    Raises:
        RoomierError: a value is not a tensor.
    """
    size = max_shard_size if isinstance(max_shard_size, int) else parse_bytes("max_shard_size", max_shard_size)
    tensors = _to_write(weights)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing_path(folder / "model.safetensors.index.json") as index:
        write_tensors(index.parent, tensors, size)
        written = {each.name for each in index.parent.iterdir()}
    for earlier in folder.iterdir():
        if _WEIGHTS.fullmatch(earlier.name) and earlier.name not in written:
            earlier.unlink()


def write_file(path: Path, weights: Mapping[str, Any]) -> None:
    """Write one safetensors file. Tied weights are written once.

    Raises:
        RoomierError: a value is not a tensor.
    """
    write_shard(path, _to_write(weights))


def _to_write(weights: Mapping[str, Any]) -> list[ToWrite]:
    names: dict[tuple[Any, ...], list[str]] = {}
    for name, each in weights.items():
        if not isinstance(each, Tensor):
            action = "Use safe_serialization=False, which writes a pickle"
            raise RoomierError(name, type(each).__name__, "is not a tensor, so safetensors cannot store it", action)
        key = (each.data_ptr(), each.shape, each.stride(), each.dtype) if each.numel() else (name,)
        names.setdefault(key, []).append(name)
    return [_tensor_to_write(first, weights[first], tuple(tied)) for first, *tied in names.values()]


def _tensor_to_write(name: str, tensor: Tensor, tied: tuple[str, ...]) -> ToWrite:
    return ToWrite(name, tensor.dtype, tuple(tensor.shape), lambda: [tensor.detach()], tied)
