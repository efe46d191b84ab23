"""Rejection of arguments of Lightning's Trainer from 2020 and 2021. The error shows the complete call with current
arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roomier.core.errors import RoomierError
from roomier.plan.migrate.deepspeed.objects import answers_to_object, is_object
from roomier.trainer.keywords.devices import num_ranks_of

_DEVICE_FLAGS = {"gpus": "gpu", "tpu_cores": "tpu"}
CANDIDATES = {*_DEVICE_FLAGS, "auto_lr_finder", "accelerator", "plugins"}
"""Arguments that may be former arguments of Lightning, depending on their values."""

_KEPT = ("accelerator", "devices", "num_nodes", "strategy", "precision")
_ACCELERATORS = {**dict.fromkeys(("dp", "ddp", "ddp2", "ddp_cpu", "ddp_spawn"), "ddp"), "ddp_sharded": "zero2"}
"""Former values of ``accelerator`` and ``plugins``, with the strategies that replace them."""


def refuse_former_flags(given: Mapping[str, Any]) -> None:
    """Reject arguments of earlier Lightning versions. ``given`` contains the arguments of the Trainer.

    Raises:
        RoomierError: an argument of an earlier version of Lightning is given. The error message shows the call
            ``Trainer(...)`` with current arguments.
    """
    former = [name for name in given if _is_former(name, given[name])]
    if not former:
        return
    today, remarks = _todays(given)
    call = ", ".join(f"{name}={value!r}" for name, value in today.items())
    problem = ", like ".join(filter(None, ["was removed from the Trainer", ", ".join(former[1:])]))
    raise RoomierError(former[0], given[former[0]], problem, ". ".join([f"Use Trainer({call})", *remarks]))


def written_today(name: str, value: Any) -> tuple[dict[str, Any], list[str]] | None:
    """Return the arguments that replace the former argument ``name``, with remarks; None for any other argument."""
    return _todays({name: value}) if _is_former(name, value) else None


def _is_former(name: str, value: Any) -> bool:
    if name == "plugins":
        return any(is_object(each) or _is_former("accelerator", each) for each in _as_list(value))
    if name == "accelerator":
        return isinstance(value, str) and value.lower() in _ACCELERATORS
    return name in CANDIDATES


def _todays(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the current arguments for devices, strategy and precision, together with remarks."""
    today = {name: given[name] for name in _KEPT if name in given and not _is_former(name, given[name])}
    remarks: list[str] = []
    for name in filter(given.__contains__, _DEVICE_FLAGS):
        _add_devices(today, remarks, name, given[name])
    for name in ("accelerator", "plugins"):
        for each in _as_list(given[name]) if name in given and _is_former(name, given[name]) else ():
            if is_object(each):
                answers = answers_to_object(each, num_ranks_of(today), today)
                today.update(answers.keywords())
                remarks += answers.remarks()
            elif _is_former("accelerator", each):
                today["strategy"] = _ACCELERATORS[each.lower()]
                if each.lower() == "ddp_cpu":
                    today |= {"accelerator": "cpu", "devices": given.get("num_processes", given.get("devices", 1))}
    if given.get("precision") in ("16", 16):
        today["precision"] = "16-mixed"
    if "auto_lr_finder" in given:
        today["auto_lr_find"] = bool(given["auto_lr_finder"])
    if (today.get("devices", 1) != 1 or today.get("num_nodes", 1) != 1) and "strategy" not in today:
        today["strategy"] = "ddp"
    return today, remarks


def _add_devices(today: dict[str, Any], remarks: list[str], name: str, value: Any) -> None:
    listed = [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    if isinstance(value, str) and "," not in value:
        number: Any = int(value) if value.strip().lstrip("-").isdecimal() else value
    else:
        number = len(listed) if isinstance(listed, (list, tuple)) else value
    if not number:
        today.setdefault("accelerator", "cpu")
        return
    today["accelerator"], today["devices"] = _DEVICE_FLAGS[name], "auto" if number == -1 else number
    if name == "tpu_cores":
        remarks.append("accelerator='tpu' requires the package torch-tpu")
    elif isinstance(value, (list, tuple)) or "," in str(value):
        variable = f"CUDA_VISIBLE_DEVICES={','.join(str(each).strip() for each in listed)}"
        remarks.append(f"Select the devices with the environment variable {variable}")


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
