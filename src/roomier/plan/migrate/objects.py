"""Access to the classes and settings of objects from other libraries, without importing these libraries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roomier.core.errors import PlanError

_LIBRARIES = ("lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "torch")


def kind_of(value: object, known: Mapping[str, Any], field: str) -> str | None:
    """Return the name of the class of ``value`` if the name is in ``known``; otherwise, None.

    Raises:
        PlanError: ``value`` is an instance of a subclass. roomier would not call the methods of the subclass.
    """
    own, *bases = [each.__name__ for each in type(value).__mro__]
    if own in known:
        return own
    base = next((each for each in bases if each in known), None)
    is_of_library = type(value).__module__.partition(".")[0] in _LIBRARIES
    if base is None or is_of_library:
        return None
    problem = f"is an instance of a subclass of {base}, and roomier does not call the methods of the subclass"
    raise PlanError(field, value, problem, f"Pass a {base}, and move the overridden methods to a callback")


def setting_of(value: object, *attributes: str) -> Any:
    """Return the value of the first of ``attributes`` that ``value`` has and that is not None; otherwise, None."""
    return next((found for name in attributes if (found := getattr(value, name, None)) is not None), None)


def name_of(value: object) -> str:
    """Return the name of a function, class, enum member or dtype, such as ``"bfloat16"`` for ``torch.bfloat16``."""
    text = getattr(value, "__name__", None) or getattr(value, "name", None)
    return str(text if isinstance(text, str) else value).removeprefix("torch.")
