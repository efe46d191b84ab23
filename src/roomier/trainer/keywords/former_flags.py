"""Arguments of Lightning's Trainer from 2020 and 2021. The error message shows the complete call with current
arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roomier.core.errors import RoomierError

_DEVICE_FLAGS = ("gpus", "num_gpus", "num_processes", "tpu_cores", "ipus", "hpus")
_ACCELERATORS = {"gpus": "gpu", "num_gpus": "gpu", "tpu_cores": "tpu", "hpus": "hpu", "ipus": "ipu"}
_FLAGS = (*_DEVICE_FLAGS, "distributed_backend", "plugins", "amp_backend", "amp_level", "auto_lr_finder")
_KEPT = ("accelerator", "devices", "num_nodes", "strategy", "precision")
_STRATEGIES = {
    "dp": "ddp",
    "ddp": "ddp",
    "ddp2": "ddp",
    "ddp_cpu": "ddp",
    "ddp_spawn": "ddp",
    "ddp_fork": "ddp",
    "ddp_notebook": "ddp",
    "horovod": "ddp",
    "ddp_sharded": "zero2",
    "ddp_sharded_spawn": "zero2",
    "ddp_fully_sharded": "zero3",
    "fsdp": "zero3",
    "fsdp_native": "zero3",
    "deepspeed": "zero2",
    "deepspeed_stage_1": "zero1",
    "deepspeed_stage_2": "zero2",
    "deepspeed_stage_3": "zero3",
}
"""Names of former accelerators and plugins, with the strategies that replace them."""
_CLASSES = {  # prefix of the class name of a former plugin or of a Lightning strategy
    "DDPSpawnSharded": "zero2",
    "DDPSharded": "zero2",
    "DDPFullySharded": "zero3",
    "FSDP": "zero3",
    "DDP": "ddp",
    "SingleDevice": "single",
}
_HALF = ("16", 16)
_PROBLEMS = {"precision": "is ambiguous: '16-mixed' or '16-true'", "strategy": "is an object of another library"}


def refuse_former_flags(given: Mapping[str, Any]) -> None:
    """Reject arguments of former Lightning versions in ``given``, the arguments of the Trainer.

    Raises:
        RoomierError: a former argument is given. The error message shows the call ``Trainer(...)`` with current
            arguments.
    """
    found = [name for name in given if _is_former(name, given[name])]
    if not found:
        return
    today, remarks = _todays(given)
    call = ", ".join(f"{name}={value!r}" for name, value in today.items())
    name = found[0]
    problem = _PROBLEMS.get(name, "was removed from the Trainer")
    if found[1:]:
        problem += f", like {', '.join(found[1:])}"
    raise RoomierError(name, given[name], problem, ". ".join([f"Write Trainer({call})", *remarks]))


def written_today(name: str, value: Any) -> tuple[dict[str, Any], list[str]] | None:
    """Return the current arguments that replace the former argument ``name``, and remarks; None for other arguments."""
    return _todays({name: value}) if _is_former(name, value) else None


def _is_former(name: str, value: Any) -> bool:
    if name == "accelerator":
        return isinstance(value, str) and value.lower() in _STRATEGIES
    if name == "strategy":
        return _strategy_of(value) is not None and not isinstance(value, str)
    if name == "precision":
        return isinstance(value, (int, str)) and not isinstance(value, bool) and value in _HALF
    if name == "plugins":
        return any(_strategy_of(each) is not None for each in _as_list(value))
    return name in _FLAGS


def _todays(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the current arguments for devices, strategy and precision, together with remarks."""
    today = {name: given[name] for name in _KEPT if name in given and not _is_former(name, given[name])}
    remarks: list[str] = []
    for name in _DEVICE_FLAGS:
        if name in given:
            _add_devices(today, remarks, name, given[name])
    for name in ("accelerator", "distributed_backend", "strategy", "plugins"):
        if name in given and (name == "distributed_backend" or _is_former(name, given[name])):
            for each in _as_list(given[name]):
                _add_strategy(today, remarks, each)
    if given.get("precision") in _HALF or "amp_backend" in given or "amp_level" in given:
        today["precision"] = "16-mixed"
    if "auto_lr_finder" in given:
        today["auto_lr_find"] = bool(given["auto_lr_finder"])
    has_several = today.get("devices", 1) != 1 or today.get("num_nodes", 1) != 1
    if has_several and "strategy" not in today:
        today["strategy"] = "ddp"
    return today, remarks


def _add_devices(today: dict[str, Any], remarks: list[str], name: str, value: Any) -> None:
    number = _number_of_devices(value)
    if name == "num_processes":
        today["devices"] = number
        return
    if not number:
        today.setdefault("accelerator", "cpu")
        return
    today["accelerator"] = _ACCELERATORS[name]
    today["devices"] = number
    if name == "tpu_cores":
        remarks.append("accelerator='tpu' requires the package torch-tpu")
    elif name not in ("gpus", "num_gpus"):
        remarks.append(f"It requires a package that adds the device {_ACCELERATORS[name]!r} to torch")
    elif isinstance(value, (list, tuple)) or (isinstance(value, str) and "," in value):
        listed = value if isinstance(value, str) else ",".join(map(str, value))
        remarks.append(
            f"Select the devices with the environment variable CUDA_VISIBLE_DEVICES={listed.replace(' ', '')}"
        )


def _number_of_devices(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return len(value)
    if isinstance(value, str):
        parts = [part for part in value.split(",") if part.strip()]
        if len(parts) > 1 or value.strip().endswith(","):
            return len(parts)
        value = int(value) if value.strip().lstrip("-").isdecimal() else value
    return "auto" if value == -1 else value


def _add_strategy(today: dict[str, Any], remarks: list[str], value: Any) -> None:
    if isinstance(value, str) and value.lower() == "ddp_cpu":
        today["accelerator"] = "cpu"
    today["strategy"] = _strategy_of(value) or value
    if type(value).__name__.startswith("DDP") and _setting(value, "find_unused_parameters"):
        today["strategy"] = {"name": "ddp", "find_unused_parameters": True}
    if not type(value).__name__.startswith("DeepSpeed"):
        return
    if _setting(value, "partition_activations") or _setting(value, "cpu_checkpointing"):
        today["activation_checkpointing"] = "full"
    if any(_setting(value, name) for name in ("cpu_offload", "offload_optimizer", "offload_parameters")):
        remarks.append(
            "Offload of optimizer states is not implemented. To reduce their memory, use optimizer='adamw8bit'"
        )


def _strategy_of(value: Any) -> str | None:
    """Return the strategy that replaces a former accelerator, plugin or strategy object; None for any other value."""
    if isinstance(value, str):
        return _STRATEGIES.get(value.lower())
    name = type(value).__name__
    if name.startswith("DeepSpeed"):
        return f"zero{_setting(value, 'stage') or 2}"
    return next((strategy for start, strategy in _CLASSES.items() if name.startswith(start)), None)


def _setting(value: Any, name: str) -> Any:
    """Return the attribute ``name`` of ``value``, or the value of ``name`` in its ``config``."""
    for found in (getattr(value, name, None), getattr(value, "_ddp_kwargs", {}).get(name)):
        if found is not None:
            return found
    config = getattr(value, "config", None)
    sections = [config, *config.values()] if isinstance(config, Mapping) else []
    return next((each[name] for each in sections if isinstance(each, Mapping) and each.get(name)), None)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
