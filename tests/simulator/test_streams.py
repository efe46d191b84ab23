"""Streams of the simulated device: races of wrong programs are reported, and host waits are counted."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.simulator import simulated
from tests.simulator.workers import SimulatedRanks

SCHEDULES = ("LATE", "OTHERS_FIRST", "IMMEDIATE")
DEVICE = simulated.DEVICE


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


def other_stream(*, waits: bool = True) -> torch.Stream:
    stream = torch.Stream(device=DEVICE)
    if waits:
        stream.wait_stream(current())
    return stream


def reads_without_wait() -> Tensor:
    x = torch.zeros(4, device=DEVICE)
    torch.accelerator.synchronize()
    x.add_(1)
    with (stream := other_stream(waits=False)):
        y = x * 2
    stream.synchronize()
    return y


def overwrites_while_a_stream_reads() -> Tensor:
    x = torch.ones(4, device=DEVICE)
    with (stream := other_stream()):
        y = x * 2
    x.zero_()
    current().synchronize()
    stream.synchronize()
    return y


def frees_without_record_stream() -> Tensor:
    x = torch.ones(4, device=DEVICE)
    with (stream := other_stream()):
        y = x * 2
    del x
    torch.zeros(1, device=DEVICE).item()
    stream.synchronize()
    return y


def overwrites_a_pinned_source() -> Tensor:
    host = torch.ones(4).pin_memory()
    x = host.to(DEVICE, non_blocking=True) * 2
    host.zero_()
    return x


def copies_a_pinned_buffer_without_wait() -> Tensor:
    host = torch.empty(4, pin_memory=True)
    with (stream := other_stream()):
        host.copy_(torch.ones(4, device=DEVICE), non_blocking=True)
    x = host.to(DEVICE, non_blocking=True) * 2
    current().synchronize()
    stream.synchronize()
    return x


def result_and_races(program: Callable[[], Tensor]) -> tuple[list[float], list[str]]:
    simulated.clear()
    result = program().cpu().tolist()
    return result, simulated.races()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("program", "tasks"),
    [
        (reads_without_wait, ("mul.Tensor", "add_.Tensor")),
        (overwrites_while_a_stream_reads, ("zero_", "mul.Tensor")),
        (frees_without_record_stream, ("reuse of freed memory", "mul.Tensor")),
        (copies_a_pinned_buffer_without_wait, ("copy to the device", "copy to the host")),
    ],
)
def test_unordered_accesses_are_reported(
    on_simulated: SimulatedRanks, program: Callable[[], Tensor], tasks: tuple[str, str], schedule: str
) -> None:
    ((result, races),) = on_simulated(1, result_and_races, program, schedule=schedule)
    assert [race for race in races if all(task in race for task in tasks)], races
    assert (result == [2.0] * 4) == (schedule != "LATE")


def uses_reused_memory(waits: bool) -> list[str]:
    """Write memory that a task of the computing stream may have used before."""
    x = torch.ones(4, device=DEVICE)
    y = x * 2
    del x
    z = torch.empty(4, device=DEVICE)
    with (stream := other_stream(waits=waits)):
        z.zero_()
    current().wait_stream(stream)
    del y, z
    return simulated.races()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_waits_before_it_uses_new_memory(on_simulated: SimulatedRanks, waits: bool, schedule: str) -> None:
    (races,) = on_simulated(1, uses_reused_memory, waits, schedule=schedule)
    assert len(races) == 1 - waits
    assert all("zero_" in race and "reuse of freed memory" in race for race in races)


@pytest.mark.parametrize("schedule", ["LATE", "OTHERS_FIRST"])
def test_a_pinned_source_that_the_host_changes_is_reported(on_simulated: SimulatedRanks, schedule: str) -> None:
    ((result, races),) = on_simulated(1, result_and_races, overwrites_a_pinned_source, schedule=schedule)
    assert result == [0.0] * 4
    assert len(races) == 1
    assert "host changed pinned memory" in races[0]


def read_a_copy_too_early() -> tuple[float, float]:
    host = torch.ones(4, device=DEVICE).to("cpu", non_blocking=True)
    early = host.sum().item()
    torch.accelerator.synchronize()
    return early, host.sum().item()


def test_a_copy_to_the_host_is_nan_until_the_host_waits(on_simulated: SimulatedRanks) -> None:
    ((early, late),) = on_simulated(1, read_a_copy_too_early)
    assert math.isnan(early)
    assert late == 4


def waits_for_events() -> Tensor:
    x = torch.zeros(4, device=DEVICE)
    x.add_(1)
    with (stream := other_stream()):
        y = x * 2
        done = stream.record_event()
    current().wait_event(done)
    x.zero_()
    return y


def records_streams() -> Tensor:
    x = torch.ones(4, device=DEVICE)
    with (stream := other_stream()):
        y = x * 2
    x.record_stream(stream)
    del x
    torch.zeros(1, device=DEVICE).item()
    current().wait_stream(stream)
    return y


def waits_on_the_host() -> Tensor:
    x = torch.zeros(4, device=DEVICE)
    x.add_(1)
    torch.accelerator.synchronize()
    with (stream := other_stream(waits=False)):
        y = x * 2
    stream.synchronize()
    return y


def runs_backward_on_the_stream_of_forward() -> Tensor:
    x = torch.ones(4, device=DEVICE, requires_grad=True)
    with (stream := other_stream()):
        y = (x * x).sum()
    current().wait_stream(stream)
    y.backward()
    assert x.grad is not None
    return x.grad


def offloads_saved_tensors() -> Tensor:
    stream = torch.Stream(device=DEVICE)

    def pack(tensor: Tensor) -> Tensor:
        stream.wait_stream(current())
        with stream:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)
        return host

    def unpack(host: Tensor) -> Tensor:
        with stream:
            tensor = host.to(DEVICE, non_blocking=True)
        current().wait_stream(stream)
        tensor.record_stream(current())
        return tensor

    x = torch.full((4,), 2.0, device=DEVICE, requires_grad=True)
    with simulated.forbidden_host_waits():
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            y = (x * x).square().sum()
        y.backward()
    assert x.grad is not None
    return x.grad / 16


def reuses_a_pinned_buffer() -> Tensor:
    host = torch.empty(4, pin_memory=True)
    total = torch.zeros(4, device=DEVICE)
    for _ in range(2):
        host.copy_(torch.ones(4, device=DEVICE), non_blocking=True)
        total += host.to(DEVICE, non_blocking=True)
    return total


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_correct_programs_compute_the_numbers_without_races(on_simulated: SimulatedRanks, schedule: str) -> None:
    for result, races in on_simulated(1, results_of_correct_programs, schedule=schedule)[0]:
        assert result == [2.0] * 4
        assert races == []


def results_of_correct_programs() -> list[tuple[list[float], list[str]]]:
    programs = (
        waits_for_events,
        records_streams,
        waits_on_the_host,
        runs_backward_on_the_stream_of_forward,
        offloads_saved_tensors,
        reuses_a_pinned_buffer,
    )
    return [result_and_races(program) for program in programs]


WAITS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "copy to the host, blocking": lambda x: x.cpu(),
    "copy to the host, memory not pinned": lambda x: torch.empty(4).copy_(x, non_blocking=True),
    "copy to the device, blocking": lambda x: x.copy_(torch.ones(4).pin_memory()),
    "copy to the device, memory not pinned": lambda x: torch.ones(4).to(DEVICE, non_blocking=True),
    "aten::nonzero": lambda x: x.nonzero(),
    "aten::index.Tensor": lambda x: x[x > 0],
    "CPU tensor in aten::add.Tensor": lambda x: x + torch.tensor(1.0),
    "stream.synchronize": lambda x: current().synchronize(),
    "event.synchronize": lambda x: current().record_event().synchronize(),
    "device.synchronize": lambda x: torch.accelerator.synchronize(),
}
EXPLICIT = ("stream.synchronize", "event.synchronize", "device.synchronize")


def message_of_forbidden(wait: Callable[[], Any], *, explicit: bool) -> str:
    try:
        with simulated.forbidden_host_waits(explicit=explicit):
            wait()
    except RuntimeError as error:
        return str(error)
    return ""


def count_and_forbid_waits() -> dict[str, tuple[dict[str, int], list[str]]]:
    found = {}
    x = torch.ones(4, device=DEVICE)
    for kind, wait in WAITS.items():
        simulated.clear()
        wait(x)
        counts = simulated.host_waits()
        with simulated.allowed_host_waits():
            wait(x)
        assert simulated.host_waits() == counts
        messages = [message_of_forbidden(lambda wait=wait: wait(x), explicit=explicit) for explicit in (True, False)]
        found[kind] = counts, messages
    return found


def test_host_waits_are_counted_and_forbidden(on_simulated: SimulatedRanks) -> None:
    for kind, (counts, (forbidden, implicit_forbidden)) in on_simulated(1, count_and_forbid_waits)[0].items():
        assert counts == {kind: 1}
        assert f"waits for the simulated device ({kind})" in forbidden
        assert implicit_forbidden == ("" if kind in EXPLICIT else forbidden)


def use_without_waits() -> dict[str, int]:
    with simulated.forbidden_host_waits():
        x = torch.ones(4).pin_memory().to(DEVICE, non_blocking=True)
        y = (x * 2).sum()
        host = y.to("cpu", non_blocking=True)
        done = current().record_event()
        assert not done.query()
        assert done.query()
        assert host.item() == 8
    return simulated.host_waits()


def test_asynchronous_copies_do_not_wait(on_simulated: SimulatedRanks) -> None:
    assert on_simulated(1, use_without_waits) == [{}]


def fail_in_a_task() -> str:
    index = torch.tensor([7], device=DEVICE)
    table = torch.ones(3, 2, device=DEVICE)
    rows = table[index]
    try:
        rows.cpu()
    except IndexError as error:
        return str(error)
    return "no error"


def test_an_error_of_a_task_is_raised_at_the_next_wait(on_simulated: SimulatedRanks) -> None:
    assert "out of bounds" in on_simulated(1, fail_in_a_task)[0]
