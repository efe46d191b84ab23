"""Memory of the simulated device: exact bytes, a limit, several devices, and removed capabilities."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.simulator import simulated
from tests.simulator.workers import SimulatedRanks

DEVICE = simulated.DEVICE
MIB = 2**20


def count_bytes() -> list[int]:
    memory = torch.accelerator
    found = [memory.memory_allocated()]
    x = torch.empty(1024, 256, device=DEVICE)
    found.append(memory.memory_allocated())
    y = x + x
    small = torch.empty(1, device=DEVICE)
    del x, small
    found += [memory.memory_allocated(), memory.max_memory_allocated()]
    memory.reset_peak_memory_stats()
    y.untyped_storage().resize_(0)
    found += [memory.memory_allocated(), memory.max_memory_allocated(), memory.memory_reserved()]
    memory.empty_cache()
    return [*found, memory.memory_reserved()]


@pytest.mark.parametrize("schedule", ["LATE", "IMMEDIATE"])
def test_current_and_peak_bytes_are_exact(on_simulated: SimulatedRanks, schedule: str) -> None:
    expected = [0, MIB, MIB, 2 * MIB + 512, 0, MIB, 2 * MIB + 512, 0]
    assert on_simulated(1, count_bytes, schedule=schedule) == [expected]


def exceed_the_limit() -> tuple[str, int, float]:
    held = torch.ones(MIB // 4, device=DEVICE)
    try:
        torch.empty(MIB // 4 + 1, device=DEVICE)
    except torch.OutOfMemoryError as error:
        message = str(error)
    free, total = torch.accelerator.get_memory_info()
    assert total == 2 * MIB
    return message, free, held.sum().item()


def test_an_allocation_over_the_limit_raises_out_of_memory(on_simulated: SimulatedRanks) -> None:
    (message, free, total), = on_simulated(1, exceed_the_limit, memory_limit=2 * MIB)
    assert "Tried to allocate 1048580 bytes" in message
    assert (free, total) == (MIB, MIB // 4)


def use_two_devices() -> dict[str, Any]:
    first, second = torch.ones(4, device=f"{DEVICE}:0"), torch.empty(1024, device=f"{DEVICE}:1")
    error = ""
    try:
        first + second[:4]
    except RuntimeError as raised:
        error = str(raised)
    copied = (first * 3).to(second.device)
    return {
        "count": torch.accelerator.device_count(),
        "bytes": [torch.accelerator.memory_allocated(index) for index in range(2)],
        "error": error,
        "copied": (copied + 1).tolist(),
        "races": simulated.races(),
    }


@pytest.mark.parametrize("schedule", ["LATE", "OTHERS_FIRST"])
def test_a_process_can_have_several_devices(on_simulated: SimulatedRanks, schedule: str) -> None:
    found, = on_simulated(1, use_two_devices, num_devices=2, schedule=schedule)
    assert "to be on the same device" in found.pop("error")
    assert found == {"count": 2, "bytes": [512, 4608], "copied": [4.0] * 4, "races": []}


def cpu_and_device_tensors() -> list[str]:
    device, host = torch.ones(3, 3, device=DEVICE), torch.ones(3, 3)
    errors = []
    mixed: list[Callable[[], Any]] = [
        lambda: device + host,
        lambda: device @ host,
        lambda: torch.cat([device, host]),
        lambda: torch.nn.functional.embedding(torch.tensor([0]), device),
        lambda: device.add_(host),
        lambda: torch.empty(0, device=f"{DEVICE}:3"),
    ]
    for use in mixed:
        try:
            use()
            errors.append("none")
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def test_tensors_of_cpu_and_device_cannot_be_mixed(on_simulated: SimulatedRanks) -> None:
    *errors, missing = on_simulated(1, cpu_and_device_tensors)[0]
    assert [error for error in errors if "to be on the same device" not in error] == []
    assert "simulated:3 does not exist" in missing


def tried_capabilities() -> dict[str, bool]:
    def works(use: Callable[[], Any]) -> bool:
        try:
            return use() is not False
        except (RuntimeError, NotImplementedError):
            return False

    held = torch.ones(4, device=DEVICE)
    parameter = torch.nn.Parameter(held.clone())
    parameter.grad = held
    return {
        "streams": works(lambda: torch.Stream(device=DEVICE)),
        "pinned_memory": works(lambda: torch.ones(1).pin_memory().is_pinned()),
        "fused_optimizers": works(torch.optim.AdamW([parameter], fused=True).step),
        "memory_statistics": works(lambda: torch.accelerator.memory_allocated() > 0),
        "bfloat16": torch.get_device_module(DEVICE).is_bf16_supported(),
        "foreach": works(torch.optim.AdamW([parameter], foreach=True).step),
    }


@pytest.mark.parametrize("without", [(), *((name,) for name in simulated.CAPABILITIES)])
def test_capabilities_can_be_removed(on_simulated: SimulatedRanks, without: tuple[str, ...]) -> None:
    found, = on_simulated(1, tried_capabilities, without=without)
    assert tuple(name for name, works in found.items() if not works) == without
