"""Check the arguments of ModelCheckpoint, and suggest replacements for removed arguments."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from roomier.core.errors import RoomierError

LAST = "last"
FORMER = {
    "period": "Use every_n_epochs",
    "every_n_val_epochs": "Use every_n_epochs",
    "prefix": "Put it into filename",
    "save_best_only": "Use save_top_k=1 and monitor",
}


def check_arguments(of: Any) -> None:
    """Check the arguments of a ModelCheckpoint.

    Args:
        of: the callback.

    Raises:
        RoomierError: an argument is invalid.
    """
    if of.save_last not in (None, True, False, "link"):
        raise _wrong("save_last", of.save_last, "is unknown", "Use True, False, or 'link' (the same as True)")
    if of.format not in ("folder", "lightning"):
        raise _wrong("format", of.format, "is unknown", "Use 'folder', or 'lightning' for .ckpt files")
    if of._keep.last and of.filename == LAST:
        raise _wrong("filename", LAST, "is the name of the link that save_last creates", "Choose another name")
    if not _is_count(of.save_top_k, at_least=-1):
        raise _wrong("save_top_k", of.save_top_k, "must be an integer of at least -1", "Use -1 (all) or 0 (none)")
    if of.monitor is None and of.save_top_k > 1:
        problem = "must be at most 1 if monitor is not set"
        raise _wrong("save_top_k", of.save_top_k, problem, "Set monitor, or use -1 or 1")
    for field in ("every_n_train_steps", "every_n_epochs"):
        value = getattr(of, field)
        if value is not None and not _is_count(value, at_least=0):
            raise _wrong(field, value, "must be a non-negative integer", "Use a positive integer, or 0 to disable")
    given = {
        "every_n_train_steps": of.every_n_train_steps,
        "every_n_epochs": of.every_n_epochs,
        "train_time_interval": of.train_time_interval,
    }
    chosen = {name: value for name, value in given.items() if value or isinstance(value, timedelta)}
    if len(chosen) > 1:
        raise _wrong(" and ".join(chosen), chosen, "cannot be combined", "Use two ModelCheckpoints")


def _wrong(field: str, received: object, problem: str, action: str) -> RoomierError:
    return RoomierError(f"ModelCheckpoint({field})", received, problem, action)


def _is_count(value: object, *, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least
