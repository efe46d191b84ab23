"""Errors of user code in a dry run, which contain the line in the user's file and a recommended action."""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from roomier.core import torch_private
from roomier.core.errors import NoForecastError, RoomierError, shorten

_INTERNAL = (Path(torch.__file__).parent, Path(__file__).parents[2])
_PYTHON = Path(sysconfig.get_path("stdlib"))
_READS_MEMORY = ("data is not allocated", "not supported for tensor subclasses", "data pointer", "data_ptr")


class DryRunError(NoForecastError):
    """Error for a step that failed in a dry run. The same step may succeed in a run."""


@contextmanager
def locating_errors() -> Iterator[None]:
    """Return a context that converts an error to a DryRunError, which contains the innermost line of code outside torch
    and roomier.

    A RoomierError is raised unchanged.
    """
    try:
        yield
    except RoomierError:
        raise
    except Exception as error:
        operation = getattr(error, "func", None)
        if isinstance(operation, torch_private.OpOverload):
            problem = f"reads values of tensors ({operation})"
        elif any(each in str(error) for each in _READS_MEMORY):
            problem = "reads the memory of a tensor, as .numpy() and .data_ptr() do"
        else:
            problem = f"raises {type(error).__name__}: {shorten(str(error).splitlines()[0] if str(error) else '')}"
        place = _place_of(error)
        problem += f"{place and ' at '}{place}, in a dry run, in which tensors have shapes but no values"
        action = "Set a strategy and measure a step, or make the step depend only on shapes"
        raise DryRunError("model", type(error).__name__, problem, action) from error


class UnexpectedStepError(Exception):
    """Raised if a step does not have the form that a fast method of the planner assumes. The message is a predicate
    whose subject is the step."""


def reason_of(error: Exception) -> str:
    """Return a one-line description of an error, such as ``"raises KeyError: ..."``."""
    if isinstance(error, RoomierError):
        return error.problem
    if isinstance(error, UnexpectedStepError):
        return str(error)
    first, *_ = str(error).splitlines() or [""]
    return f"raises {type(error).__name__}: {first[:120]}"


def _place_of(error: BaseException) -> str:
    """Return ``file:line (code)`` of the innermost line of code outside torch and roomier, or an empty string if no
    such line exists."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        is_python = path.is_relative_to(_PYTHON) and "site-packages" not in path.parts
        if path.exists() and not is_python and not any(path.is_relative_to(each) for each in _INTERNAL):
            code = linecache.getline(frame.filename, frame.lineno or 0).strip()
            return f"{path}:{frame.lineno} ({code})"
    return ""
