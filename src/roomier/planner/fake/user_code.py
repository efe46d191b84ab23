"""Errors of code that runs on fake tensors, told as the user wrote it: where, and what to do."""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from roomier.core import torch_private
from roomier.core.errors import RoomierError, shorten

_INTERNAL = (Path(torch.__file__).parent, Path(__file__).parents[2])
_PYTHON = Path(sysconfig.get_path("stdlib"))
_READS_MEMORY = ("data is not allocated", "not supported for tensor subclasses", "data pointer", "data_ptr")


class DryRunError(RoomierError):
    """A step failed because of what a dry run is: as a run it may well work."""


@contextmanager
def told_where() -> Iterator[None]:
    """What is raised inside becomes a DryRunError that names the last line outside torch and roomier; a RoomierError
    stays as it is."""
    try:
        yield
    except RoomierError:
        raise
    except Exception as error:
        operation = getattr(error, "func", None)
        if isinstance(operation, torch_private.OpOverload):
            problem = f"asks for values of tensors ({operation})"
        elif any(each in str(error) for each in _READS_MEMORY):
            problem = "reads the memory of a tensor (as .numpy() and .data_ptr() do)"
        else:
            problem = f"raises {type(error).__name__}: {shorten(str(error).splitlines()[0] if str(error) else '')}"
        place = _place_of(error)
        problem += f"{place and ' at '}{place}, in a dry run, whose tensors have shapes and no values"
        action = "Name a strategy and measure a step of it, or let what the step does depend on shapes alone"
        raise DryRunError("model", type(error).__name__, problem, action) from error


def reason_of(error: Exception) -> str:
    """What something that failed does, in a line: ``"raises KeyError: ..."``."""
    if isinstance(error, RoomierError):
        return error.problem
    first, *_ = str(error).splitlines() or [""]
    return f"raises {type(error).__name__}: {first[:120]}"


def _place_of(error: BaseException) -> str:
    """``file:line (code)`` of the innermost line that is neither torch's nor roomier's; empty where there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        is_python = path.is_relative_to(_PYTHON) and "site-packages" not in path.parts
        if path.exists() and not is_python and not any(path.is_relative_to(each) for each in _INTERNAL):
            code = linecache.getline(frame.filename, frame.lineno or 0).strip()
            return f"{path}:{frame.lineno} ({code})"
    return ""
