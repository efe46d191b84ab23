"""The blocks of a model: what is gathered, computed and freed together.

A block is what repeats along the depth of a model, a transformer layer say. The model may declare its blocks; Hugging
Face's models do in ``_no_split_modules``; else they are found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from roomier.core.errors import RoomierError

_STANDS_FOR = "_roomier_num_elements"
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_blocks(network: nn.Module) -> list[nn.Module]:
    """The blocks of ``network``, outermost only, in the order they are registered; none where nothing repeats.

    Of a network that neither declares ``model_blocks()`` nor is one of Hugging Face's, blocks are the modules with
    parameters that a ``ModuleList``, ``ModuleDict`` or ``Sequential`` holds two or more of in one class.

    Raises:
        RoomierError: what it declares is not among its modules.
    """
    declared = getattr(network, "model_blocks", None)
    if callable(declared):
        return _declared(network, list(declared()))
    names = _no_split_names(network)
    if names:
        found = [each for each in network.modules() if names & _class_names(each) and _has_parameters(each)]
    else:
        found = [each for container in network.modules() for each in _repeated_in(container)]
    return _outermost(network, found)


def _declared(network: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    known = set(network.modules())
    for block in blocks:
        if block not in known:
            action = "Return submodules of the model, such as list(self.layers)"
            raise RoomierError("model_blocks", type(block).__name__, "is not a part of the model", action)
    return _outermost(network, blocks)


def _no_split_names(network: nn.Module) -> set[str]:
    # A roomier or Lightning module may hold the Hugging Face model as an attribute.
    names: set[str] = set()
    for each in network.modules():
        names.update(getattr(each, "_no_split_modules", None) or ())
    return names


def _class_names(module: nn.Module) -> set[str]:
    return {each.__name__ for each in type(module).__mro__}  # fully_shard puts a class of its own before the user's


def _repeated_in(container: nn.Module) -> Iterator[nn.Module]:
    if not isinstance(container, _CONTAINERS):
        return
    children = [child for child in container.children() if _has_parameters(child)]
    counts = Counter(type(child) for child in children)
    for child in children:
        # Layers without parts of their own (the Linears of an MLP) are too small to travel alone.
        if counts[type(child)] > 1 and any(True for _ in child.children()):
            yield child


def _outermost(network: nn.Module, found: list[nn.Module]) -> list[nn.Module]:
    wanted = set(found)
    inner = {part for block in wanted for part in block.modules() if part is not block}
    return [each for each in network.modules() if each in wanted and each not in inner and each is not network]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def num_elements_of(network: nn.Module) -> int:
    """Numbers in all its parameters. Of a copy with fewer blocks these are those of the model that it stands for: what
    is large in the one is large in the other."""
    known: int | None = network.__dict__.get(_STANDS_FOR)
    return sum(each.numel() for each in network.parameters()) if known is None else known


def stand_for(network: nn.Module, num_elements: int) -> None:
    """Let ``network`` stand for one with ``num_elements`` numbers in all its parameters."""
    network.__dict__[_STANDS_FOR] = num_elements
