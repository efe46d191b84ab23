"""Adapters alone, as a folder that the package peft reads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from roomier.adapters.found import trained_whole
from roomier.adapters.layers import Adapted, rank_of
from roomier.checkpoint.commit import committed_folder
from roomier.core.errors import RoomierError

_PREFIX = "base_model.model."


def export_adapter(network: nn.Module, output: str | Path) -> Path:
    """Write the adapters of ``network``, the model others will load, as the folder ``output``, whole or not at all.

    ``peft.PeftModel.from_pretrained(model, output)`` reads it (checked with peft 0.21): ``adapter_model.safetensors``
    and ``adapter_config.json``.

    Raises:
        RoomierError: ``network`` has no adapters or is divided among ranks, or ``output`` is there already.
    """
    layers = {name: each for name, each in network.named_modules() if isinstance(each, Adapted)}
    if not layers:
        action = "Pass the network that was trained with lora=..."
        raise RoomierError("network", type(network).__name__, "has no adapters", action)
    if any(hasattr(each.lora_A, "placements") for each in layers.values()):
        problem = "is divided among the ranks"
        raise RoomierError("network", type(network).__name__, problem, "Load its checkpoint into a new model")
    target = Path(os.path.abspath(output))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RoomierError("output", str(output), "is there already and not empty", "Choose another folder")
    tensors = {}
    for name, layer in layers.items():
        for part, each in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
            values = each.detach().cpu()
            tensors[f"{_PREFIX}{name}.{part}.weight"] = (values.T if layer.is_in_out else values).contiguous()
    trained = trained_whole(network)
    for name, module in trained.items():
        for part, each in module.named_parameters(name):
            tensors[f"{_PREFIX}{part}"] = each.detach().cpu().contiguous().clone()  # it may be tied to another
    with committed_folder(target, sum(each.nbytes for each in tensors.values())) as folder:
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / "adapter_config.json").write_text(
            json.dumps(_config(layers, trained), indent=2) + "\n", encoding="utf-8"
        )
    return target


def _config(layers: dict[str, Adapted], trained: Iterable[str]) -> dict[str, Any]:
    layer = next(iter(layers.values()))  # rank and scale are the same for all
    rank = rank_of(layer)
    return {
        "peft_type": "LORA",
        "task_type": None,
        "r": rank,
        "lora_alpha": layer.lora_scale * rank,
        "lora_dropout": layer.lora_dropout,
        "target_modules": list(layers),
        "fan_in_fan_out": layer.is_in_out,
        "modules_to_save": list(trained) or None,
        "bias": "none",
        "inference_mode": True,
    }
