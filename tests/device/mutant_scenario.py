"""Run a program without one of its synchronizations, and compare it with the complete program."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.device.synchronizations import recorded, removed
from tests.simulator import simulated

DEVICE = simulated.DEVICE


def device() -> torch.device:
    """Return the current device."""
    return torch.device(DEVICE, torch.accelerator.current_device_index())


def pending() -> Tensor:
    """Return a tensor on the device whose values are not computed yet."""
    with simulated.allowed_host_waits():
        start = torch.arange(1.0, 65.0).to(DEVICE)
        torch.accelerator.synchronize()
    return start * 2


def digest(values: list[Any]) -> str:
    """Return a hash of tensors in host memory, bytes and numbers. No value is read from the device."""
    found = hashlib.sha256()
    for value in values:
        found.update(_bytes(value))
    return found.hexdigest()


def _bytes(value: Any) -> bytes:
    if isinstance(value, Tensor):
        assert value.device.type == "cpu"
        content: np.ndarray[Any, Any] = value.detach().reshape(-1).view(torch.uint8).numpy()
        return content.tobytes()
    return value if isinstance(value, bytes) else repr(value).encode()


@dataclass(frozen=True)
class Scenario:
    """A program that is sensitive to a synchronization.

    Attributes:
        run: function that returns tensors in host memory, bytes and numbers.
        keywords: arguments of ``run``.
        num_ranks: number of ranks that run the program.
        compares_waits: True if a different number of host waits is a defect, as in measurements of time.
    """

    run: Callable[..., list[Any]]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    num_ranks: int = 1
    compares_waits: bool = False


@dataclass(frozen=True)
class _Observed:
    digest: str
    waits: dict[str, int]
    races: list[str]


def _observe(scenario: Scenario, *, is_mutated: bool = False) -> _Observed:
    _finish()
    torch.manual_seed(0)
    try:
        found = digest(scenario.run(**scenario.keywords))
    except Exception as error:  # such as the error for a loss that is not finite
        if not is_mutated:
            raise
        found = f"error: {type(error).__name__}"
    waits, races = simulated.host_waits(), simulated.races()
    _finish()
    return _Observed(found, waits, races)


def _finish() -> None:
    """Finish all work, so that one program does not race with the next program."""
    gc.collect()
    with simulated.allowed_host_waits():
        torch.accelerator.synchronize()
    simulated.clear()


def defects(rows: Sequence[tuple[Scenario, str]]) -> list[list[str]]:
    """Run each program without one of its synchronizations, and return how the missing synchronization is detected.

    The result of a mutant contains ``"numbers"``, ``"race"``, ``"waits"`` or ``"error"``. The list ends with the first
    mutant that raises an error, because this process cannot be used again.

    Raises:
        AssertionError: a program has a race, or different results in two runs, without a mutation.
    """
    found: list[list[str]] = []
    scenario = None
    for each, mutant in rows:
        if each is not scenario:
            scenario, expected = each, _expected(each)
        found.append(_defects_without(mutant, scenario, expected))
        if any(kind.startswith("error") for kind in found[-1]):
            break
    return found


def _expected(scenario: Scenario) -> _Observed:
    _observe(scenario)  # the first run has more host waits
    found, again = _observe(scenario), _observe(scenario)
    assert found.races == []
    assert again.digest == found.digest
    assert not scenario.compares_waits or again.waits == found.waits
    return found


def _defects_without(mutant: str, scenario: Scenario, expected: _Observed) -> list[str]:
    with removed(mutant):
        found = _observe(scenario, is_mutated=True)
    is_error = found.digest.startswith("error")
    return [
        *([found.digest] if is_error else ["numbers"] if found.digest != expected.digest else []),
        *(["race"] if found.races else []),
        *(["waits"] if scenario.compares_waits and found.waits != expected.waits else []),
    ]


def called(scenario: Scenario, keys: Sequence[str]) -> set[str]:
    """Return the synchronizations of ``keys`` that ``scenario`` calls."""
    with recorded(keys) as found:
        _observe(scenario)
    return found
