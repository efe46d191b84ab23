"""Search for layers whose weight another module reads without calling the layer.

``fully_shard`` all-gathers the weights of a unit when the ``forward`` of the unit is called. A weight that another
``forward`` reads as ``self.table.weight``, as DeBERTa reads its table of relative positions, must therefore belong to a
unit that is already unsharded at this time. Such layers are found in the bytecode of the ``forward`` methods and of the
methods that they call.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Hashable, Iterator
from functools import cache
from types import FunctionType

from torch import nn

_STARTS = ("forward", "training_step")
_READS = ("LOAD_ATTR", "LOAD_FAST", "LOAD_METHOD")
# Attributes whose values are the same for a sharded weight (DTensor) and the full weight.
_DESCRIPTIONS = ("dtype", "device", "shape", "ndim", "size")


def layers_read_by_others(network: nn.Module) -> set[nn.Module]:
    """Return the layers of ``network`` whose name precedes ``.weight`` in the code of a ``forward`` method."""
    names = {name for kind in set(map(type, network.modules())) for name in _names_read(kind)}
    return {child for each in network.modules() for name, child in each.named_children() if name in names}


@cache
def _names_read(kind: Hashable) -> frozenset[str]:
    """Return the names that precede ``.weight`` in ``forward`` and ``training_step`` of the class ``kind``, and in the
    methods that these methods can call."""
    if getattr(kind, "__module__", "").startswith("torch."):
        return frozenset()
    pending, seen, found = list(_STARTS), set(_STARTS), set[str]()
    while pending:
        method = getattr(kind, pending.pop(), None)
        method = inspect.unwrap(method) if callable(method) else None
        if not isinstance(method, FunctionType) or method.__module__.startswith("torch."):
            continue
        found.update(_before_weight(method))
        called = [name for name in method.__code__.co_names if name not in seen and hasattr(kind, name)]
        seen.update(called)
        pending += called
    return frozenset(found)


def _before_weight(method: FunctionType) -> Iterator[str]:
    """Yield each name in an expression ``name.weight`` or ``object.name.weight`` that reads the values of the
    weight."""
    names = [each.argval if each.opname.startswith(_READS) else "" for each in dis.get_instructions(method)]
    for before, name, after in zip(names, names[1:], [*names[2:], ""], strict=False):
        if name == "weight" and isinstance(before, str) and before and after not in _DESCRIPTIONS:
            yield before
