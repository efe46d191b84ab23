"""Functions that validate plain data from a file. A *form* checks the types, keys and ranges of values.

A form is a function ``form(value, place)`` that raises :class:`FormError` if the value is invalid. ``place`` names the
value within the file. Larger forms are built from smaller forms::

    position = fields({"epoch": count, "shuffle": flag})
    position({"epoch": -1, "shuffle": True}, "data")  # data.epoch is -1, but must be an integer from 0 to ...

A form checks the type of a value before it uses the value, so it can check data from any source.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, TypeAlias

from roomier.core.errors import shorten

Form: TypeAlias = Callable[[Any, str], None]

MAX_COUNT = 2**53
"""Largest count that is accepted. Every integer up to this count can be represented exactly as a float64."""

_SHOWN_CHARS = 60


class FormError(ValueError):
    """Error for a value that does not match its form.

    Args:
        place: location of the value in its file, such as ``progress.global_step``.
        value: the invalid value, as read from the file.
        constraint: text that follows "must be" in the message.
    """

    def __init__(self, place: str, value: object, constraint: str) -> None:
        self.place, self.value, self.constraint = place, value, constraint
        super().__init__(f"{place} is {shorten(value, _SHOWN_CHARS)}, but must be {constraint}")

    def within(self, place: str) -> FormError:
        """Return this error with its place prefixed by ``place``, the place of the container that holds the value."""
        return FormError(item_of(place, self.place), self.value, self.constraint)


def item_of(place: str, key: object) -> str:
    """Return the place of an item in a container: ``a.b`` for a key that is an identifier, otherwise ``a['x.y']`` or
    ``a[0]``.
    """
    return f"{place}.{key}" if isinstance(key, str) and key.isidentifier() else f"{place}[{shorten(key, _SHOWN_CHARS)}]"


def place_of(path: Iterable[object]) -> str:
    """Return the place of the value at ``path``, which consists of a name and the keys that lead to the value."""
    name, *keys = path
    return reduce(item_of, keys, str(name))


def anything(value: Any, place: str) -> None:
    """Accept every value."""


def flag(value: Any, place: str) -> None:
    """Accept True and False."""
    if type(value) is not bool:
        raise FormError(place, value, "true or false")


def text(value: Any, place: str) -> None:
    """Accept a string."""
    if type(value) is not str:
        raise FormError(place, value, "a string")


def number(value: Any, place: str) -> None:
    """Accept an integer or a float, including infinities and NaN."""
    if type(value) not in (int, float):
        raise FormError(place, value, "a number")


def integer(at_least: int = 0, at_most: int = MAX_COUNT) -> Form:
    """Accept an integer from ``at_least`` to ``at_most``, inclusive."""

    def form(value: Any, place: str) -> None:
        if type(value) is not int or not at_least <= value <= at_most:
            raise FormError(place, value, f"an integer from {at_least} to {at_most}")

    return form


count = integer()


def finite(value: Any, place: str) -> None:
    """Accept an integer or a float that is neither infinite nor NaN."""
    if type(value) not in (int, float) or not math.isfinite(value):
        raise FormError(place, value, "a finite number")


def one_of(*allowed: object) -> Form:
    """Accept a value that equals an element of ``allowed`` and has the same type."""

    def form(value: Any, place: str) -> None:
        if not any(type(value) is type(each) and value == each for each in allowed):
            raise FormError(place, value, f"one of {', '.join(map(repr, allowed))}")

    return form


def either(*forms: Form) -> Form:
    """Accept values that match any of ``forms``. If none matches, raise the error of the last form."""

    def form(value: Any, place: str) -> None:
        for each in forms[:-1]:
            try:
                return each(value, place)
            except FormError:
                continue
        return forms[-1](value, place)

    return form


def optional(form: Form) -> Form:
    """Accept None and the values that ``form`` accepts."""
    return lambda value, place: None if value is None else form(value, place)


def list_of(form: Form) -> Form:
    """Accept a list or tuple whose items match ``form``."""

    def check(value: Any, place: str) -> None:
        if type(value) not in (list, tuple):
            raise FormError(place, value, "a list")
        for index, item in enumerate(value):
            form(item, f"{place}[{index}]")

    return check


def items(*forms: Form) -> Form:
    """Accept a list or tuple that contains one item for each of ``forms``."""

    def check(value: Any, place: str) -> None:
        if type(value) not in (list, tuple) or len(value) != len(forms):
            raise FormError(place, value, f"a list of {len(forms)} items")
        for index, (form, item) in enumerate(zip(forms, value, strict=True)):
            form(item, f"{place}[{index}]")

    return check


def mapping_of(form: Form, keys: Form = text) -> Form:
    """Accept a dict whose keys match the form ``keys`` and whose values match ``form``."""

    def check(value: Any, place: str) -> None:
        if type(value) is not dict:
            raise FormError(place, value, "a mapping")
        for key, item in value.items():
            keys(key, f"a key of {place}")
            form(item, item_of(place, key))

    return check


def fields(required: Mapping[str, Form], others: Mapping[str, Form] | Form | None = None) -> Form:
    """Accept a dict that has every key of ``required``.

    Args:
        others: forms of the additional keys that are allowed. A single form allows any additional keys with values that
            match this form. None allows no additional keys.
    """

    def check(value: Any, place: str) -> None:
        if type(value) is not dict:
            raise FormError(place, value, "a mapping")
        for key in required:
            if key not in value:
                raise FormError(place, sorted(map(str, value)), f"a mapping with the key {key!r}")
        for key, item in value.items():
            form = required.get(key) or (others.get(key) if isinstance(others, Mapping) else others)
            if form is None:
                allowed = sorted({*required, *(others if isinstance(others, Mapping) else ())})
                raise FormError(f"a key of {place}", key, f"one of {allowed}")
            form(item, item_of(place, key))

    return check


def tensor(dtype: object = None, shape: Sequence[int] | None = None) -> Form:
    """Accept a tensor, or the description of a tensor that was not read. If ``dtype`` or ``shape`` is given, the tensor
    must match it.
    """

    def form(value: Any, place: str) -> None:
        own_dtype, own_shape = getattr(value, "dtype", None), getattr(value, "shape", None)
        if own_dtype is None or own_shape is None:
            raise FormError(place, value, "a tensor")
        if dtype not in (None, own_dtype) or shape not in (None, tuple(own_shape)):
            wanted = f"{'a' if dtype is None else dtype} tensor" + ("" if shape is None else f" of shape {list(shape)}")
            raise FormError(place, f"{own_dtype}{list(own_shape)}", wanted)

    return form


def like(own: Any) -> Form:
    """Accept values that can replace ``own``: a number for a number, a list for a list, and so on.

    If ``own`` is None, every value that is not a container is accepted. Each item of a list must match the first item
    of ``own``. A mapping must have the keys of ``own`` and may have additional keys.
    """
    if own is None:
        return _scalar
    if isinstance(own, bool):
        return optional(flag)
    if isinstance(own, (int, float)):
        return either(tensor(shape=()), number)
    if isinstance(own, str):
        return text
    if isinstance(own, (list, tuple)):
        return list_of(like(own[0]) if own else anything)
    if isinstance(own, Mapping):
        if not all(isinstance(key, str) for key in own):
            return mapping_of(anything, keys=anything)
        return fields({key: like(item) for key, item in own.items()}, others=anything)
    return either(number, tensor()) if hasattr(own, "dtype") else anything


def _scalar(value: Any, place: str) -> None:
    if not (value is None or type(value) in (bool, int, float, str)):
        raise FormError(place, value, "a number, a string, true, false or null")
