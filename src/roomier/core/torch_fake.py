"""Private names of torch that dry runs use, checked with torch 2.13."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

READS_VALUE = torch.ops.aten._local_scalar_dense.default
"""Operator of ``Tensor.item()`` and ``bool(tensor)``."""
UNSCALES = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
"""Operator of a gradient scaler. This operator sets its second argument to 1 if a gradient is not finite."""


def is_fake(tensors: Sequence[Tensor]) -> bool:
    """Return whether any of ``tensors`` is a fake tensor, which has a shape but no memory."""
    found = sys.modules.get("torch._subclasses.fake_tensor")  # slow import, which only fake tensors require
    return found is not None and any(isinstance(each, found.FakeTensor) for each in tensors)


def fake_tensors() -> AbstractContextManager[Any]:
    """Return a context in which new tensors are fake. Operations use only the shapes of real tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def makes_fake_tensors() -> bool:
    """Return whether the caller is inside the context of :func:`fake_tensors`."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def requires_values(error: Exception) -> bool:
    """Return whether an operation on fake tensors raised ``error`` because its result depends on values."""
    return type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException")


_num_runs = 1  # number of iterations that the current iteration represents


def num_runs() -> int:
    """Return the number of iterations that the current iteration represents. See :func:`few_of`."""
    return _num_runs


def few_of(items: Sequence[Any]) -> Iterator[Any]:
    """Iterate over ``items``. All items except the last item must cause the same work. In the context of
    :func:`fake_tensors`, yield only the first, the second and the last item. The second item represents all items
    between the first and the last. Memory from the first iteration still exists in the second iteration, so the peak is
    equal to the peak of the full loop.
    """
    global _num_runs
    if len(items) <= 3 or not makes_fake_tensors():
        yield from items
        return
    yield items[0]
    before, _num_runs = _num_runs, _num_runs * (len(items) - 2)
    try:
        yield items[1]
    finally:
        _num_runs = before
    yield items[-1]


_kind = "cpu"  # type of the device that fake tensors represent


def fake_kind() -> str:
    """Return the type of the device that fake tensors represent."""
    return _kind


def kind_of(tensor: Tensor) -> str:
    """Return the type of the device of ``tensor``. For a fake tensor, return the type that the tensor represents."""
    return _kind if is_fake([tensor]) else tensor.device.type


def updates_together(kind: str) -> bool:
    """Return whether torch's optimizers update all parameters together by default (``foreach``) on ``kind`` devices."""
    return kind not in ("cpu", "mps")


@contextmanager
def fake_tensors_on(kind: str) -> Iterator[None]:
    """Return a context in which fake tensors on the CPU represent tensors on a device of type ``kind``.

    In the context, functions over lists of tensors (``_foreach_*``) accept fake tensors. ``torch.optim`` uses these
    functions by default if :func:`updates_together` is True.
    """
    global _kind
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils import _foreach_utils

    optimizer: Any = sys.modules[Optimizer.__module__]
    lists: list[list[Any]] = [_foreach_utils._foreach_supported_types, optimizer._foreach_supported_types]
    devices = optimizer._get_foreach_kernels_supported_devices
    for each in lists:
        each.append(FakeTensor)
    if updates_together(kind):
        optimizer._get_foreach_kernels_supported_devices = lambda: [*devices(), "cpu"]
    before, _kind = _kind, kind
    try:
        yield
    finally:
        _kind = before
        optimizer._get_foreach_kernels_supported_devices = devices
        for each in lists:
            each.remove(FakeTensor)


@contextmanager
def fake_process_group(rank: int, size: int) -> Iterator[None]:
    """Replace the process groups of ``torch.distributed`` with a fake default group inside the context.

    The group has ``size`` ranks, and this process is ``rank``. Collectives return without communication. The previous
    process groups are restored afterwards.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    known, hook = distributed_c10d._world, sys.excepthook
    num_groups, groups = known.group_count, set(known.pg_map)
    distributed_c10d._world = imagined = distributed_c10d._World()  # it has a separate default group
    imagined.group_count = num_groups + 10_000  # The names of groups must be unique in a process.
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # the cache treats meshes of equal shape as equal
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        yield
    finally:
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
        distributed_c10d._world = known
        for made in [each for each in known.pg_map if each not in groups]:
            dist.destroy_process_group(made)
        known.group_count = num_groups  # the count must be equal on all ranks of the real group
        distributed_c10d._update_default_pg(known.default_pg)
        sys.excepthook = hook


def device_type_of(tensor: Tensor) -> str:
    """Return ``tensor.device.type``. For a fake tensor, this function avoids a dispatch through all active modes."""
    device: torch.device | None = getattr(tensor, "fake_device", None)
    return (tensor.device if device is None else device).type


def fake_constant(tensor: Tensor) -> Tensor | None:
    """Return the value of a fake tensor if the value is known, as for ``torch.tensor(3)``; otherwise None."""
    found: Tensor | None = getattr(tensor, "constant", None)
    return found


@contextmanager
def replaced_kernels(kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace C++ functions of recurrent layers for fake tensors inside the context.

    Args:
        kernels: replacement for each function name, called as ``replacement(kernel, *args)`` with the original
            function.
    """

    def replacing(kernel: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: function(kernel, *args) if is_fake(args[:1]) else kernel(*args)

    for name, function in kernels.items():
        setattr(torch._VF, name, replacing(getattr(torch._C._VariableFunctions, name), function))
    try:
        yield
    finally:
        for name in kernels:
            delattr(torch._VF, name)
