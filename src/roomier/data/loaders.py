"""What a user may pass as loaders, told apart by form."""

from collections.abc import Iterable, Mapping, Set
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from roomier.core.errors import DataError

_NEVER_A_LOADER = (Tensor, np.ndarray, str, bytes, Mapping, Set, int, float)


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


def is_loader_collection(obj: object) -> bool:
    """Whether ``obj`` is several loaders: a list, tuple or dict, not empty, whose elements are all loaders.

    Any other list or tuple is one loader: a list of batches.
    """
    if isinstance(obj, Mapping):
        return bool(obj) and all(is_loader(value) for value in obj.values())
    return isinstance(obj, (list, tuple)) and bool(obj) and all(is_loader(element) for element in obj)


def as_loaders(obj: Any, name: str) -> list[Any]:
    """The loaders of an evaluation in their order; ``dataloader_idx`` of a hook counts in this list.

    Args:
        obj: one loader, a list of batches, several loaders (:func:`is_loader_collection`; of a dict, the
            values in its order), or None for none.
        name: what the user calls it, for the error.

    Raises:
        DataError: ``obj`` gives no batches.
    """
    if obj is None:
        return []
    if is_loader_collection(obj):
        return list(obj.values()) if isinstance(obj, Mapping) else list(obj)
    check_gives_batches(obj, name)
    return [obj]


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
    raise DataError(
        name,
        obj,
        f"is a {type(obj).__name__}, which gives no batches",
        "Pass a DataLoader, a list of batches, or an object whose __iter__ gives batches",
    )
