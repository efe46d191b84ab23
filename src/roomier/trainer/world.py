"""How many ranks a run has: what the keywords say, what the launcher started, and that both agree."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from roomier.core.errors import PlanError
from roomier.core.log import notice
from roomier.core.world import World
from roomier.launch import Launch, export, launch_of
from roomier.plan import Plan
from roomier.plan.choices import canonical

_PARALLEL = "Pass strategy='ddp', 'zero2' (half the memory on 2 ranks) or 'zero3' (the least memory)"


def present_launch() -> Launch | None:
    """The launch this process is a rank of; None where it stands alone. What is recognised is exported."""
    launch = launch_of(os.environ)
    if launch is not None:
        export(launch, os.environ)
        return launch
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        rank, size = dist.get_rank(), dist.get_world_size()
        return Launch("your process group", World(rank, size, local_rank=rank, local_size=size))
    return None


def resolve_auto(flags: Mapping[str, Any], launch: Launch | None) -> dict[str, Any]:
    """``flags`` with numbers for ``devices="auto"`` and ``num_nodes="auto"``.

    They are what the launcher started; without one, a strategy for several ranks takes all CUDA devices of the machine.

    Raises:
        PlanError: a launcher started several ranks for a strategy that has one.
    """
    flags = dict(flags)
    is_single = _is_single(flags["strategy"])
    if launch is not None and launch.world.size > 1 and is_single:
        problem = f"{launch.launcher} started {launch.world.size} processes, and this strategy uses one"
        raise PlanError("strategy", flags["strategy"], problem, f"{_PARALLEL}; or start one process")
    if flags["num_nodes"] == "auto":
        flags["num_nodes"] = 1 if launch is None else launch.num_nodes
    if flags["devices"] == "auto":
        if launch is not None:
            flags["devices"] = launch.world.local_size
        elif not is_single:
            flags["devices"] = _all_devices(flags["strategy"], flags["accelerator"])
    return flags


def check_launch(plan: Plan, launch: Launch | None) -> None:
    """Refuse a Plan that wants other ranks than those that were started.

    Raises:
        PlanError: names both numbers.
    """
    if launch is None:
        return
    wanted, started = plan.parallel, launch.world
    counts = {"devices": (wanted.devices, started.local_size), "num_nodes": (wanted.num_nodes, launch.num_nodes)}
    for name, (value, there) in counts.items():
        if value != there:
            what = "processes on each node" if name == "devices" else "nodes"
            problem = f"{launch.launcher} started {there} {what}"
            raise PlanError(name, value, problem, f"Write {name}='auto', or start {value}{_how(launch, name, value)}")


def world_of(plan: Plan, launch: Launch | None) -> World:
    """The place of this process among the ranks of ``plan``: without a launcher it is the first of them."""
    if launch is not None:
        return launch.world
    return World(0, plan.parallel.num_ranks, local_size=plan.parallel.devices)


def _is_single(strategy: object) -> bool:
    if isinstance(strategy, Mapping):
        strategy = strategy.get("name", "single")
    return isinstance(strategy, str) and canonical("parallel.strategy", strategy.partition("+")[0]) == "single"


def _all_devices(strategy: object, accelerator: object) -> int:
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return torch.cuda.device_count()
    notice(f"strategy={strategy!r} with devices='auto' is one process on this machine; devices=N starts N of them")
    return 1


def _how(launch: Launch, name: str, value: int) -> str:
    option = {
        "torchrun": {"devices": "--nproc-per-node", "num_nodes": "--nnodes"},
        "SLURM": {"devices": "--ntasks-per-node", "num_nodes": "--nodes"},
    }.get(launch.launcher)
    return f": {option[name]}={value}" if option else ""
