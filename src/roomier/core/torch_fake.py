"""Every underscore name of torch that a dry run uses, with the version it was checked on (2.13)."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

READS_VALUE = torch.ops.aten._local_scalar_dense.default
"""What ``Tensor.item()`` and ``bool(tensor)`` dispatch."""
UNSCALES = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
"""What a gradient scaler dispatches; its second argument becomes 1 where a gradient is not finite."""


def is_fake(tensors: Sequence[Tensor]) -> bool:
    """Whether they have shapes and no memory, as in a dry run."""
    found = sys.modules.get("torch._subclasses.fake_tensor")  # where nobody made one, nobody pays for its import
    return found is not None and any(isinstance(each, found.FakeTensor) for each in tensors)


def fake_tensors() -> AbstractContextManager[Any]:
    """A context in which tensors have shapes and no memory; real ones that come in are taken for their shapes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def makes_fake_tensors() -> bool:
    """Whether this is inside :func:`fake_tensors`."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


_num_runs = 1  # that what runs now stands for


def num_runs() -> int:
    """For how many runs the code that is running stands; see :func:`few_of`."""
    return _num_runs


def few_of(items: Sequence[Any]) -> Iterator[Any]:
    """``items`` to loop over, all but the last of which are worked on alike.

    Where tensors are fake: the first, a second that stands for all between, and the last. By the second, what the loop
    before it left is there, so memory rises as high as in all of them.
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


@contextmanager
def fake_tensors_in_groups(*, as_on_cuda: bool) -> Iterator[None]:
    """Inside, functions over many tensors (``_foreach_*``) take fake ones as they take real ones.

    Args:
        as_on_cuda: ``torch.optim`` takes them by default, as for parameters on a GPU; else one by one, as on a CPU.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils import _foreach_utils

    optimizer: Any = sys.modules[Optimizer.__module__]
    lists: list[list[Any]] = [_foreach_utils._foreach_supported_types, optimizer._foreach_supported_types]
    devices = optimizer._get_foreach_kernels_supported_devices
    for each in lists:
        each.append(FakeTensor)
    if as_on_cuda:
        optimizer._get_foreach_kernels_supported_devices = lambda: [*devices(), "cpu"]
    try:
        yield
    finally:
        optimizer._get_foreach_kernels_supported_devices = devices
        for each in lists:
            each.remove(FakeTensor)


@contextmanager
def fake_process_group(rank: int, size: int) -> Iterator[None]:
    """Inside, ``torch.distributed`` knows ``size`` ranks, of which this process is ``rank`` and no other answers; what
    it knew before is there again afterwards."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    known, hook = distributed_c10d._world, sys.excepthook
    num_groups, groups = known.group_count, set(known.pg_map)
    distributed_c10d._world = imagined = distributed_c10d._World()  # of its own default group; the rest is shared
    imagined.group_count = num_groups + 10_000  # names of groups are unique in a process
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # it knows meshes, and takes those of one shape for one
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        yield
    finally:
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
        distributed_c10d._world = known
        for made in [each for each in known.pg_map if each not in groups]:
            dist.destroy_process_group(made)
        known.group_count = num_groups  # the ranks of a real group count alike
        distributed_c10d._update_default_pg(known.default_pg)
        sys.excepthook = hook


def device_type_of(tensor: Tensor) -> str:
    """``tensor.device.type``. Of a fake tensor, which would ask all modes that look at operations, at once."""
    device: torch.device | None = getattr(tensor, "fake_device", None)
    return (tensor.device if device is None else device).type


def fake_constant(tensor: Tensor) -> Tensor | None:
    """The value of a fake tensor that is known all the same, as of ``torch.tensor(3)``."""
    found: Tensor | None = getattr(tensor, "constant", None)
    return found


@contextmanager
def replaced_kernels(kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Inside, fake tensors go to other functions than those that recurrent layers call in C++, by name; ``kernel`` of a
    function is the one in whose place it is: ``function(kernel, *args)``."""

    def replacing(kernel: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: function(kernel, *args) if is_fake(args[:1]) else kernel(*args)

    for name, function in kernels.items():
        setattr(torch._VF, name, replacing(getattr(torch._C._VariableFunctions, name), function))
    try:
        yield
    finally:
        for name in kernels:
            delattr(torch._VF, name)


def replace_functions(functions: Mapping[Any, Callable[..., Any]]) -> AbstractContextManager[Any]:
    """A context in which functions of torch that take tensors are replaced: what is called, and what is in its place.
    In there, a function is called as it is."""
    return _Replacements(functions)


class _Replacements(TorchFunctionMode):
    def __init__(self, functions: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._functions = functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.backward:  # what is computed again in it is computed as it was
            with self, _own_backward():
                named = dict(kwargs or {})
                return torch.autograd.backward(args[0], grad_tensors=named.pop("gradient", None), **named)
        return self._functions.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def _own_backward() -> Iterator[None]:
    """Inside, ``torch.autograd.backward`` asks no mode to run it (torch 2.13 does): that would leave the mode."""
    module: Any = torch.autograd
    before = module.has_torch_function
    module.has_torch_function = lambda arguments: False
    try:
        yield
    finally:
        module.has_torch_function = before
