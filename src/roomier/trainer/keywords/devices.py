"""Resolution of ``devices="auto"`` and ``num_nodes="auto"``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from roomier.core.device.names import visible_devices_variable
from roomier.core.device.resolve import accelerator_type
from roomier.core.errors import PlanError
from roomier.core.log import notice
from roomier.launch import Launch, present_launch
from roomier.plan.choices import canonical

_PARALLEL = "Pass strategy='ddp', 'zero2' (half the memory on 2 ranks) or 'zero3' (the least memory)"


def resolve_auto(flags: Mapping[str, Any], launch: Launch | None) -> dict[str, Any]:
    """Return ``flags`` with ``strategy=None``, ``devices="auto"`` and ``num_nodes="auto"`` replaced by values.

    The launcher determines the values. If there is no launcher, a strategy for several ranks uses all accelerators of
    the machine.

    Raises:
        PlanError: a launcher started several ranks although the strategy is ``"single"``.
    """
    flags = {**flags, "devices": _number_of(flags["devices"], flags["accelerator"])}
    is_default = flags["strategy"] is None
    if is_default and launch is not None and launch.world.size > 1:
        flags["strategy"] = "ddp"
    elif flags["strategy"] == "auto":
        notice(_AUTO)
    is_single = flags["num_nodes"] in (1, "auto") if is_default else _is_single(flags["strategy"])
    if launch is not None and launch.world.size > 1 and is_single and not is_default:
        problem = f"supports one rank, but {launch.launcher} started {launch.world.size} processes"
        raise PlanError("strategy", flags["strategy"], problem, f"{_PARALLEL}, or start one process")
    if flags["num_nodes"] == "auto":
        flags["num_nodes"] = 1 if launch is None else launch.num_nodes
    if flags["devices"] == "auto":
        if launch is not None:
            flags["devices"] = launch.world.local_size
        elif is_default and is_single and accelerator_type() is not None:
            _report_unused_devices(flags["accelerator"])
        elif not is_single:
            flags["devices"] = _all_devices(flags["strategy"], flags["accelerator"])
    return flags


def num_ranks_of(given: Mapping[str, Any], *, alone_by_default: bool = False) -> int:
    """Return the number of ranks for the arguments ``given``.

    Args:
        given: arguments of the Trainer.
        alone_by_default: if True, ``devices="auto"`` means one device unless ``given`` names a strategy for several
            ranks.
    """
    launch = present_launch()
    if launch is not None:
        return launch.world.size
    devices = _number_of(given.get("devices", "auto"), given.get("accelerator", "auto"))
    if isinstance(devices, str):
        is_alone = alone_by_default and (given.get("strategy") is None or _is_single(given["strategy"]))
        all_devices = 1 if is_alone else max(1, torch.accelerator.device_count())
        devices = int(devices) if devices.isdecimal() else all_devices
    nodes = given.get("num_nodes", "auto")
    return devices * (nodes if isinstance(nodes, int) else 1) if isinstance(devices, int) else 1


_AUTO = (
    "strategy='auto' selects the fastest plan that fits, for the ranks of this run. For Lightning's meaning of 'auto' "
    "(ddp for several ranks), omit strategy"
)


def _report_unused_devices(accelerator: object) -> None:
    number = torch.accelerator.device_count() if accelerator in ("auto", "gpu", accelerator_type()) else 1
    if number > 1:
        notice(f"this run uses 1 of {number} devices; devices={number} uses all")


def _number_of(devices: Any, accelerator: object) -> Any:
    """Return ``"auto"`` for -1. For a list of the first devices, return its length. Return any other value
    unchanged."""
    if devices in (-1, "-1"):
        return "auto"
    listed = devices
    if isinstance(devices, str) and "," in devices:
        listed = [int(part) if part.strip().isdecimal() else part for part in devices.split(",") if part.strip()]
    if not isinstance(listed, (list, tuple)):
        return devices
    if list(listed) == list(range(len(listed))):
        return len(listed)
    kind = accelerator if accelerator not in ("auto", "gpu", "cpu") else accelerator_type() or "cuda"
    variable = visible_devices_variable(str(kind))
    action = f"Use devices={len(listed)}, and select the devices with the environment variable {variable}"
    raise PlanError(
        "devices", devices, "is not supported, because each rank uses the device whose index is its local rank", action
    )


def _is_single(strategy: object) -> bool:
    if isinstance(strategy, Mapping):
        strategy = strategy.get("name", "single")
    return isinstance(strategy, str) and canonical("parallel.strategy", strategy.partition("+")[0]) == "single"


def _all_devices(strategy: object, accelerator: object) -> int:
    present = accelerator_type()
    if present is not None and accelerator in ("auto", "gpu", present):
        return torch.accelerator.device_count()
    notice(
        f"strategy={strategy!r} with devices='auto' starts one process on this machine; devices=N starts N processes"
    )
    return 1
