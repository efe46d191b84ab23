"""Fixtures for all tests: one thread, a quiet Trainer, and a pool of ranks.

The threads are set before torch is imported. Tests and the processes that they start then compute the same numbers on
every machine, and do not compete for its cores.
"""

import gc
import getpass
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests.ranks.pool import RankPool

if TYPE_CHECKING:
    from roomier import Trainer
    from tests.simulator.workers import SimulatedRanks

os.environ.setdefault("OMP_NUM_THREADS", "1")
# compiled code depends on this variable, but the key of torch's cache does not contain it
if "ATEN_CPU_CAPABILITY" in os.environ:
    cache = f"torchinductor_{getpass.getuser()}_{os.environ['ATEN_CPU_CAPABILITY']}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), cache))
os.environ.setdefault("ROOMIER_PLANNING_S", "400")  # the chosen plan does not depend on the load of the machine

# Every run uses the same examples and no time limit per example, so results depend only on the code.
# HYPOTHESIS_PROFILE=default uses new examples.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., "Trainer"]:
    """Create a Trainer that by default writes no files and prints no text."""
    from roomier import Trainer

    def make(**keywords: Any) -> Trainer:
        quiet = {
            "default_root_dir": tmp_path,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        return Trainer(**{**quiet, **keywords})

    return make


@pytest.fixture(scope="session")
def on_ranks() -> Iterator[RankPool]:
    """Call ``on_ranks(num_ranks, function, *args, **kwargs)``. The function returns the results, ordered by rank."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def on_simulated() -> Iterator["SimulatedRanks"]:
    """Call a function on ranks with the simulated accelerator. See ``tests/simulator/workers.py``."""
    from tests.simulator.workers import simulated_ranks

    ranks = simulated_ranks()
    yield ranks
    ranks.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the tests on the simulated accelerator in ``make test-more``, because its compilation takes minutes. If
    ``ROOMIER_TEST_PART`` is set, for example to ``1/3`` for the first third, select a part of the tests."""
    for item in items:
        if "on_simulated" in getattr(item, "fixturenames", ()):
            item.add_marker("more")
    number, _, num_parts = os.environ.get("ROOMIER_TEST_PART", "").partition("/")
    if num_parts:  # single tests, because the times of whole files differ too much
        others = {each for each in items if zlib.crc32(each.nodeid.encode()) % int(num_parts) != int(number) - 1}
        config.hook.pytest_deselected(items=list(others))
        items[:] = [each for each in items if each not in others]


_num_modules_frozen = 0


def pytest_runtest_setup() -> None:
    """Exclude the objects of imported modules from garbage collection.

    A full collection visits all of these objects, which takes up to a second, and the tests cause hundreds of
    collections.
    """
    global _num_modules_frozen
    if len(sys.modules) >= _num_modules_frozen + 20:
        _num_modules_frozen = len(sys.modules)
        gc.collect()
        gc.freeze()
