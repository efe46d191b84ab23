"""First values for a model that was built on the meta device: its modules give them to themselves, and that is checked.

[Note: first values of a meta model]
A constructor that ran on the meta device drew nothing. What it would have drawn is asked for again: children before
parents, each module's ``reset_parameters()`` (Hugging Face: ``initialize_weights()``) is called, which is the order in
which constructors call it. Where a constructor does more, that is lost: ``configure_model`` has it all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from roomier.adapters.layers import is_adapter
from roomier.core import torch_private
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.core.rng import rng_state, set_rng_state
from roomier.parallel.pages import PagedTensor


@contextmanager
def same_random_numbers(ranks: Ranks) -> Iterator[None]:
    """Every rank draws what rank 0 draws. A rank that came with another state has it back afterwards."""
    own = rng_state()
    of_zero = ranks.from_zero(own["torch"])
    differs = ranks.any(not torch.equal(own["torch"], of_zero))
    if differs:
        set_rng_state({**ranks.from_zero(own), "cuda": own.get("cuda", {})})
    yield
    if differs and not ranks.is_zero:
        set_rng_state(own)


@dataclass(frozen=True)
class EmptyBuffer:
    """A buffer that was on the meta device, now on the CPU and without values: NaN where its dtype has that."""

    name: str
    owner: nn.Module
    attribute: str
    tensor: Tensor
    version: int

    def is_written(self) -> bool:
        now = getattr(self.owner, self.attribute)
        if now is self.tensor and torch_private.version_of(now) == self.version:
            return False
        return not (now.is_floating_point() and bool(now.isnan().any()))


def empty_buffers(network: nn.Module) -> list[EmptyBuffer]:
    """Give each buffer that is on the meta device memory on the CPU."""
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
    """Call what gives modules their first values, see [Note: first values of a meta model].

    Args:
        network: its parameters are paged, its buffers have memory.
        meta_tensors: names of the parameters and buffers that were on the meta device. A module is called if that is
            where all of its parameters were, or, where it has none, all of its buffers.
    """
    done: set[nn.Module] = set()
    for name, module in _children_first(network, ""):
        if module in done:  # registered in two places
            continue
        done.add(module)
        first_values = _initializer_of(module)
        if first_values is not None and _is_new(name, module, meta_tensors):
            first_values()


def tell_what_is_lost(network: nn.Module) -> None:
    """Say which part of the model has weights that a constructor of its own may have meant otherwise."""
    lost = _without_initializer(network, type(network).__name__)
    if lost is not None:
        notice(
            f"{lost} was built on the meta device: its parts get their first values from their own reset_parameters(), "
            "and what its __init__ does to them beyond that is lost; build it in configure_model, or define "
            f"reset_parameters() in {lost}, to have it"
        )


def check_written(network: nn.Module, buffers: list[EmptyBuffer], given: set[str], ranks: Ranks) -> None:
    """Refuse a parameter or buffer that nothing gave values, on all ranks alike.

    Args:
        given: names that will be read from a file.

    Raises:
        RoomierError: it names the tensor and the class that owns it.
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
    more = f", nor to {len(missing) - 1} other parameters and buffers" if len(missing) > 1 else ""
    raise RoomierError(
        "model",
        missing[0],
        f"was built on the meta device, and no reset_parameters() of {owner} or of a module around it gives values to "
        f"it{more}",
        f"Define reset_parameters() in {owner}, build the model in configure_model, build it on a real device, or pass "
        "fit(weights=...) for what a file holds",
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


def _without_initializer(module: nn.Module, path: str) -> str | None:
    # A class of torch does in its constructor what its reset_parameters does; nothing of the kind is known of others.
    if type(module).__module__.split(".")[0] == "torch":
        found = (_without_initializer(child, type(child).__name__) for child in module.children())
        return next((each for each in found if each is not None), None)
    has_own = _initializer_of(module) is not None
    return None if has_own or next(module.parameters(), None) is None else path
