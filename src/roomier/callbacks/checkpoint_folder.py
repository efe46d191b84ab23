"""Names of checkpoints, such as ``"{epoch}-{val_loss:.2f}"`` -> ``"epoch=3-val_loss=0.12"``, and functions that list,
find and remove the checkpoints in a folder."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from string import Formatter

from torch import Tensor

from roomier import checkpoint
from roomier.callbacks.monitored import scalar
from roomier.checkpoint.commit import at_home, names_being_written
from roomier.checkpoint.lightning import is_lightning_file
from roomier.checkpoint.record import RECORD_NAME
from roomier.checkpoint.uploads import Uploads
from roomier.core.errors import CheckpointError, RoomierError
from roomier.core.paths import protocol_of
from roomier.storage.mirror import local_of, remote_of

DEFAULT_TEMPLATE = "{epoch}-{step}"


def check_template(template: str) -> str:
    """Check that ``template`` can be filled in and return ``template``.

    Raises:
        RoomierError: the template is empty, contains a slash, or has an invalid field or format.
    """
    action = "Use a folder name such as '{epoch}-{step}-{val_loss:.3f}', and set the parent folder with dirpath"
    if not isinstance(template, str) or not template.strip() or template in (".", ".."):
        raise RoomierError("filename", template, "must be the name of a folder", action)
    try:
        fields = list(Formatter().parse(template))
        metrics = {field: 0.5 for _, field, _, _ in fields if field}
        format_name(template, {**metrics, "epoch": 0, "step": 0})
    except ValueError as error:
        raise RoomierError("filename", template, f"is not a valid template ({error})", action) from error
    if any("/" in literal for literal, *_ in fields):
        raise RoomierError("filename", template, "must be the name of a folder, not a path", action)
    if any(field == "" or conversion for _, field, _, conversion in fields):
        raise RoomierError("filename", template, "must contain a name in each pair of braces", action)
    return template


def metrics_named_in(template: str) -> list[str]:
    """Return the names of the logged metrics that ``template`` contains."""
    fields = {field: None for _, field, _, _ in Formatter().parse(template) if field}
    return [field for field in fields if field not in ("epoch", "step")]


def format_name(template: str, metrics: Mapping[str, Tensor | float], auto_insert_metric_name: bool = True) -> str:
    """Fill in ``template`` with ``epoch``, ``step`` and metrics.

    Args:
        metrics: values by name, including ``epoch`` and ``step``. A metric that was not logged is written as ``none``.
        auto_insert_metric_name: if True, write the name of each field in front of its value, for example ``step=100``
            for ``{step}``. A slash in the name of a metric is replaced with ``_``, because a checkpoint is one folder.
    """
    parts = []
    for literal, field, spec, _ in Formatter().parse(template):
        parts.append(literal)
        if field is None:
            continue
        if field not in metrics:
            value = "none"
        elif field in ("epoch", "step"):
            value = format(int(scalar(metrics[field])), spec or "")
        else:
            value = format(scalar(metrics[field]), spec or "")
        text = f"{field}={value}" if auto_insert_metric_name else value
        parts.append(text.replace("/", "_"))
    return "".join(parts)


def first_free_name(name: str, taken: Container[str], suffix: str = "") -> str:
    """Return the first of ``name``, ``name-v1``, ``name-v2``, ..., each with ``suffix``, that is not in ``taken``."""
    names = chain([name], (f"{name}-v{version}" for version in count(1)))
    return next(each + suffix for each in names if each + suffix not in taken)


def names_in(folder: Path, *, also_remote: bool = False) -> tuple[str, ...]:
    """Return the sorted names of the entries in ``folder``, without links and hidden entries.

    Args:
        also_remote: True to include the entries in remote storage if ``folder`` is a mirror.
    """
    remote = remote_of(folder) if also_remote else None
    entries = [path for each in (folder, remote) if each is not None and each.is_dir() for path in each.iterdir()]
    return tuple(sorted({path.name for path in entries if not path.is_symlink() and not path.name.startswith(".")}))


def choose_name(
    folder: Path, name: str, kept: set[str], own: set[str], foreign: Iterable[str], suffix: str = ""
) -> tuple[str, tuple[str, ...]]:
    """Choose the name of the next checkpoint in ``folder`` and add this name to ``own``.

    Args:
        name: name to use if it is free.
        kept: names that this run must not replace.
        own: names that this run can replace.
        foreign: known checkpoint names of other runs.
        suffix: suffix of the name of a checkpoint file; empty for a checkpoint folder.

    Returns:
        A pair: the chosen name (``name``, or the first free name of ``name-v1``, ``name-v2``, ...), and the names of
            all checkpoints of other runs.
    """
    complete = {each for each in names_in(folder) if each not in own and _is_checkpoint(folder / each)}
    others = names_being_written(folder).union(complete).difference(own, kept).union(foreign)
    chosen = first_free_name(name, kept | others, suffix)
    own.add(chosen)
    return chosen, tuple(sorted(others))


def _is_checkpoint(path: Path) -> bool:
    return (path / RECORD_NAME).is_file() or is_lightning_file(path)


def remove_saved(path: str, uploads: Uploads | None, *, is_file: bool = False) -> None:
    """Remove the checkpoint folder ``path`` if it exists, or the checkpoint file ``path`` if ``is_file`` is True, and
    its copy in remote storage.

    Args:
        uploads: the uploads of the run, or None.

    Raises:
        CheckpointError: the folder cannot be removed.
        OSError: the file cannot be removed.
    """
    if os.path.isdir(path):
        checkpoint.remove(path)
    elif is_file and os.path.isfile(path):
        os.unlink(path)
    if uploads is not None:
        uploads.remove(Path(path))


def local_text(path: str) -> str:
    """Return the path of the mirror if ``path`` is an address, otherwise ``path``."""
    return str(local_of(at_home(path))) if protocol_of(path) else path


def find_complete(name: str, folders: list[str]) -> str:
    """Return the path of the complete checkpoint ``name`` in the first folder that contains it; ``""`` if none does."""
    for folder in folders if name else ():
        path = os.path.join(folder, local_text(name))
        if os.path.islink(path):  # the link "last", which other checkpoints may replace
            path = os.path.join(os.path.dirname(path), os.readlink(path))
        if is_lightning_file(path):  # a single file, which peek does not support
            return path
        for copy in (path, remote_of(path)):
            with suppress(CheckpointError):
                if copy is not None:
                    checkpoint.peek(copy)
                    return path
    return ""
