"""Packages whose names are imported when they are asked for."""

import subprocess
import sys
from types import ModuleType

import pytest

import roomier.callbacks
import roomier.tuner

LATE = [roomier.callbacks, roomier.tuner]


@pytest.mark.parametrize("package", LATE, ids=lambda each: each.__name__)
def test_every_public_name_is_found_and_is_what_its_file_calls_so(package: ModuleType) -> None:
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
        assert name in dir(package)


def test_a_star_import_brings_every_public_name() -> None:
    namespace: dict[str, object] = {}
    exec("from roomier.callbacks import *", namespace)
    assert set(roomier.callbacks.__all__) <= namespace.keys()


def test_a_function_is_not_hidden_by_a_file_that_was_imported_before_it() -> None:
    import roomier.tuner.range_test

    assert callable(roomier.tuner.lr_find)
    assert roomier.tuner.range_test.lr_find is roomier.tuner.lr_find


def test_a_file_of_the_package_is_found_as_its_attribute() -> None:
    assert roomier.callbacks.spike_guard.SpikeGuard is roomier.callbacks.SpikeGuard


def test_a_name_that_is_not_there_is_told_with_its_package() -> None:
    with pytest.raises(AttributeError, match=r"module 'roomier.callbacks' has no attribute 'SpikeGuards'"):
        roomier.callbacks.SpikeGuards  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="SpikeGuards"):
        exec("from roomier.callbacks import SpikeGuards")


def test_importing_the_trainer_loads_nothing_that_most_runs_do_not_need() -> None:
    unneeded = ["rich", "roomier.callbacks.spike_guard", "roomier.callbacks.memory_anatomy", "roomier.tuner.batch_size"]
    unneeded += [
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "roomier.planner.dry_runs.dry_run",
        "pandas",
        "lightning",
    ]
    code = f"import sys; from roomier import Trainer; print([each for each in {unneeded} if each in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert found.strip() == "[]"
