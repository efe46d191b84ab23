"""Packages whose names are imported on first access."""

import subprocess
import sys
from types import ModuleType

import pytest

import roomier.callbacks
import roomier.tuner

LATE = [roomier.callbacks, roomier.tuner]


@pytest.mark.parametrize("package", LATE, ids=lambda each: each.__name__)
def test_every_public_name_is_importable(package: ModuleType) -> None:
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
        assert name in dir(package)


def test_a_star_import_imports_every_public_name() -> None:
    namespace: dict[str, object] = {}
    exec("from roomier.callbacks import *", namespace)
    assert set(roomier.callbacks.__all__) <= namespace.keys()


def test_importing_a_file_first_does_not_replace_a_function() -> None:
    import roomier.trainer.tuner.range_test

    assert callable(roomier.tuner.lr_find)
    assert roomier.tuner.range_test.lr_find is roomier.tuner.lr_find
    assert not hasattr(roomier, "lr_find")


def test_a_file_of_the_package_is_available_as_an_attribute() -> None:
    assert roomier.callbacks.spike_guard.SpikeGuard is roomier.callbacks.SpikeGuard


def test_an_unknown_name_raises_an_error_with_the_package() -> None:
    with pytest.raises(AttributeError, match=r"module 'roomier.callbacks' has no attribute 'SpikeGuards'"):
        roomier.callbacks.SpikeGuards  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="SpikeGuards"):
        exec("from roomier.callbacks import SpikeGuards")


def test_importing_the_trainer_does_not_import_rarely_used_modules() -> None:
    unneeded = [
        "rich",
        "roomier.callbacks.spike_guard",
        "roomier.callbacks.memory_anatomy",
        "roomier.trainer.tuner.tuner",
    ]
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
