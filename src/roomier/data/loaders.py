"""Functions that recognize loaders and distinguish a collection of loaders from a list of batches.

[Note: several loaders, or a list of batches]
A list of batches is one loader, but a list of loaders is several loaders. The elements of the list determine its kind:

- A list, tuple or dict that contains a DataLoader or a CombinedLoader, at any depth, is a collection of loaders,
  because DataLoaders and CombinedLoaders are never batches. All other elements must be loaders or lists of batches.
- A list or tuple without a DataLoader or a CombinedLoader is a collection of loaders if each element is a loader
  (:func:`is_loader`).
- A dict without a DataLoader or a CombinedLoader is a collection of loaders if each value is a loader, a collection of
  loaders or a list of batches, and at least one value is not a list of batches.
- Any other list or tuple is a list of batches.

A list, tuple or dict that is passed to ``CombinedLoader`` is always a collection of loaders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from roomier.api.overrides import PACKAGES
from roomier.core.errors import DataError
from roomier.core.log import notice
from roomier.core.ranks import Ranks
from roomier.core.tree import map_tensors

_NEVER_A_LOADER = (Tensor, np.ndarray, str, bytes, Mapping, Set, int, float)
_MOST_LOADERS = 1000  # A larger collection is treated as data and is not searched for loaders.


def is_loader(obj: object) -> bool:
    """Return True if ``obj`` yields batches and cannot be a batch.

    A DataLoader is a loader. Any other object with ``__iter__`` is a loader, with two exceptions. Types that occur in
    batches (tensor, array, list, tuple, mapping, set, text, number) are not loaders. Objects that can move to a device
    (``.to``), such as the batches of graph libraries, are not loaders.
    """
    if isinstance(obj, DataLoader):
        return True
    if isinstance(obj, (list, tuple, *_NEVER_A_LOADER)) or callable(getattr(obj, "to", None)):
        return False
    return isinstance(obj, Iterable)


def is_combined(obj: object) -> bool:
    """Return True if ``obj`` is a CombinedLoader of roomier or Lightning."""
    return any(
        kind.__name__ == "CombinedLoader" and f"{kind.__module__}.".startswith(("roomier.data.", *PACKAGES))
        for kind in type(obj).__mro__
    )


def is_loader_collection(obj: object) -> bool:
    """Return True if ``obj`` is a collection of loaders; see [Note: several loaders, or a list of batches]."""
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
    """Return ``loaders`` with ``function`` applied to each loader.

    Args:
        function: function that receives one loader and returns its replacement.
        loaders: one loader, or lists, tuples and dicts of loaders. A list, tuple or dict at the top level always counts
            as several loaders.
    """

    def is_leaf(each: Any) -> bool:
        return _is_lone(each) or not (each is loaders or is_loader_collection(each))

    return map_tensors(function, loaders, is_leaf)


def _is_lone(obj: object) -> bool:
    return not isinstance(obj, (Mapping, list, tuple))


def loaders_in(loaders: Any, name: str) -> dict[str, Any]:
    """Return a dict of the loaders in ``loaders``, in the same order. The keys are paths, such as
    ``"train_dataloaders['a']"``.

    Raises:
        DataError: there is no loader, an object is neither a loader nor a list of batches, or one of the loaders is a
            CombinedLoader.
    """
    found = dict(_named(loaders, name, is_top=True))
    if not found:
        raise DataError(name, loaders, "contains no loaders", "Pass at least one DataLoader")
    for each, loader in found.items():
        if is_combined(loader):
            action = "Combine all loaders in one CombinedLoader: CombinedLoader([[a, b], c], mode)"
            raise DataError(each, loader, "is a CombinedLoader among several loaders", action)
        check_gives_batches(loader, each)
    return found


def _named(obj: Any, name: str, *, is_top: bool = False) -> Iterator[tuple[str, Any]]:
    if _is_lone(obj) or not (is_top or is_loader_collection(obj)):
        yield name, obj
        return
    for key, value in obj.items() if isinstance(obj, Mapping) else enumerate(obj):
        yield from _named(value, f"{name}[{key!r}]")


def check_gives_batches(obj: object, name: str) -> None:
    """Check that ``obj`` is a loader or a list of batches.

    Raises:
        DataError: ``obj`` is neither. The message suggests a valid argument.
    """
    if isinstance(obj, Dataset) and not isinstance(obj, IterableDataset):
        raise DataError(
            name, obj, "is a dataset, not a loader", "Pass torch.utils.data.DataLoader(dataset, batch_size=8)"
        )
    packages = {kind.__module__.partition(".")[0] for kind in type(obj).__mro__}
    if not isinstance(obj, (list, tuple, DataLoader)) and "datasets" in packages:
        action = "Pass DataLoader(dataset.with_format('torch'), batch_size=8), or add collate_fn for texts"
        raise DataError(
            name, obj, "is a dataset of the datasets package, which yields samples instead of batches", action
        )
    if isinstance(obj, Mapping):
        problem = "is a dict with values that are not loaders" if obj else "is an empty dict"
        raise DataError(name, obj, problem, "Pass a loader, a list of batches, or a dict of DataLoaders")
    if isinstance(obj, (list, tuple)) or is_loader(obj):
        return
    if isinstance(obj, type):
        raise DataError(name, obj, "is a class", f"Pass an instance of it: {obj.__name__}(...)")
    action = "Pass a DataLoader, a list of batches, or an object whose __iter__ yields batches"
    raise DataError(name, obj, f"is a {type(obj).__name__}, which yields no batches", action)


def list_of_set(loaders: Set[Any], name: str, ranks: Ranks) -> list[Any]:
    """Return the batches or loaders of a set as a list, and print a notice that the order of a set is not defined.

    Raises:
        DataError: several ranks share the data, and the order can differ between ranks.
    """
    action = "Pass a list"
    if not ranks.is_alone:
        raise DataError(name, loaders, "is a set, whose order can differ between ranks", action)
    notice(f"{name}: the order of a set is not defined, so a resumed run can read different batches. {action}")
    return list(loaders)
