"""Rejection of arguments of Lightning's Trainer from 2020 and 2021. The error shows the complete call with current
arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roomier.core.errors import RoomierError
from roomier.plan.choices import OFFLOADING_STRATEGIES
from roomier.plan.migrate.deepspeed.objects import answers_to_object, is_object
from roomier.trainer.keywords.devices import num_ranks_of

_DEVICE_FLAGS = ("gpus", "num_gpus", "num_processes", "tpu_cores", "ipus", "hpus")
_ACCELERATORS = {"gpus": "gpu", "num_gpus": "gpu", "tpu_cores": "tpu", "hpus": "hpu", "ipus": "ipu"}
_FLAGS = (*_DEVICE_FLAGS, "distributed_backend", "plugins", "amp_backend", "amp_level", "auto_lr_finder")
CANDIDATES = {*_FLAGS, "accelerator", "strategy"}
"""Arguments that may be former arguments of Lightning, depending on their values."""

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
_CLASSES = {  # class name of a former plugin
    "DDPSpawnShardedPlugin": "zero2",
    "DDPShardedPlugin": "zero2",
    "DDPFullyShardedPlugin": "zero3",
    "DDPSpawnPlugin": "ddp",
    "DDPPlugin": "ddp",
    "DDP2Plugin": "ddp",
    "HorovodPlugin": "ddp",
    "DataParallelPlugin": "ddp",
    "SingleDevicePlugin": "single",
}
_HALF = ("16", 16)
_PROBLEMS = {"strategy": "is an object of another library"}


def refuse_former_flags(given: Mapping[str, Any]) -> None:
    """Reject arguments of earlier Lightning versions. ``given`` contains the arguments of the Trainer.

    Raises:
        RoomierError: an argument of an earlier version of Lightning is given. The error message shows the call
            ``Trainer(...)`` with current arguments.
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
    raise RoomierError(name, given[name], problem, ". ".join([f"Use Trainer({call})", *remarks]))


def written_today(name: str, value: Any) -> tuple[dict[str, Any], list[str]] | None:
    """Return the arguments that replace the former argument ``name``, with remarks; None for any other argument."""
    return _todays({name: value}) if _is_former(name, value) else None


def _is_former(name: str, value: Any) -> bool:
    if name == "accelerator":
        return isinstance(value, str) and value.lower() in _STRATEGIES
    if name == "strategy":
        return type(value).__name__ in _CLASSES
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
    is_half = given.get("precision") in _HALF and any(_is_former(name, given[name]) for name in given)
    if is_half or "amp_backend" in given or "amp_level" in given:
        today.pop("precision", None)
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
        remarks.append(f"This accelerator requires a package that adds the device {_ACCELERATORS[name]!r} to torch")
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
    if is_object(value):
        answers = answers_to_object(value, num_ranks_of(today), today)
        today.update(answers.keywords())
        remarks += answers.remarks()
        return
    today["strategy"] = _strategy_of(value) or value
    if type(value).__name__.startswith("DDP") and _finds_unused(value):
        today["strategy"] = {"name": "ddp", "find_unused_parameters": True}


def _finds_unused(value: Any) -> bool:
    return bool(
        getattr(value, "find_unused_parameters", getattr(value, "_ddp_kwargs", {}).get("find_unused_parameters"))
    )


def _strategy_of(value: Any) -> str | None:
    """Return the strategy that replaces a former accelerator, plugin or strategy object; None for any other value."""
    if isinstance(value, str):
        name = value.lower()
        return _STRATEGIES.get(name) or (name if name in OFFLOADING_STRATEGIES else None)
    return "zero2" if is_object(value) else _CLASSES.get(type(value).__name__)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
