"""What a user may pass as loaders, told apart by form.

[Note: several loaders, or a list of batches]
A list of batches is a loader, and a list of loaders is several. They are told apart by what they hold:

- What holds a DataLoader (or a CombinedLoader), at any depth of lists, tuples and dicts, is several loaders: nobody
  means a DataLoader as a batch. All else in it must be loaders or lists of batches.
- Without one, a list or tuple is several loaders where each element is a loader by its form (:func:`is_loader`);
  a dict where each value is a loader, several loaders or a list of batches, and not all are lists.
- Any other list or tuple is a list of batches.

``CombinedLoader(loaders, mode)`` says it in so many words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from roomier.api.overrides import PACKAGES
from roomier.core.errors import DataError
from roomier.core.tree import map_tensors

_NEVER_A_LOADER = (Tensor, np.ndarray, str, bytes, Mapping, Set, int, float)
_MOST_LOADERS = 1000  # what has more elements is data: it is not searched for loaders


def is_loader(obj: object) -> bool:
    """Whether ``obj`` gives batches and cannot be a batch itself.

    A DataLoader is a loader. So is any other object with ``__iter__``, unless it is what batches are made of
    (tensor, array, list, tuple, mapping, set, text, number) or can move itself to a device (``.to``), as the
    batches of graph libraries do.
    """
    if isinstance(obj, DataLoader):
        return True
    if isinstance(obj, (list, tuple, *_NEVER_A_LOADER)) or callable(getattr(obj, "to", None)):
        return False
    return isinstance(obj, Iterable)


def is_combined(obj: object) -> bool:
    """Whether ``obj`` is a CombinedLoader, roomier's or Lightning's."""
    return any(
        kind.__name__ == "CombinedLoader" and f"{kind.__module__}.".startswith(("roomier.data.", *PACKAGES))
        for kind in type(obj).__mro__
    )


def is_loader_collection(obj: object) -> bool:
    """Whether ``obj`` is several loaders: see [Note: several loaders, or a list of batches]."""
    if not isinstance(obj, (Mapping, list, tuple)) or not obj:
        return False
    if _holds_data_loader(obj):
        return True
    if isinstance(obj, Mapping):
        is_one = [is_loader(value) or is_loader_collection(value) for value in obj.values()]
        return any(is_one) and all(
            known or isinstance(value, (list, tuple)) for known, value in zip(is_one, obj.values(), strict=True)
        )
    return all(is_loader(element) for element in obj)


def _holds_data_loader(obj: object) -> bool:
    if isinstance(obj, DataLoader) or is_combined(obj):
        return True
    if not isinstance(obj, (Mapping, list, tuple)) or len(obj) > _MOST_LOADERS:
        return False
    return any(map(_holds_data_loader, obj.values() if isinstance(obj, Mapping) else obj))


def map_loaders(function: Callable[[Any], Any], loaders: Any) -> Any:
    """``loaders``, lists, tuples and dicts of them, or one, with ``function`` applied to each loader.

    What stands at the top is taken for several, whatever is in it.
    """

    def is_leaf(each: Any) -> bool:
        return _is_lone(each) or not (each is loaders or is_loader_collection(each))

    return map_tensors(function, loaders, is_leaf)


def _is_lone(obj: object) -> bool:
    return not isinstance(obj, (Mapping, list, tuple))


def loaders_in(loaders: Any, name: str) -> dict[str, Any]:
    """The loaders in ``loaders``, in their order, by what the user would call them.

    Raises:
        DataError: one of them gives no batches, or there is none.
    """
    found = dict(_named(loaders, name, is_top=True))
    if not found:
        raise DataError(name, loaders, "has no loaders in it", "Pass one DataLoader at least")
    for each, loader in found.items():
        if is_combined(loader):
            action = "Join all loaders in one: CombinedLoader([[a, b], c], mode)"
            raise DataError(each, loader, "is a CombinedLoader within several loaders", action)
        check_gives_batches(loader, each)
    return found


def _named(obj: Any, name: str, *, is_top: bool = False) -> Iterator[tuple[str, Any]]:
    if _is_lone(obj) or not (is_top or is_loader_collection(obj)):
        yield name, obj
        return
    for key, value in obj.items() if isinstance(obj, Mapping) else enumerate(obj):
        yield from _named(value, f"{name}[{key!r}]")


def check_gives_batches(obj: object, name: str) -> None:
    """Refuse what is neither a loader nor a list of batches.

    Raises:
        DataError: says what to pass instead.
    """
    if isinstance(obj, Dataset) and not isinstance(obj, IterableDataset):
        raise DataError(
            name, obj, "is a dataset, not a loader", "Wrap it: torch.utils.data.DataLoader(dataset, batch_size=8)"
        )
    if isinstance(obj, Mapping):
        problem = "is a dict whose values are not all loaders" if obj else "is an empty dict"
        raise DataError(name, obj, problem, "Pass a loader, a list of batches, or a dict of DataLoaders")
    if isinstance(obj, (list, tuple)) or is_loader(obj):
        return
    if isinstance(obj, type):
        raise DataError(name, obj, "is a class", f"Make an object of it: {obj.__name__}(...)")
    raise DataError(
        name,
        obj,
        f"is a {type(obj).__name__}, which gives no batches",
        "Pass a DataLoader, a list of batches, or an object whose __iter__ gives batches",
    )
