"""Initial values of a model that was built on the meta device.

[Note: initial values of a meta model]
A constructor that runs on the meta device samples no values. To sample the values afterwards, roomier calls each
module's ``reset_parameters()`` (Hugging Face: ``initialize_weights()``). Submodules are initialized before their
parents, as in constructors. All other initialization in a constructor is lost. A model that is built in
``configure_model`` without the meta device keeps all initialization.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from roomier.api.module import Module
from roomier.api.overrides import overrides
from roomier.core import torch_private
from roomier.core.device.rng import of_devices, rng_state, set_rng_state
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.techniques.adapters.layers import is_adapter
from roomier.techniques.parallel.pages import PagedTensor


@contextmanager
def same_random_numbers(ranks: Ranks) -> Iterator[None]:
    """Use the random state of rank 0 on every rank, and restore the state of each rank afterwards."""
    own = rng_state()
    of_zero = ranks.from_zero(own["torch"])
    differs = ranks.any(not torch.equal(own["torch"], of_zero))
    if differs:
        set_rng_state({**ranks.from_zero(own), **of_devices(own)})
    yield
    if differs and not ranks.is_zero:
        set_rng_state(own)


@dataclass(frozen=True)
class EmptyBuffer:
    """Buffer that was on the meta device and is now on the CPU. A floating-point buffer is filled with NaN.

    Attributes:
        name: fully qualified name of the buffer.
        owner: module that registered the buffer.
        attribute: name of the buffer in ``owner``.
        tensor: allocated tensor on the CPU.
        version: value of autograd's version counter for ``tensor`` when the tensor was created.
    """

    name: str
    owner: nn.Module
    attribute: str
    tensor: Tensor
    version: int

    def is_written(self) -> bool:
        """Return whether the buffer was replaced or written, and contains no NaN."""
        now = getattr(self.owner, self.attribute)
        if now is self.tensor and torch_private.version_of(now) == self.version:
            return False
        return not (now.is_floating_point() and bool(now.isnan().any()))


def empty_buffers(network: nn.Module) -> list[EmptyBuffer]:
    """Allocate memory on the CPU for each buffer that is on the meta device."""
    made: list[EmptyBuffer] = []
    real: dict[int, Tensor] = {}
    for prefix, module in network.named_modules():
        for attribute, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if not buffer.is_meta:
                continue
            if id(buffer) not in real:
                empty = torch.empty_like(buffer, device="cpu")
                real[id(buffer)] = empty.fill_(torch.nan) if empty.is_floating_point() else empty
            tensor = real[id(buffer)]
            setattr(module, attribute, tensor)
            name = f"{prefix}.{attribute}" if prefix else attribute
            made.append(EmptyBuffer(name, module, attribute, tensor, torch_private.version_of(tensor)))
    return made


@torch.no_grad()
def initialise(network: nn.Module, meta_tensors: set[str]) -> None:
    """Call the initializer of each module that was on the meta device; see [Note: initial values of a meta model].

    Args:
        network: model with paged parameters and allocated buffers.
        meta_tensors: names of the parameters and buffers that were on the meta device. A module is initialized if all
            of its parameters were on the meta device. A module without parameters is initialized if all of its buffers
            were on the meta device.
    """
    done: set[nn.Module] = set()
    for name, module in _children_first(network, ""):
        if module in done:  # registered in two places
            continue
        done.add(module)
        first_values = _initializer_of(module)
        if first_values is not None and _is_new(name, module, meta_tensors):
            first_values()


def report_lost_initialization(network: nn.Module, meta_tensors: set[str]) -> None:
    """Print a notice if a constructor may have initialized the parameters of its module on the meta device, because
    this initialization is lost.

    If ``network`` creates its submodules on the meta device in ``configure_model``, its own constructor did not run on
    the meta device, so only the submodules are checked.

    Args:
        network: model with paged parameters.
        meta_tensors: names of the parameters and buffers that were on the meta device.
    """
    configures = overrides(network, "configure_model", Module)
    own = next(network.parameters(recurse=False), None)
    lost = _first_lost(network, "", meta_tensors, is_configured=configures and own is None)
    if lost is None:
        return
    action = f"build {lost} in configure_model"
    if configures:
        action = f"build {lost} on a real device in configure_model, without torch.device('meta')"
    notice(
        f"{lost} was built on the meta device, so its submodules are initialized by their own reset_parameters(). "
        f"Other initialization in its __init__ is lost. To keep this initialization, {action}, or define "
        f"reset_parameters() in {lost}"
    )


def check_written(network: nn.Module, buffers: list[EmptyBuffer], given: set[str], ranks: Ranks) -> None:
    """Check, on all ranks together, that every parameter and buffer has values.

    Args:
        buffers: the result of :func:`empty_buffers`.
        given: names of the tensors that will be read from a file.

    Raises:
        RoomierError: a tensor has no values. The error names the tensor and the class of its module.
    """
    missing = [
        name
        for name, parameter in network.named_parameters()
        if name not in given and isinstance(parameter, PagedTensor) and not parameter.page.is_written()
    ]
    missing += [each.name for each in buffers if each.name not in given and not each.is_written()]
    missing = list(dict.fromkeys(name for names in ranks.gather(missing) for name in names))
    if not missing:
        return
    owner = type(network.get_submodule(missing[0].rpartition(".")[0])).__name__
    more = f". {len(missing) - 1} other parameters and buffers have no values either" if len(missing) > 1 else ""
    raise RoomierError(
        "model",
        missing[0],
        f"was built on the meta device, and no reset_parameters() method of {owner} or of an enclosing module "
        f"initializes it{more}",
        f"Define reset_parameters() in {owner}, build the model in configure_model or on a real device, or pass the "
        "values with fit(weights=...)",
    )


def _children_first(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _children_first(child, f"{name}.{child_name}" if name else child_name)
    yield name, module


def _initializer_of(module: nn.Module) -> Callable[[], object] | None:
    found = torch_private.initializer_of_transformers(module) or getattr(module, "reset_parameters", None)
    found = found or torch_private.reset_of_torch(module)
    return found if callable(found) else None


def _is_new(name: str, module: nn.Module, meta_tensors: set[str]) -> bool:
    names = [each for each, _ in module.named_parameters(name) if not is_adapter(each)]
    names = names or [each for each, _ in module.named_buffers(name)]
    return bool(names) and meta_tensors.issuperset(names)


def _first_lost(module: nn.Module, name: str, meta_tensors: set[str], *, is_configured: bool = False) -> str | None:
    """Return the class name of the first module on the meta device that has no initializer; None if all have one.
    Parents are checked before children."""
    if next(module.parameters(), None) is None:
        return None
    # Constructors of torch's classes initialize parameters in the same way as their reset_parameters method.
    # Constructors of other classes may initialize parameters differently.
    is_of_torch = type(module).__module__.split(".")[0] == "torch"
    if is_of_torch or is_configured or not _is_new(name, module, meta_tensors):
        children = ((each, f"{name}.{key}" if name else key) for key, each in module.named_children())
        found = (_first_lost(child, path, meta_tensors) for child, path in children)
        return next((each for each in found if each is not None), None)
    return None if _initializer_of(module) is not None else type(module).__name__
