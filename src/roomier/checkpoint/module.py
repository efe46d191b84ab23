"""A module back from a checkpoint: its hyperparameters, then its weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from roomier.api.module import Module
from roomier.checkpoint.verbs import load, peek
from roomier.core.errors import CheckpointError

AnyModule = TypeVar("AnyModule", bound=Module)


def load_module(
    cls: type[AnyModule], path: str | Path, *, strict: bool, init_arguments: Mapping[str, Any]
) -> AnyModule:
    """Behind :meth:`roomier.Module.load_from_checkpoint`, which tells the arguments.

    Raises:
        CheckpointError: damaged; ``cls`` cannot be made from what is stored; or its weights have other names
            or shapes (with ``strict=False``, other shapes only).
    """
    stored = {**peek(path).get("hyperparameters", {}), **init_arguments}
    try:
        module = cls(**stored)
    except TypeError as error:
        raise CheckpointError(
            "checkpoint_path",
            str(path),
            f"{cls.__name__} cannot be made from the stored hyperparameters {sorted(stored)} ({error})",
            "Pass the missing arguments to load_from_checkpoint, and call save_hyperparameters in __init__",
        ) from error
    module.configure_model()
    weights = module.state_dict()
    if strict:
        load(path, into={"module": weights}, only=("module",))
    else:
        found = load(path, only=("module",))["module"]
        module.load_state_dict(found, strict=False)
    return module
