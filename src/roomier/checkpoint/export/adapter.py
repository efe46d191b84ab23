"""Export of adapters to a folder that the peft package can load."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path

from torch import Tensor, nn

from roomier.checkpoint.commit import committed_folder
from roomier.checkpoint.export.merged import StoredTensors
from roomier.checkpoint.export.safetensors import ToWrite, dtype_in_file, new_folder, write_json, write_shard
from roomier.core.errors import RoomierError
from roomier.plan.parts import AdapterPlan
from roomier.techniques.adapters.layers import Adapted, rank_of
from roomier.techniques.adapters.lora import fully_trained_modules, matches

_PREFIX = "base_model.model."


def export_adapter(network: nn.Module, output: str | Path) -> Path:
    """Write the adapters of ``network`` to the folder ``output``, atomically.

    ``peft.PeftModel.from_pretrained(model, output)`` loads the folder (tested with peft 0.21). The folder contains
    ``adapter_model.safetensors`` and ``adapter_config.json``.

    Args:
        network: model with adapters. Its weights must have the same names as in the model that peft adapts.
        output: new folder.

    Returns:
        The absolute path of the folder.

    Raises:
        RoomierError: ``network`` has no adapters or is sharded, or ``output`` is a file or a nonempty folder.
    """
    layers = {name: each for name, each in network.named_modules() if isinstance(each, Adapted)}
    if not layers:
        action = "Pass the network that was trained with lora=..."
        raise RoomierError("network", type(network).__name__, "has no adapters", action)
    if any(hasattr(each.lora_A, "placements") for each in layers.values()):
        problem = "must not be sharded"
        raise RoomierError(
            "network", type(network).__name__, problem, "Load the checkpoint of this model into a new model"
        )
    parts = {name: _as_in_peft(each.lora_A, each.lora_B, is_in_out=each.is_in_out) for name, each in layers.items()}
    trained = fully_trained_modules(network)
    full = {
        part: each.detach().cpu() for name, module in trained.items() for part, each in module.named_parameters(name)
    }
    layer = next(iter(layers.values()))  # all layers have the same rank and scale
    settings = AdapterPlan(
        lora_rank=rank_of(layer), lora_alpha=layer.lora_scale * rank_of(layer), lora_dropout=layer.lora_dropout
    )
    is_in_out = any(each.is_in_out for each in layers.values())
    target = new_folder(output, None)
    _write(target, parts, full, settings, is_in_out=is_in_out, trained=list(trained))
    return target


def export_adapter_of(
    path: str | Path, output: Path, adapter: AdapterPlan, *, prefix: str = "", dtype: str | None = None
) -> int:
    """Write the adapters in the checkpoint ``path``, as :func:`export_adapter` does, without loading the other weights.

    Args:
        output: new folder.
        adapter: adapter settings in the Plan of the training run.
        prefix: prefix of the weights of the model that peft adapts, in the names of the module.
        dtype: dtype of the written tensors; None preserves the stored dtypes.

    Returns:
        The size of the tensors in bytes.

    Raises:
        RoomierError: the checkpoint has no adapters.
        CheckpointError: the checkpoint is damaged, or the disk is full.
    """
    stored = StoredTensors(path, "module")
    names = [key.removesuffix(".lora_A") for key in stored.specs if key.endswith(".lora_A") and key.startswith(prefix)]
    rank = adapter.lora_rank
    if not names or rank is None:
        problem, action = "has no adapters", "Remove adapters='alone', because the model was trained without adapters"
        raise RoomierError("checkpoint", str(path), problem, action)

    def read(key: str) -> Tensor:
        whole = stored.whole(key)
        return whole.to(dtype_in_file(whole.dtype, dtype))

    # The rank is less than both dimensions of a weight, so the shape of lora_A shows whether the weight is stored as
    # (in, out).
    in_out = {name: stored.specs[f"{name}.lora_A"].shape[0] != rank for name in names}
    parts = {
        name.removeprefix(prefix): _as_in_peft(read(f"{name}.lora_A"), read(f"{name}.lora_B"), is_in_out=in_out[name])
        for name in names
    }
    patterns = [each for each in adapter.lora_trained.split(",") if each]
    owners = {key.rpartition(".")[0] for key in stored.specs if key.startswith(prefix)}
    parents = {parent for name in owners for parent in accumulate(name.split("."), "{}.{}".format)}
    meant = sorted(name for name in parents if any(matches(name, pattern) for pattern in patterns))
    trained = [name for name in meant if not any(name.startswith(f"{outer}.") for outer in meant)]
    inside = tuple(f"{name}." for name in trained)
    full = {key.removeprefix(prefix): read(key) for key in stored.specs if inside and key.startswith(inside)}
    alpha = adapter.lora_alpha if adapter.lora_alpha is not None else rank
    settings = AdapterPlan(lora_rank=rank, lora_alpha=alpha, lora_dropout=adapter.lora_dropout)
    own = [name.removeprefix(prefix) for name in trained]
    return _write(output, parts, full, settings, is_in_out=any(in_out.values()), trained=own)


def _as_in_peft(a: Tensor, b: Tensor, *, is_in_out: bool) -> tuple[Tensor, Tensor]:
    """Return ``a`` and ``b`` with the shapes (rank, in) and (out, rank), as the peft package stores them."""
    a, b = a.detach().cpu(), b.detach().cpu()
    return (a.T, b.T) if is_in_out else (a, b)


def _write(
    target: Path,
    parts: Mapping[str, tuple[Tensor, Tensor]],
    full: Mapping[str, Tensor],
    settings: AdapterPlan,
    *,
    is_in_out: bool,
    trained: list[str],
) -> int:
    tensors = {f"{_PREFIX}{name}": each for name, each in full.items()}
    for name, pair in parts.items():
        for part, values in zip(("lora_A", "lora_B"), pair, strict=True):
            tensors[f"{_PREFIX}{name}.{part}.weight"] = values
    to_write = [ToWrite(key, each.dtype, tuple(each.shape), partial(iter, [each])) for key, each in tensors.items()]
    num_bytes = sum(each.num_bytes for each in to_write)
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "r": settings.lora_rank,
        "lora_alpha": settings.lora_alpha,
        "lora_dropout": settings.lora_dropout,
        "target_modules": list(parts),
        "fan_in_fan_out": is_in_out,
        "modules_to_save": trained or None,
        "bias": "none",
        "inference_mode": True,
    }
    with committed_folder(target, num_bytes) as folder:
        write_shard(folder / "adapter_model.safetensors", to_write)
        write_json(folder / "adapter_config.json", config)
    return num_bytes
