"""Run functions of tests in processes that have the simulated accelerator.

A process that has registered the device keeps the device, so tests do not register it in the process of pytest. The
fixture ``on_simulated`` forks ranks from a server with the device. See [Note: forked ranks] in ``tests/ranks/pool.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch

from tests.ranks.pool import DEFAULT_TIMEOUT_S, RankPool
from tests.simulator import simulated
from tests.simulator.build import missing_requirement


class SimulatedRanks:
    """Callable that runs functions on ranks, each of which has a simulated device.

    Example::

        def step() -> list[str]:
            ...
            return simulated.races()

        def test_step(on_simulated: SimulatedRanks) -> None:
            assert on_simulated(2, step, schedule="OTHERS_FIRST") == [[], []]
    """

    def __init__(self) -> None:
        self._pool = RankPool(setup=simulated.register, prepare=prepare, backend=simulated.BACKENDS)

    def __call__(
        self,
        num_ranks: int,
        function: Callable[..., Any],
        *args: Any,
        schedule: str = "LATE",
        without: Iterable[str] = (),
        num_devices: int | None = None,
        memory_limit: int | None = None,
        joins: bool | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on each rank and return the results, by rank.

        The current device of a rank is the device with the index of the rank.

        Args:
            function: function at the top level of a file.
            schedule: name of a ``simulated.Schedule``.
            without: capabilities to remove.
            num_devices: number of devices in each process. The default is the number of ranks.
            memory_limit: capacity of each device in bytes.
            joins: True to initialize the default process group. The default is True for more than one rank.
        """
        settings = self._settings(num_ranks, schedule, without, num_devices, memory_limit)
        joins = num_ranks > 1 if joins is None else joins
        return self._pool(num_ranks, function, *args, timeout_s=timeout_s, joins=joins, settings=settings, **kwargs)

    def each(
        self,
        num_ranks: int,
        function: Callable[..., Any],
        calls: Sequence[tuple[Any, ...]],
        *,
        schedule: str = "LATE",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> list[list[Any]]:
        """Call ``function(*args)`` for each ``args`` in ``calls`` in the same processes. See ``RankPool.each``.

        The simulation is reset before each call.
        """
        settings = self._settings(num_ranks, schedule, (), None, None)
        return self._pool.each(num_ranks, function, calls, timeout_s=timeout_s, joins=num_ranks > 1, settings=settings)

    @staticmethod
    def _settings(
        num_ranks: int, schedule: str, without: Iterable[str], num_devices: int | None, memory_limit: int | None
    ) -> dict[str, Any]:
        return {
            "schedule": schedule,
            "without": tuple(without),
            "num_devices": num_devices or num_ranks,
            "memory_limit": memory_limit,
        }

    def close(self) -> None:
        """End the processes."""
        self._pool.close()


def prepare(schedule: str, without: Iterable[str], num_devices: int, memory_limit: int | None) -> None:
    """Apply the settings of a call in a rank."""
    torch.set_num_threads(1)  # a forked process creates its thread pool here, and not in several threads of autograd
    simulated.reset()
    simulated.set_device_count(num_devices)
    for name in without:
        simulated.remove_capability(name)
    if memory_limit is not None:
        simulated.set_memory_limit(memory_limit)
    simulated.set_schedule(simulated.Schedule[schedule])
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]) % num_devices)


def simulated_ranks() -> SimulatedRanks:
    """Return the ranks, or skip the test if the simulated accelerator cannot be built."""
    reason = missing_requirement()
    if reason is not None:
        pytest.skip(reason)
    return SimulatedRanks()
