"""The module ``torch.simulated``, with the functions that PyTorch expects in the module of a device."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.accelerator import (
    current_device_index,
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_peak_memory_stats,
    synchronize,
)
from torch.accelerator import current_stream as current_stream
from torch.accelerator import set_device_index as set_device
from torch.accelerator import set_stream as set_stream

if TYPE_CHECKING:
    from torch import Generator

__all__ = [
    "empty_cache",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_peak_memory_stats",
    "synchronize",
]

NAME = "simulated"
_initialized = True  # autograd and DataLoader read this name
has_bfloat16 = True
extension: Any = None  # set at registration


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None: ...


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return False  # ranks are forked before the device is used


def device_count() -> int:
    count: int = extension.device_count()  # torch.accelerator.device_count calls this function
    return count


def current_device() -> int:
    return current_device_index()


def get_device_name(device: Any = None) -> str:
    return NAME


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return (1, 0)


def get_device_properties(device: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(name=NAME, total_memory=extension.memory_limit())


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(_index(device))


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return has_bfloat16


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16] if has_bfloat16 else [torch.float16]


class Stream(torch.Stream):
    """Stream of the current device, or of ``device``."""

    def __new__(cls, device: Any = None, priority: int = 0, **keywords: Any) -> Stream:
        if keywords:  # the keywords are the identifiers of an existing stream
            return torch.Stream.__new__(cls, **keywords)  # type: ignore[return-value]
        return torch.Stream.__new__(cls, device=torch.device(NAME, _index(device)), priority=priority)  # type: ignore[return-value]


def Event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:  # noqa: N802
    return torch.Event(device=NAME, enable_timing=enable_timing)


def default_stream(device: Any = None) -> Stream:
    return Stream(stream_id=0, device_index=_index(device), device_type=torch._C._autograd.DeviceType.PrivateUse1)


@contextlib.contextmanager
def stream(selected: torch.Stream | None) -> Iterator[None]:
    """Make ``selected`` the current stream of its device."""
    if selected is None:
        yield
        return
    before = current_stream(selected.device)
    set_stream(selected)
    try:
        yield
    finally:
        set_stream(before)


StreamContext = stream


class device:  # noqa: N801
    """Context manager that selects a device."""

    def __init__(self, selected: Any) -> None:
        self._index = _index(selected)

    def __enter__(self) -> None:
        self._before = current_device_index()
        set_device(self._index)

    def __exit__(self, *_: Any) -> None:
        set_device(self._before)


def device_of(tensor: torch.Tensor) -> device:
    return device(tensor.device)


def _index(selected: Any) -> int:
    if selected is None:
        return current_device_index()
    found = selected if isinstance(selected, int) else torch.device(selected).index
    return current_device_index() if found is None or found < 0 else found


def _generator(selected: Any = None) -> Generator:
    found: Generator = torch.ops.simulated.default_generator(_index(selected))
    return found


def get_rng_state(device: Any = NAME) -> torch.Tensor:
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = NAME) -> None:
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    _generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _generator(index).manual_seed(seed)


def initial_seed() -> int:
    return _generator().initial_seed()
