"""Blocks of a model: the units of all-gather, recomputation and offloading.

A block is a module that repeats along the depth of a model, such as a transformer layer. A model can declare its
blocks. Hugging Face models declare their blocks in ``_no_split_modules``. In other models, blocks are inferred.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from roomier.core.errors import RoomierError

_STANDS_FOR = "_roomier_num_elements"
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_blocks(network: nn.Module) -> list[nn.Module]:
    """Return the outermost blocks of ``network`` in the order of registration; an empty list if no module repeats.

    If ``network`` neither defines ``model_blocks()`` nor contains a Hugging Face model, the blocks are the modules that
    have parameters and belong to a ``ModuleList``, ``ModuleDict`` or ``Sequential`` with at least two modules of the
    same class.

    Raises:
        RoomierError: a declared block is not a submodule of ``network``.
    """
    declared = getattr(network, "model_blocks", None)
    if callable(declared):
        return _declared(network, list(declared()))
    # The Hugging Face model may be an attribute of another module, and fully_shard inserts a class before the user's.
    names = {name for each in network.modules() for name in getattr(each, "_no_split_modules", None) or ()}
    if names:
        named = [each for each in network.modules() if names & {cls.__name__ for cls in type(each).__mro__}]
        found = [each for each in named if _has_parameters(each)]
    else:
        found = [each for container in network.modules() for each in _repeated_in(container)]
    return _outermost(network, found)


def open_blocks(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return ``blocks``, but the inner blocks in place of a block that consists of blocks, such as a stage of Swin.

    Inner blocks contain several levels of modules, which excludes the experts of a mixture.
    """
    opened: list[nn.Module] = []
    for block in blocks:
        members = [each for container in (block, *block.children()) for each in _repeated_in(container)]
        inner = [each for each in members if any(_has_parameters(p) for c in each.children() for p in c.children())]
        if isinstance(block, (nn.ModuleList, nn.ModuleDict)):  # never called
            inner = [each for each in block.children() if _has_parameters(each)]
        opened += open_blocks(inner) if inner else [block]
    return opened


def _declared(network: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    known = set(network.modules())
    for block in blocks:
        if block not in known:
            action = "Return submodules of the model, such as list(self.layers)"
            raise RoomierError("model_blocks", type(block).__name__, "must be a submodule of the model", action)
    return _outermost(network, blocks)


def _repeated_in(container: nn.Module) -> Iterator[nn.Module]:
    if not isinstance(container, _CONTAINERS):
        return
    children = [child for child in container.children() if _has_parameters(child)]
    counts = Counter(type(child) for child in children)
    for child in children:
        # Layers without submodules, such as the linear layers of an MLP, are too small to be separate units.
        if counts[type(child)] > 1 and any(True for _ in child.children()):
            yield child


def _outermost(network: nn.Module, found: list[nn.Module]) -> list[nn.Module]:
    wanted = set(found)
    inner = {part for block in wanted for part in block.modules() if part is not block}
    return [each for each in network.modules() if each in wanted and each not in inner and each is not network]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def num_elements_of(network: nn.Module) -> int:
    """Return the number of elements in all parameters of ``network``.

    For a copy with fewer blocks, the result is the number of elements of the original model, so the same layers are
    considered large.
    """
    known: int | None = network.__dict__.get(_STANDS_FOR)
    return sum(each.numel() for each in network.parameters()) if known is None else known


def represent_larger(network: nn.Module, num_elements: int) -> None:
    """Make :func:`num_elements_of` return ``num_elements`` for ``network``, which represents a larger model."""
    network.__dict__[_STANDS_FOR] = num_elements
