"""The run of Ray Train whose function this process executes."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from roomier.core.errors import RoomierError

_SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://"}  # by the type of Arrow's file system


@dataclass(frozen=True)
class RayRun:
    """A run of Ray Train.

    Attributes:
        name: ``RunConfig(name=...)``, which stays the same when Ray restarts the workers.
        folder: folder or address of the run in the storage of Ray; None if roomier does not support this storage.
    """

    name: str
    folder: str | None


def ray_run() -> RayRun | None:
    """Return the run of Ray Train whose function this process executes; None if this process is not its worker."""
    train = sys.modules.get("ray.train")  # Ray imports it in each worker
    if train is None:
        return None
    try:
        context = train.get_context()
        storage = context.get_storage()
    except (RuntimeError, NotImplementedError, DeprecationWarning):  # also in local mode and in Ray Tune
        return None
    if storage is None:  # outside of a worker, the earlier version of Ray Train only warns
        return None
    scheme = _SCHEMES.get(storage.storage_filesystem.type_name)
    return RayRun(context.get_experiment_name(), None if scheme is None else scheme + storage.experiment_fs_path)


def default_root() -> str:
    """Return the default folder of the run folders: the folder of the run in the storage of Ray, or ``"runs"`` in a
    process that is not a worker of Ray Train.

    Raises:
        RoomierError: roomier does not support the storage of Ray.
    """
    run = ray_run()
    if run is None:
        return "runs"
    if run.folder is None:
        action = "Pass the address of a folder that all workers can access"
        raise RoomierError("default_root_dir", None, "roomier does not support the storage of this Ray run", action)
    return run.folder
